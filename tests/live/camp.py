"""Several nodes of one machine that train together under run.live(), and can be lost one by one.

Each has a name, memory and a keeper of its own, and a directory of its own unless all see one. A node is lost with all
its processes at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from team import Act, Ended, Here, Team, nothing

from everstep.capture.host import arena_root
from everstep.events import AnyEvent, read_events
from everstep.keeper.client import keeper_pid
from everstep.store.disk import DiskTier
from everstep.store.manifest import run_name
from everstep.topology import process_alive


class Camp(Team):
    """`ranks`: how many each node has; `spares`: how many stand by on nodes that follow."""

    def __init__(
        self, root: Path, ranks: Sequence[int], spares: Sequence[int] = (), *, common: bool = False, **options: Any
    ) -> None:
        """`common`: all nodes see one directory."""
        super().__init__(root, sum(ranks), sum(spares), **options)
        self.root, self._common = root, common
        self.prepare: Callable[[str], None] = lambda node: None  # in every process, before anything else happens there
        mark = uuid.uuid4().hex[:8]  # shared memory knows nothing of the test's directory
        self.nodes = [f"n{number}-{mark}" for number in range(len(ranks) + len(spares))]
        self.of = [node for node, count in zip(self.nodes, [*ranks, *spares], strict=True) for _ in range(count)]

    def directory_of(self, node: str) -> Path:
        return self.root / ("run" if self._common else node)

    def _be(self, name: int, act: Act, spare: bool, tell: int) -> None:
        node = self.of[name]
        os.environ |= {"EVERSTEP_NODE": node, "EVERSTEP_DOMAIN": node}
        pids = self.root / f"pids-{node}"
        pids.mkdir(exist_ok=True)
        (pids / str(os.getpid())).touch()
        self.directory = self.directory_of(node)
        self.prepare(node)
        super()._be(name, act, spare, tell)

    def on(self, node: str, what: Callable[[], Any]) -> Any:
        before = os.environ.get("EVERSTEP_NODE")
        os.environ["EVERSTEP_NODE"] = node
        try:
            return what()
        finally:
            if before is None:
                del os.environ["EVERSTEP_NODE"]
            else:
                os.environ["EVERSTEP_NODE"] = before

    def keeper(self, node: str) -> int | None:
        try:
            run = run_name(DiskTier(self.directory_of(node)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return self.on(node, lambda: keeper_pid(run))

    def send(self, node: str, number: int) -> None:
        """To all processes of a node: the keeper last, since others start another in its place."""
        for path in (self.root / f"pids-{node}").iterdir():
            if int(path.name) != os.getpid():
                _kill(int(path.name), number)
        keeper = self.keeper(node)
        if keeper is not None:
            _kill(keeper, number)
        if (self.root / f"pids-{node}" / str(os.getpid())).exists():
            os.kill(os.getpid(), number)

    def is_alive(self, node: str) -> bool:
        """Whether any process that trained there is."""
        return any(process_alive(int(path.name)) for path in (self.root / f"pids-{node}").iterdir())

    def events(self, kind: type[AnyEvent]) -> list[Any]:
        directories = {self.directory_of(node) for node in self.nodes}
        found = [event for directory in directories if directory.exists() for event in read_events(directory)]
        return sorted((event for event in found if isinstance(event, kind)), key=lambda event: event.time)

    def close(self) -> None:
        for node in self.nodes:
            keeper = self.keeper(node)
            if keeper is not None:
                _kill(keeper, signal.SIGKILL)
        for node in self.nodes:
            shutil.rmtree(self.on(node, lambda: arena_root(None)), ignore_errors=True)

    def lose_at(self, tries: int, *nodes: int, level: str = "protected", number: int = signal.SIGKILL) -> Act:
        """These nodes are lost in the n-th attempt at a step, when all have brought the last one to a level."""
        first = {self.of.index(self.nodes[node]): self.nodes[node] for node in nodes}

        def act(here: Here) -> None:
            if here.tries != tries or here.name >= self.world:
                return
            assert here.run.wait(level, timeout=20)
            dist.barrier()
            if here.name in first:
                self.send(first[here.name], number)

        return act


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended


def wait_until(holds: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.01)


__all__ = ["Camp", "Ended", "nothing", "wait_until"]
