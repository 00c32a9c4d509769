"""A cluster that is brought back to one moment as often as a test wants: trainers and keepers dead, bytes as they were.

Also the accidents that happen to those bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from cluster import Cluster, Ended


class Situation:
    def __init__(self, cluster: Cluster, saved: Path) -> None:
        self.cluster, self._saved = cluster, saved
        self._end_keepers()
        _copy(cluster.root, saved / "root")
        for node in cluster.nodes:
            _copy(cluster.memory(node), saved / node)

    def bring_back(self) -> Cluster:
        self._end_keepers()
        _copy(self._saved / "root", self.cluster.root)
        for node in self.cluster.nodes:
            _copy(self._saved / node, self.cluster.memory(node))
        return self.cluster

    def _end_keepers(self) -> None:
        for node in self.cluster.nodes:
            try:
                self.cluster.kill_keeper(node)
            except FileNotFoundError:
                return  # no node has the run any more


def _copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("keeper.sock", "keeper.lock"))


def guests(cluster: Cluster, node: str) -> Path:
    """What others entrusted to a node, and its parity."""
    return cluster.memory(node) / cluster.run() / "guests"


def flip(paths: Iterable[Path]) -> int:
    """One bit in the last third of each: in what it holds, not in what says so."""
    count = 0
    for path in paths:
        data = bytearray(path.read_bytes())
        data[len(data) * 2 // 3] ^= 16
        path.write_bytes(bytes(data))
        count += 1
    assert count, "there is nothing to damage"
    return count


def step_files(folder: Path, step: int, suffix: str) -> list[Path]:
    return sorted(folder.glob(f"*-{step:010d}/*{suffix}"))


def refusal(ended: list[Ended]) -> str:
    """Why all ranks refused: the same on each, and none of them hung."""
    assert not any(one.killed for one in ended), "a rank hung while the others refused"
    said = {one.error.rpartition("everstep.errors.")[2] for one in ended}
    assert len(said) == 1, said
    return said.pop()
