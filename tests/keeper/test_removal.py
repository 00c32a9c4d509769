"""Checkpoints that newer ones make needless are removed beside the next base, however long that takes."""

from __future__ import annotations

import errno
import selectors
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import everstep
from everstep.capture.arena import Arena
from everstep.capture.host import open_root
from everstep.events import Degraded, Persisted, Retired, read_events
from everstep.image import FORMAT, lay_out
from everstep.keeper import base_writer, flush
from everstep.keeper.base_writer import BaseWriter
from everstep.keeper.logbook import Logbook
from everstep.keeper.protocol import Hello
from everstep.keeper.replica import Replicas
from everstep.keeper.roster import Roster
from everstep.keeper.rounds import Order
from everstep.store.disk import DiskTier
from everstep.store.manifest import committed_steps, step_folders
from everstep.timeline import unmarked
from everstep.types import ImageInfo

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import run_directory

STEPS = 6
RUN, LIFE = "5" * 32, "1" * 32


class Removals:
    """What is done before the folder of a checkpoint is removed."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.begun = 0
        self.error: OSError | None = None

    def __call__(self, operation: str) -> None:
        if operation.startswith("delete step-") and "." not in operation:
            self.begun += 1
            if self.error is not None:
                raise self.error
            assert self.free.wait(30), "nobody let it go on"


@pytest.fixture
def removals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Removals]:
    found = Removals()
    monkeypatch.setattr(DiskTier, "before", staticmethod(found))
    yield found
    found.free.set()


def train(directory: Path, at_step: Callable[[everstep.Run], None]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tiers = [everstep.Disk(every=1)]
    with everstep.guard(model, optimizer, dir=directory, keeper="inline", keep=1, tiers=tiers) as run:
        for _ in range(STEPS):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            run.done()
            run.wait("durable")
            at_step(run)


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def steps(directory: Path, kind: type[Persisted] | type[Retired]) -> list[int]:
    return [event.step for event in read_events(directory) if isinstance(event, kind)]


def test_the_next_base_does_not_wait_while_the_last_one_is_removed_and_the_one_after_does(removals: Removals) -> None:
    seen: list[int] = []

    def at_step(run: everstep.Run) -> None:
        if run.step == 2:
            until(lambda: removals.begun)  # of step 1, by the base of step 2
        if run.step == 3:
            seen.extend(steps(directory, Persisted))  # step 3 is durable while step 1 is still being removed
            assert steps(directory, Retired) == []
            threading.Timer(0.2, removals.free.set).start()  # before step 3 has anything removed, step 1 must be

    with run_directory() as directory:
        train(directory, at_step)
        assert seen == [1, 2, 3]
        assert steps(directory, Retired) == [1, 2, 3, 4, 5]
        assert [path.name for path in directory.glob("step-*.json")] == [f"step-{STEPS:010d}.json"]


def test_where_the_disk_is_full_the_next_base_waits_for_what_is_being_removed(
    removals: Removals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free_bytes(_: DiskTier) -> int:
        return 1 << 30 if not removals.begun or removals.free.is_set() else 1 << 20

    def at_step(run: everstep.Run) -> None:
        if run.step == 2:
            until(lambda: removals.begun)
            threading.Timer(0.3, removals.free.set).start()

    monkeypatch.setattr(DiskTier, "free_bytes", free_bytes)
    with run_directory() as directory:
        train(directory, at_step)
        assert steps(directory, Persisted) == list(range(1, STEPS + 1))
        assert not [event for event in read_events(directory) if isinstance(event, Degraded)]


def test_what_cannot_be_removed_is_told_of_and_tried_again(removals: Removals) -> None:
    def at_step(run: everstep.Run) -> None:
        if run.step == 4:
            until(lambda: removals.begun)
            removals.error = None
            removals.free.set()

    with run_directory() as directory:
        removals.error = OSError(errno.EIO, "broken")
        train(directory, at_step)
        told = [event for event in read_events(directory) if isinstance(event, Degraded)]
        assert {event.what for event in told} == {"old checkpoints are still there"}
        assert "broken" in told[0].reason
        assert sorted(steps(directory, Persisted)) == list(range(1, STEPS + 1))
        assert [path.name for path in directory.glob("step-*") if path.is_dir()] == [f"step-{STEPS:010d}"]


def test_a_removal_that_hangs_keeps_no_base_from_the_disk_and_no_trainer_from_its_end(
    removals: Removals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_writer, "_PATIENCE_S", 0.1)
    with run_directory() as directory:
        train(directory, lambda run: None)
        assert removals.begun == 1 and not removals.free.is_set(), "it was to hang until the end"
        assert steps(directory, Persisted) == list(range(1, STEPS + 1))
        told = [event.reason for event in read_events(directory) if isinstance(event, Degraded)]
        assert told and set(told) == {"removing them takes longer than 0.1 s"}


def commit(tier: DiskTier, place: Path, step: int) -> None:
    """Of one rank of two, the other of which is elsewhere."""
    place.mkdir()
    layout = lay_out([], ImageInfo(format=FORMAT, run=RUN, rank=0, world=2), 4096)
    arena = Arena.create(open_root(str(place)), run=RUN, rank=0, world=2, layout=layout, slots=2)
    arena.seal(0, step=step, cut_time=1.0, generation=LIFE)
    assert flush.persist_part(tier, arena, 0, torch_version="") is not None
    assert flush.commit(tier, step, [0], 2, LIFE)
    arena.remove()


def test_until_the_nodes_of_a_new_life_have_met_nothing_goes_that_another_node_may_need(tmp_path: Path) -> None:
    """The removal begins late, where the one before it was slow: the trainers may have been restarted meanwhile."""
    tier, told = DiskTier(tmp_path / "run"), list[object]()
    for step in (1, 2):  # another node has step 1 only
        commit(tier, tmp_path / str(step), step)
    roster, logbook = Roster(), Logbook(tier, told.append)
    replicas = Replicas(tmp_path, told.append, roster, selectors.DefaultSelector())
    writer = BaseWriter(tier, roster, logbook, replicas, told.append, lambda: None, unmarked)
    hello = Hello(
        rank=0, world=2, local=1, local_ranks=(0,), ranks_here=(0,), pid=1, run=RUN, directory="", generation=LIFE,
        resumed_from=None, every_steps=1, every_s=None, every_capture=False, lose_steps=None, lose_s=None,
        keep_last=1, keep_every=None, linger_s=0.0, torch="", secret=b"many nodes",
    )  # fmt: skip
    writer._retire(hello)
    assert committed_steps(tier) == [1, 2]
    writer.appointed = lambda: Order(complete=1)
    writer._retire(hello)
    assert committed_steps(tier) == [1, 2]
    writer.appointed = lambda: Order(complete=2)
    writer._retire(hello)
    assert committed_steps(tier) == [2] and not [event for event in told if isinstance(event, Degraded)]


def test_what_is_set_aside_may_have_been_removed_in_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path / "run")
    for step in (1, 2, 3):
        commit(tier, tmp_path / str(step), step)

    def before(operation: str) -> None:
        if operation == "rename step-0000000002":
            shutil.rmtree(tier.root / "step-0000000002")

    monkeypatch.setattr(DiskTier, "before", staticmethod(before))
    assert flush.set_aside(tier, 1, RUN, "2" * 32) == [2, 3]
    assert step_folders(tier) == [1]
