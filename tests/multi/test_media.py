"""Deeper tiers that refuse, and keepers that cannot be reached: training goes on, hears of it, and it is made good."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from cluster import STEPS, Cluster, results
from doom import keeper_with

sys.path.insert(0, str(Path(__file__).parents[1] / "attacks"))
from refusal import Refusal

from everstep import Objects, Parity, Partner, Shared
from everstep.events import Degraded, Protected, Sank, read_events
from everstep.keeper.client import keeper_pid
from everstep.keeper.peers import Peer
from everstep.store.disk import DiskTier
from everstep.store.manifest import committed_steps


class _Refusing(Refusal):
    """Refuses as long as a file is there."""

    def __init__(self, directory: Path, number: int, while_there: Path) -> None:
        self.while_there = while_there
        super().__init__(directory, number)

    @property
    def on(self) -> bool:
        self.left = 0
        return self.while_there.exists()

    @on.setter
    def on(self, value: bool) -> None:
        pass


def told(cluster: Cluster, kind: type[Any]) -> list[Any]:
    return [e for node in cluster.nodes for e in read_events(cluster.directory(node)) if isinstance(e, kind)]


def wait_until(what: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "until_the_end"),
    [
        pytest.param(errno.ENOSPC, True, id="full until the end"),
        pytest.param(errno.EROFS, False, id="read-only for a while"),
        *(
            pytest.param(number, lasts, id=f"{os.strerror(number)} {lasts}", marks=pytest.mark.soak)
            for number in (errno.ENOSPC, errno.EROFS, errno.EIO)
            for lasts in (False, True)
        ),
    ],
)
def test_training_goes_on_while_the_shared_tier_refuses_and_later_steps_get_there(
    number: int, until_the_end: bool, cluster: Any, undisturbed: Any, tmp_path: Path
) -> None:
    nodes, refuses = cluster(1, 1), tmp_path / "refuses"
    shared = nodes.root / "lustre"
    nodes.options["tiers"] = [Shared(str(shared), every=1)]
    refuses.touch()

    def when(run: Any, rank: int) -> None:
        if run.step == 4:
            assert not run.wait("shared", timeout=1.5) and not committed_steps(DiskTier(shared))
            assert any("shared" in e.what for e in told(nodes, Degraded))
            dist.barrier()
        if rank == 0 and run.step == (STEPS - 1 if until_the_end else 4):
            _end_soon(refuses) if until_the_end else refuses.unlink()

    change = keeper_with(lambda: _Refusing(shared, number, refuses) and None, *nodes.nodes)
    found = results(nodes.live(when, prepare=change))
    assert {one["state"] for one in found} == {undisturbed(1, 1)}
    assert committed_steps(DiskTier(shared))[-1] == STEPS
    assert {e.step for e in told(nodes, Sank)} >= {STEPS}


def _end_soon(refuses: Path) -> None:
    """In another process: this one is about to wait for what is refused, longer than a keeper tries in one go."""
    if os.fork() == 0:
        time.sleep(3)
        refuses.unlink()
        os._exit(0)


def test_a_slow_shared_tier_holds_up_nobody_and_what_it_cannot_take_is_left_out(
    cluster: Any, undisturbed: Any, tmp_path: Path
) -> None:
    nodes = cluster(1, 1)
    shared = nodes.root / "lustre"
    nodes.options["tiers"] = [Shared(str(shared), every=1)]

    def slow() -> None:
        write = os.pwrite

        def pwrite(descriptor: int, data: Any, offset: int) -> int:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(os.fspath(shared)):
                time.sleep(0.5)
            return write(descriptor, data, offset)

        os.pwrite = pwrite

    found = results(nodes.live(prepare=keeper_with(slow, *nodes.nodes)))
    assert {one["state"] for one in found} == {undisturbed(1, 1)}
    sunk = {e.step for e in told(nodes, Sank)}
    assert STEPS in sunk and len(sunk) < STEPS


@pytest.mark.parametrize(
    ("scheme", "which"),
    [
        pytest.param(Partner(), 1, id="partner, another"),
        pytest.param(Parity("xor"), 0, id="xor, who appoints the steps"),
        pytest.param(Partner(), 0, id="partner, who appoints the steps", marks=pytest.mark.soak),
        pytest.param(Parity("xor"), 1, id="xor, another", marks=pytest.mark.soak),
    ],
)
def test_a_keeper_that_hangs_is_told_of_and_protection_goes_on_by_itself_when_it_is_back(
    scheme: Any, which: int, cluster: Any, undisturbed: Any
) -> None:
    nodes = cluster(1, 1, 1, tiers=[scheme], steps=12)

    def hasty() -> None:
        assert Peer.__init__.__kwdefaults__ is not None
        Peer.__init__.__kwdefaults__["timeout_s"] = 1.0

    def when(run: Any, rank: int) -> None:
        if run.step == 3:
            run.wait("protected")
            dist.barrier()
            if rank == which:
                os.kill(_keeper(run), signal.SIGSTOP)
            dist.barrier()
        if run.step == 7:  # training went on all the while
            if rank != which:
                wait_until(lambda: any("protected" in e.what for e in told(nodes, Degraded)))
            dist.barrier()
            if rank == which:
                os.kill(_keeper(run), signal.SIGCONT)
            assert run.wait("protected", timeout=60)

    found = results(nodes.live(when, prepare=keeper_with(hasty, *nodes.nodes)))
    assert {one["state"] for one in found} == {undisturbed(1, 1, 1, steps=12)}
    assert max(e.step for e in told(nodes, Protected)) >= 7


def _keeper(run: Any) -> int:
    pid = keeper_pid(run.status()["run"])
    assert pid is not None
    return pid


@pytest.mark.parametrize("tiers", [[Partner()], [Parity("xor")]], ids=["partner", "xor"])
def test_a_job_that_ends_leaves_its_last_step_on_the_deepest_tier_and_no_memory_behind(
    tiers: list[Any], is_alone: bool, cluster: Any
) -> None:
    if not is_alone:
        return
    nodes = cluster(2, 1, 1)
    deepest = nodes.root / "bucket"
    nodes.options["tiers"] = [*tiers, Shared(str(nodes.root / "lustre"), every=3), Objects(f"file://{deepest}")]
    results(nodes.live())
    nodes.wait_for_keepers()
    assert [nodes.left_in_memory(node) for node in nodes.nodes] == [[], [], []]
    assert committed_steps(DiskTier(nodes.root / "lustre"))[-1] == STEPS
    assert (deepest / f"step-{STEPS:010d}.json").exists()
    for node in nodes.nodes:
        assert committed_steps(DiskTier(nodes.directory(node)))[-1] == STEPS
