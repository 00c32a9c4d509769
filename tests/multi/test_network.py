"""Keepers in network namespaces of their own, and a cable between two of them that is pulled for ten seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from cluster import Cluster, die_at, results

from everstep import Parity, Partner
from everstep.events import Degraded, Protected, read_events
from everstep.keeper import client
from everstep.keeper.process import environment, keeper_log

CUT_S = 10.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Network:
    """A bridge in a namespace of its own, and a namespace with a cable to it for every node."""

    def __init__(self, nodes: list[str]) -> None:
        self.name = f"ev{os.getpid() % 100000}"
        self.places = {node: (f"{self.name}n{number}", f"10.213.7.{number + 1}") for number, node in enumerate(nodes)}
        ip("netns", "add", self.name)
        self._in_bridge("link", "add", "hub", "type", "bridge")
        self._in_bridge("link", "set", "hub", "up")
        for space, address in self.places.values():
            ip("netns", "add", space)
            self._in_bridge("link", "add", space, "type", "veth", "peer", "name", "wire", "netns", space)
            self._in_bridge("link", "set", space, "master", "hub", "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", space, "link", "set", device, "up")

    def _in_bridge(self, *words: str) -> None:
        ip("-n", self.name, *words)

    def cut(self, node: str) -> None:
        self._in_bridge("link", "set", self.places[node][0], "down")

    def mend(self, node: str) -> None:
        self._in_bridge("link", "set", self.places[node][0], "up")

    def prepare(self, node: str) -> None:
        """Only keepers live there: ranks talk as ever, and to their keepers by a socket in a directory."""
        space, address = self.places[node]
        os.environ["EVERSTEP_ADDRESS"] = address

        def start(run: str, directory: Path) -> None:
            with open(keeper_log(directory), "ab") as log:
                subprocess.run(
                    [
                        "ip", "netns", "exec", space, sys.executable, "-m", "everstep.keeper.process", run,
                        str(directory),
                    ],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(), check=True,
                )  # fmt: skip

        client.start = start

    def close(self) -> None:
        for space in (self.name, *(space for space, _ in self.places.values())):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


@pytest.fixture
def network() -> Iterator[Any]:
    made: list[Network] = []

    def make(cluster: Cluster) -> Network:
        try:
            made.append(Network(cluster.nodes))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces can be made here: {error}")
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.soak
@pytest.mark.parametrize("cut_off", [0, 1], ids=["who appoints the steps", "another"])
@pytest.mark.parametrize("scheme", [Partner(), Parity("xor")], ids=["partner", "xor"])
def test_a_network_cut_of_ten_seconds_is_told_of_and_protection_goes_on_by_itself(
    cut_off: int, scheme: Any, cluster: Any, network: Any, undisturbed: Any
) -> None:
    nodes = cluster(1, 1, 1, tiers=[scheme], steps=500)
    cables, cut_at = network(nodes), nodes.root / "cut"

    def when(run: Any, rank: int) -> None:
        if run.step == 3:
            run.wait("protected")
            dist.barrier()
            if rank == 0:
                cables.cut(nodes.nodes[cut_off])
                cut_at.write_text(str(time.monotonic()))
            dist.barrier()
        if run.step > 3:
            time.sleep(0.05)  # training goes on all the while
        if run.step == 300:
            assert time.monotonic() - float(cut_at.read_text()) > CUT_S
            dist.barrier()
            if rank == 0:
                cables.mend(nodes.nodes[cut_off])
        die_at(300, level="protected")(run, rank)

    nodes.live(when, prepare=cables.prepare, timeout_s=200)
    told = [e for node in nodes.nodes for e in read_events(nodes.directory(node))]
    assert any(isinstance(e, Degraded) and "protected" in e.what for e in told)
    assert max(e.step for e in told if isinstance(e, Protected)) == 300
    nodes.lose(nodes.nodes[2])
    found = results(nodes.live(steps=302, prepare=cables.prepare))
    assert {one["resumed_from"] for one in found} == {300}
    assert {one["restored"] for one in found} == {undisturbed(1, 1, 1, steps=300)}
