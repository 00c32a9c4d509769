"""Records go from a disk to a tier that outlives all nodes: whole, in order, and no more than its bases need."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from everstep.cadence import Every
from everstep.errors import TierFailed
from everstep.events import Degraded, Event
from everstep.image import CHUNK_BYTES, FORMAT, lay_out
from everstep.keeper.book import Book
from everstep.keeper.logbook import Logbook
from everstep.keeper.protocol import Hello
from everstep.keeper.rounds import NONE, Order
from everstep.keeper.sinking import Sinking
from everstep.keeper.sunk_values import SunkValues
from everstep.store.disk import DiskTier
from everstep.store.frame import GAPS_FORMAT
from everstep.store.gaps import from_gaps, to_gaps
from everstep.store.log import LogWriter, cut_after, log_name, read_log, starts, strangers
from everstep.store.manifest import (
    data_name,
    encode,
    part_name,
    read_data,
    read_single_part,
    values_folder,
    values_steps,
)
from everstep.store.objects import ObjectTier
from everstep.store.tier import Tier
from everstep.types import Frame, ImageInfo, Part, Survives, as_raw

RUN, LIFE, NEXT = "5" * 32, "1" * 32, "2" * 32
LAYOUT = lay_out([], ImageInfo(format=FORMAT, run=RUN, rank=0, world=1), 4096)


def frame(step: int, life: str = LIFE) -> Frame:
    return Frame(
        format=FORMAT, run=RUN, generation=life, step=step, rank=0, world=1, cut_time=0.0, kind="record",
        layout=LAYOUT.digest, ranges=((len(LAYOUT.header), 8),),
    )  # fmt: skip


def record(step: int, life: str = LIFE) -> tuple[Frame, list[memoryview]]:
    return frame(step, life), [memoryview(step.to_bytes(8, "little"))]


@pytest.fixture(params=["a file system", "an object store"])
def deeper(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    if request.param == "a file system":
        return DiskTier(tmp_path / "lustre", name="shared", survives=Survives.NODE)
    (tmp_path / "bucket").mkdir()
    return ObjectTier(f"file://{tmp_path}/bucket")


class Node:
    """A disk with a log, and what brings it deeper."""

    def __init__(self, root: Path, deeper: Tier, every: Every) -> None:
        self.told: list[Event] = []
        self.disk, self.deeper, self.is_urgent = DiskTier(root / "disk"), deeper, True
        self.logbook = Logbook(self.disk, self.told.append)
        self.hello = hello = Hello(
            rank=0, world=1, local=1, local_ranks=(0,), ranks_here=(0,), pid=0, run=RUN, directory="", generation=LIFE,
            resumed_from=None, every_steps=None, every_s=None, every_capture=False, lose_steps=1, lose_s=None,
            keep_last=2, keep_every=None, linger_s=0.0, torch="",
        )  # fmt: skip
        self.sinking = Sinking(deeper, self.logbook, hello, every, self.told.append, lambda: self.is_urgent)
        self.logbook.pins.append(self.sinking.pinned)

    def write(self, start: int, first: int, last: int) -> None:
        """What the keeper does while training goes on."""
        LogWriter(self.disk, start, 0, RUN, LAYOUT.header).append([record(step) for step in range(first, last + 1)])
        self.logbook.go_on(0, RUN)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        ending = threading.Event()
        thread = threading.Thread(target=self.sinking.work, args=(ending,))
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()

    def there(self) -> list[int]:
        """The steps that the deeper tier has records of, each read and checked."""
        found = []
        for start in starts(self.deeper, 0):
            log = read_log(self.deeper, start, 0, RUN)
            for one in log.records:
                assert bytes(log.payload(one)) == one.frame.step.to_bytes(8, "little")
                found.append(one.frame.step)
        return found


@pytest.fixture
def node(tmp_path: Path, deeper: Tier) -> Node:
    return Node(tmp_path, deeper, Every(seconds=3600))


def wait_until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def test_records_with_gaps_are_taken_as_they_lie(node: Node) -> None:
    integers = np.arange(3, 303, 3, dtype="<i4").data.cast("B")
    gaps = to_gaps(integers, 4) or b""
    at = len(LAYOUT.header)
    given = msgspec.structs.replace(
        frame(1), format=GAPS_FORMAT, ranges=((at, len(integers)),), gaps=((at, 4, len(gaps)),)
    )
    LogWriter(node.disk, 0, 0, RUN, LAYOUT.header).append([(given, [memoryview(gaps)])])
    node.logbook.go_on(0, RUN)
    with node.at_work():
        node.sinking.follow(0, oldest=0)
        wait_until(lambda: node.sinking.reach(0) == 1)
    (record,) = read_log(node.deeper, 0, 0, RUN).records
    assert record.frame == given
    assert from_gaps(read_log(node.deeper, 0, 0, RUN).payload(record), 4, len(integers)) == integers


def test_records_follow_a_base_as_they_come_and_none_before_it(node: Node) -> None:
    node.write(0, 1, 5)
    with node.at_work():
        time.sleep(0.1)
        assert node.there() == [] and node.sinking.reach(-1) == -1
        node.sinking.follow(3, oldest=3)
        wait_until(lambda: node.sinking.reach(3) == 5)
        node.write(0, 6, 8)
        wait_until(lambda: node.sinking.reach(3) == 8)
    assert node.there() == [4, 5, 6, 7, 8] and node.sinking.is_even


def test_what_is_there_is_gone_on_with_by_the_next_keeper(node: Node, tmp_path: Path, deeper: Tier) -> None:
    node.write(0, 1, 5)
    node.sinking.follow(3, oldest=3)
    with node.at_work():
        wait_until(lambda: node.sinking.reach(3) == 5)
    following = Node(tmp_path, deeper, Every(seconds=3600))
    following.write(0, 6, 7)
    following.sinking.follow(3, oldest=3)
    with following.at_work():
        wait_until(lambda: following.sinking.reach(3) == 7)
    assert following.there() == [4, 5, 6, 7]


def test_nobody_in_a_hurry_they_go_in_groups(tmp_path: Path, deeper: Tier) -> None:
    node = Node(tmp_path, deeper, Every(steps=50))
    node.is_urgent = False
    node.write(0, 1, 4)
    node.sinking.follow(0, oldest=0)
    with node.at_work():
        time.sleep(0.2)
        assert node.there() == [], "a group is a tenth of what lies between two bases"
        node.write(0, 5, 6)
        wait_until(lambda: node.sinking.reach(0) == 6)


def test_segments_go_when_no_kept_base_needs_them_and_not_before(node: Node, deeper: Tier) -> None:
    node.write(0, 1, 5)
    node.sinking.follow(3, oldest=3)
    with node.at_work():
        wait_until(lambda: node.sinking.reach(3) == 5)
        node.sinking.follow(5, oldest=3)
        node.write(0, 6, 7)
        wait_until(lambda: node.sinking.reach(5) == 7)
        assert node.there() == [4, 5, 6, 7], "base 3 still leads on"
        node.sinking.follow(7, oldest=5)
        assert node.there() == [6, 7] and starts(deeper, 0) == [5]


def test_the_disk_keeps_what_is_still_to_be_taken(node: Node) -> None:
    node.is_urgent = False
    node.sinking.hold(3)
    for start in (0, 3, 6):
        node.write(start, start + 1, start + 3)
    node.logbook.forget(6)
    assert starts(node.disk, 0) == [3, 6]
    node.is_urgent = True
    node.sinking.follow(3, oldest=3)
    with node.at_work():
        wait_until(lambda: node.sinking.reach(3) == 9)
    node.logbook.forget(6)
    assert starts(node.disk, 0) == [6] and node.there() == [4, 5, 6, 7, 8, 9]


def test_a_tier_that_does_not_catch_up_is_not_waited_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.is_urgent = False
    node.sinking.hold(0)
    for start in (0, 3, 6):
        node.write(start, start + 1, start + 3)
    assert node.sinking.pinned() == 0
    monkeypatch.setattr("everstep.keeper.sinking._BEHIND_S", 0.0)
    node.logbook.forget(6)
    assert starts(node.disk, 0) == [6]


def test_a_tier_that_fails_is_told_of_once_holds_nothing_and_goes_on_behind_the_gap(
    node: Node, deeper: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.keeper.sinking._REST_S", 0.05)
    refuses, refused = True, list[str]()

    def before(operation: str) -> None:
        if refuses and operation.startswith(("append", "put", "write")):
            refused.append(operation)
            raise TierFailed(f"refused: {operation}")

    deeper.before = before
    node.write(0, 1, 3)
    node.sinking.follow(0, oldest=0)
    with node.at_work():
        wait_until(lambda: node.told)
        time.sleep(0.3)
        assert [type(event) for event in node.told] == [Degraded] and node.sinking.pinned() is None
        assert node.sinking.reach(0) == 0 and node.sinking.is_even
        node.write(5, 6, 7)
        node.logbook.forget(5)
        tries = len(refused)
        wait_until(lambda: len(refused) >= tries + 2)  # what was read before they were forgotten is refused by then
        refuses = False
        wait_until(lambda: node.there() == [6, 7])
        assert node.sinking.reach(0) == 0, "nothing leads over the gap"
        wait_until(lambda: node.sinking.reach(5) == 7)


def test_records_that_got_there_though_the_answer_was_lost_are_not_written_twice(
    node: Node, deeper: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.keeper.sinking._REST_S", 0.05)
    append = deeper.append

    def lose_the_answer(name: str, parts: Sequence[memoryview]) -> None:
        append(name, parts)
        monkeypatch.setattr(deeper, "append", append)
        raise TierFailed("nobody answers")

    monkeypatch.setattr(deeper, "append", lose_the_answer)
    node.write(0, 1, 3)
    node.sinking.follow(0, oldest=0)
    with node.at_work():
        wait_until(lambda: node.told)
        node.write(0, 4, 5)
        wait_until(lambda: node.sinking.reach(0) == 5)
    assert node.there() == [1, 2, 3, 4, 5]


def test_what_another_life_left_beyond_a_step_is_found_and_removed_and_what_led_to_it_stays(deeper: Tier) -> None:
    book = Book(deeper, 0, RUN)
    book.write(LAYOUT.header, LAYOUT.digest, [record(step) for step in (1, 2, 3)])
    book.write(LAYOUT.header, LAYOUT.digest, [record(step) for step in (4, 5, 6)])
    assert strangers(deeper, 6, RUN, NEXT) == set() == strangers(deeper, 2, RUN, LIFE)
    assert strangers(deeper, 5, RUN, NEXT) == {0}
    cut_after(deeper, 5, {0}, RUN, NEXT)
    assert strangers(deeper, 5, RUN, NEXT) == set()
    again = Book(deeper, 0, RUN)
    assert (again.first, again.last) == (0, 5)
    again.write(LAYOUT.header, LAYOUT.digest, [record(6, NEXT)])
    last = starts(deeper, 0)[-1]
    assert read_log(deeper, last, 0, RUN).records[-1].frame == frame(6, NEXT)
    assert deeper.size(log_name(last, 0)) > 0


def save_values(node: Node, step: int) -> None:
    """What the keeper does when a step is appointed."""
    data = memoryview(step.to_bytes(8, "little") * 1000)
    chunks = node.disk.put(data_name(step, 0, values_folder), data)
    part = Part(
        format=FORMAT, run=RUN, generation=LIFE, step=step, rank=0, world=1, bytes=len(data), chunk_bytes=CHUNK_BYTES,
        chunks=chunks, raw_pieces=as_raw(()), cut_time=0.0, torch="",
    )  # fmt: skip
    node.disk.put(part_name(step, 0, values_folder), memoryview(encode(part)))


def test_values_that_all_disks_have_follow_the_records_and_older_ones_go_when_all_have_brought_newer_ones(
    node: Node, deeper: Tier
) -> None:
    order = Order(step=3)
    sunk = SunkValues(deeper, node.logbook, node.hello, None, lambda: order)
    for step in (3, 6):
        save_values(node, step)
    sunk.bring(threading.Event())
    assert (sunk.status().done, sunk.complete, sunk.due) == (3, NONE, NONE)
    order = Order(step=6, complete=3)
    assert (sunk.complete, sunk.pinned()) == (3, 6)
    sunk.bring(threading.Event())
    sunk.forget()
    assert values_steps(deeper) == [3, 6], "not all have brought the newer one"
    order = Order(step=6, complete=6)
    sunk.forget()
    assert values_steps(deeper) == [6] and sunk.complete == 6 and sunk.pinned() is None
    part = read_single_part(deeper, 6, 0, RUN, values_folder)
    assert read_data(deeper, part, values_folder) == (6).to_bytes(8, "little") * 1000
    following = SunkValues(deeper, node.logbook, node.hello, None, lambda: order)
    following.bring(threading.Event())
    assert following.status().done == 6, "the next keeper sees what is there"


def test_values_that_the_disk_has_no_more_are_missed_and_told_so(node: Node, deeper: Tier) -> None:
    order = Order(step=3)
    sunk = SunkValues(deeper, node.logbook, node.hello, None, lambda: order)
    sunk.bring(threading.Event())
    assert (sunk.status().done, sunk.status().missed, sunk.due) == (NONE, 3, NONE)
    order = Order(step=6)
    save_values(node, 6)
    sunk.bring(threading.Event())
    assert sunk.status().done == 6 and values_steps(deeper) == [6]
