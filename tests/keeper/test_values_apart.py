"""How often values follow the records of compressed training to the disk, and what that costs with many ranks."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from everstep.capture.arena import Arena
from everstep.errors import Damaged
from everstep.events import Event, Tuned
from everstep.image import FORMAT, ImageLayout, Wanted, lay_out
from everstep.keeper.logbook import Logbook
from everstep.keeper.protocol import Hello
from everstep.keeper.record_writer import RecordWriter
from everstep.keeper.rounds import Order
from everstep.recover.shelf import Shelf
from everstep.store.disk import DiskTier
from everstep.store.log import read_log, starts
from everstep.store.manifest import read_single_part, values_folder, values_steps
from everstep.timeline import unmarked
from everstep.types import Codec, ImageInfo, PackedBuffer, Records

RUN, LIFE = "7" * 32, "1" * 32
PARAMETERS = 100_000
BASE = 5  # the step of the base that is on the disk


class Job:
    """Ranks that train on compressed gradients, each with a ring and its residuals, and the keeper of their node."""

    def __init__(self, root: Path, world: int, *, slots: int, kept: int, residuals: int = PARAMETERS) -> None:
        buffer = PackedBuffer(dtype="F32", device="cpu", members=(("w", (PARAMETERS,)),))
        self.world, self.kept, self.tier, self.told = world, kept, DiskTier(root), list[Event]()
        self.random = np.random.default_rng(0)
        self.rings, self.values = list[Arena](), list[Arena]()
        self.layouts = list[ImageLayout]()
        self.given: dict[tuple[int, int], dict[str, bytes]] = {}  # rank, step -> what was recorded
        self.logbook = Logbook(self.tier, self.told.append)
        self.logbook.base = BASE
        for rank in range(world):
            info = ImageInfo(
                format=FORMAT, run=RUN, rank=rank, world=world, has_values=True,
                codec=Codec(kind="TopK", buffers={"0": buffer}),
            )  # fmt: skip
            first, last = (kept * one // world for one in (rank, rank + 1))
            shares = [
                Wanted(name=f"packed.0.{name}", dtype=kind, shape=(kept,), start=(first,), extent=(last - first,))
                for name, kind in (("indices", "I32"), ("values", "F32"))
            ]
            residual = Wanted(
                name="residual", dtype="F32", shape=(residuals,), start=(0,), extent=(residuals,), private=True
            )
            self.layouts.append(lay_out(shares, info, 256))
            self.rings.append(self._arena("log", self.layouts[-1], rank, slots))
            self.values.append(self._arena("values", lay_out([residual], info, 256), rank, 4))
            self.logbook.open(self._hello(rank))
        sessions = [
            SimpleNamespace(ring=ring, values=values, hello=self._hello(ring.rank), ring_is_spent=False)
            for ring, values in zip(self.rings, self.values, strict=True)
        ]
        self.roster: Any = SimpleNamespace(
            wanted=-1, all=lambda: sessions, is_anybody_alive=lambda: True, tell=lambda trouble: None
        )
        self.writer = RecordWriter(self.logbook, self.roster, self.told.append, lambda: None, unmarked)

    def _arena(self, kind: Any, layout: ImageLayout, rank: int, slots: int) -> Arena:
        return Arena.create(None, kind=kind, run=RUN, rank=rank, world=self.world, layout=layout, slots=slots)

    def _hello(self, rank: int) -> Hello:
        ranks = tuple(range(self.world))
        return Hello(
            rank=rank, world=self.world, local=self.world, local_ranks=ranks, ranks_here=ranks, pid=0, run=RUN,
            directory="", generation=LIFE, resumed_from=None, every_steps=None, every_s=None, every_capture=False,
            lose_steps=1, lose_s=None, keep_last=2, keep_every=None, linger_s=0.0, torch="",
        )  # fmt: skip

    def step(self, step: int) -> None:
        """One step of all ranks."""
        indices = np.sort(self.random.choice(PARAMETERS, self.kept, replace=False)).astype("<i4")
        values = self.random.random(self.kept).astype("<f4")
        for ring, residuals, layout in zip(self.rings, self.values, self.layouts, strict=True):
            slot = ring.taken_slot(set())
            assert slot is not None, "the ring is full"
            ring.unseal(slot)
            image, given = ring.image(slot), {}
            for piece in layout.pieces:
                whole = indices if piece.name.endswith("indices") else values
                part = whole[piece.start[0] :][: piece.extent[0]].tobytes()
                image[len(layout.header) + piece.offset :][: piece.length] = part
                given[piece.name] = part
            image[layout.extras_offset :][:16] = struct.pack("<QQ", 8, step)
            self.given[ring.rank, step] = given
            ring.seal(slot, step=step, cut_time=float(step), generation=LIFE)
            held = residuals.slot_of(residuals.taken())
            free = residuals.free_slot(2, {held} if held is not None else set())
            assert free is not None
            residuals.unseal(free)
            residuals.image(free)[-8:] = struct.pack("<Q", step)
            residuals.seal(free, step=step, cut_time=float(step), generation=LIFE)

    def train(self, first: int, last: int) -> list[int]:
        """Steps, after each of which the keeper looks; the steps whose values were saved."""
        saved = set[int]()
        for step in range(first, last + 1):
            self.step(step)
            self.writer._take()
            saved |= set(values_steps(self.tier))
        return sorted(saved)

    def gradient_bytes(self) -> float:
        """Of a step, over all ranks, in the log: without extras and frames."""
        sizes = []
        for ring, layout in zip(self.rings, self.layouts, strict=True):
            log = read_log(self.tier, starts(self.tier, ring.rank)[-1], ring.rank, RUN)
            frame = log.records[-1].frame
            sizes.append(frame.payload_bytes - (sum(frame.ranges[-1]) - layout.extras_offset))
        return sum(sizes)

    def close(self) -> None:
        for arena in (*self.rings, *self.values):
            arena.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(world: int, **options: Any) -> Job:
        made.append(Job(tmp_path / f"{len(made)}", world, **{"slots": 20, "kept": PARAMETERS // 100, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_with_more_ranks_a_step_costs_no_more_bytes(job: Callable[..., Job]) -> None:
    """One per cent of the elements, and all residuals of every rank: 1.2 % of an Adam checkpoint, with any number."""
    shares = {}
    for world, steps in ((1, 180), (2, 340), (4, 660)):
        one = job(world)
        saved = one.train(BASE + 1, BASE + steps)
        apart = np.diff([BASE, *saved])
        assert len(saved) == 2 and min(apart) > 70 * world and max(apart) <= 1.02 * min(apart)
        values = 4 * PARAMETERS * world / min(apart)
        shares[world] = (one.gradient_bytes() + values) / (12 * PARAMETERS)
        assert values < 1.05 * one.gradient_bytes(), "residuals cost as much as the gradients between them"
        tuned = [event for event in one.told if isinstance(event, Tuned) and event.what == "steps per save of values"]
        assert len(tuned) == 1 and tuned[0].value == pytest.approx(apart[0], rel=0.02)
        assert tuned[0].bound == "the formula"
    assert max(shares.values()) < 0.009
    assert shares[4] < 1.05 * shares[1] and shares[2] < 1.05 * shares[1]


def test_values_that_are_small_beside_records_are_saved_when_half_of_the_ring_has_gathered(
    job: Callable[..., Job],
) -> None:
    one = job(1, kept=PARAMETERS // 4, slots=14)
    assert one.train(BASE + 1, BASE + 30) == [BASE + 7, BASE + 14, BASE + 21, BASE + 28]


def test_records_do_not_wait_for_values_so_a_small_ring_is_never_full(job: Callable[..., Job]) -> None:
    one = job(2, slots=4)
    assert one.train(BASE + 1, BASE + 100) == []
    assert one.logbook.reach() == BASE, "nobody can stop at a record without values"
    assert min(ring.taken() for ring in one.rings) >= BASE + 98


def test_whoever_waits_gets_the_step_at_once_also_if_its_record_is_written(job: Callable[..., Job]) -> None:
    one = job(2, slots=4)
    newest = BASE + 11
    one.train(BASE + 1, newest)
    assert {ring.taken() for ring in one.rings} == {newest}, "its record is on the disk, and its values are not"
    assert one.logbook.will_reach(newest, one.rings, one.values)
    one.roster.wanted = newest
    one.writer._take()
    assert values_steps(one.tier) == [newest] and one.logbook.reach() == newest
    for rank in range(2):
        assert read_single_part(one.tier, newest, rank, RUN, values_folder).step == newest


def test_a_step_whose_values_were_overwritten_cannot_be_reached_any_more(job: Callable[..., Job]) -> None:
    one = job(1, slots=4)
    one.train(BASE + 1, BASE + 20)
    assert one.logbook.will_reach(BASE + 20, one.rings, one.values)
    assert not one.logbook.will_reach(BASE + 10, one.rings, one.values)


def test_a_base_takes_the_place_of_a_save(job: Callable[..., Job]) -> None:
    one = job(1)
    assert one.train(BASE + 1, BASE + 60) == []
    one.logbook.base = BASE + 60
    one.logbook.rotate()
    assert one.train(BASE + 61, BASE + 130) == []
    assert len(one.train(BASE + 131, BASE + 150)) == 1


def test_every_record_comes_back_to_the_bit(job: Callable[..., Job]) -> None:
    one, last = job(2, slots=8), BASE + 25
    one.train(BASE + 1, last)
    shelf = Shelf(one.tier, RUN, source="disk", node="here")
    for rank in range(2):
        records = Records(
            source="disk", node="here", rank=rank, world=2, first=BASE + 1, last=last, bytes=0, cut_time=0.0
        )
        for step in range(BASE + 1, last + 1):
            found = shelf.record(records, step).make_whole()
            assert found.gaps, "its indices lie there as they were"
            for piece in one.layouts[rank].pieces:
                there = found.bytes_at(len(found.layout.header) + piece.offset, piece.length)
                assert there == one.given[rank, step][piece.name], (rank, step, piece.name)
            assert struct.unpack("<Q", found.extras()) == (step,)


def test_among_several_nodes_the_values_of_the_step_are_saved_that_was_appointed_ahead(job: Callable[..., Job]) -> None:
    one, order = job(2), Order(step=BASE + 9)
    one.logbook.appointed = lambda: order
    assert one.train(BASE + 1, BASE + 8) == []
    for step in range(BASE + 9, BASE + 14):  # the keeper is slow: memory keeps two steps, and what was appointed
        one.step(step)
    assert one.train(BASE + 14, BASE + 30) == [BASE + 9]
    status = one.logbook.values_status()
    assert (status.done, status.missed) == (BASE + 9, -1) and status.apart > 0
    assert one.logbook.reach() == BASE, "the other nodes may never have it"
    order = Order(step=BASE + 9, complete=BASE + 9)
    assert one.logbook.reach() == BASE + 9


def test_a_step_that_was_appointed_too_late_is_missed_and_told_so(job: Callable[..., Job]) -> None:
    one, order = job(1, slots=8), Order(step=BASE + 2)
    one.train(BASE + 1, BASE + 20)
    one.logbook.appointed = lambda: order
    assert one.train(BASE + 21, BASE + 22) == []
    assert (one.logbook.values_status().done, one.logbook.values_status().missed) == (-1, BASE + 2)


def test_what_all_nodes_have_saved_stays_with_the_one_before_it_until_a_newer_one_is_complete(
    job: Callable[..., Job],
) -> None:
    one, order = job(1, slots=8), Order()
    one.logbook.appointed = lambda: order
    seen = []
    for step in range(BASE + 5, BASE + 26, 5):
        order = Order(step=step, complete=order.complete)
        one.train(step - 4, step)
        seen.append(values_steps(one.tier))
        order = Order(step=step, complete=step if step != BASE + 15 else order.complete)
        one.writer._take()
    assert seen[2] == [BASE + 5, BASE + 10, BASE + 15], "nothing goes before a newer step is complete"
    assert values_steps(one.tier) == [BASE + 20, BASE + 25], "one of them in case the other is damaged"


def test_when_the_trainers_are_gone_all_values_that_memory_has_are_saved(job: Callable[..., Job]) -> None:
    one = job(2, slots=8)
    one.logbook.appointed = Order
    one.train(BASE + 1, BASE + 6)
    one.roster.is_anybody_alive = lambda: False
    one.writer._take()
    assert values_steps(one.tier)[-2:] == [BASE + 5, BASE + 6]


def test_values_that_are_damaged_in_memory_are_missed_and_the_next_ones_are_saved(job: Callable[..., Job]) -> None:
    one, order = job(1, slots=8), Order(step=BASE + 3)
    one.logbook.appointed = lambda: order
    one.train(BASE + 1, BASE + 2)
    one.step(BASE + 3)
    slot = one.values[0].slot_of(BASE + 3)
    assert slot is not None
    one.values[0].image(slot)[20] ^= 1
    with pytest.raises(Damaged, match="not the one that was sealed"):
        one.writer._take()
    assert one.logbook.values_status().missed == BASE + 3
    order = Order(step=BASE + 6)
    assert one.train(BASE + 4, BASE + 8) == [BASE + 6]
