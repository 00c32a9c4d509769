"""What a writer of DCP checkpoints has its keeper do: a rank's part into memory, and from there wherever it belongs.

Ranks seal their parts as they are filled, rank 0 last of all, when it has seen that all of them together are what DCP
has: with that the checkpoint exists. A save that breaks off before leaves parts that nobody can use, and that make
room for the next.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from everstep import image, topology
from everstep.config import Settings
from everstep.errors import BadConfig, EverstepError, Misuse
from everstep.events import EventLog, Finished, Started
from everstep.image import ImageLayout, Wanted
from everstep.integrations.slots import Slots, begin_life
from everstep.keeper.arrival import check_level
from everstep.keeper.client import Answers
from everstep.recover.plan import merge
from everstep.recover.reach import in_words, restorable
from everstep.recover.survey import Sources
from everstep.store import claim
from everstep.store.places import Places
from everstep.topology import Topology
from everstep.types import ImageInfo, Level, Survey

_PATIENCE_S = 600.0  # that a save waits for a level
_LEAST_EXTRAS = 12  # bits of their room
_PRESENT: dict[Path, DcpLife] = {}  # of this process, by directory: the kernel's lock keeps out other processes only


class DcpLife:
    def __init__(self, settings: Settings, place: Topology, until: Level, after: int | None) -> None:
        """All ranks must come. `after`: the checkpoint that the program went on from; newer ones are given up."""
        self.place, self._settings, self._until = place, settings, until
        self._places = Places.chosen(settings.directory, settings.tiers)
        self._is_over = False
        _agree(place, self._begin_alone)
        self._check_alike(after)
        self._emit = EventLog.of_rank(settings.directory, place.rank)
        self._claim = claim.take(self._places, place, self._emit)
        try:
            there = self._survey()
            if after is not None and after not in there:
                raise BadConfig(f"after={after}: there is no such step; there are [{in_words(sorted(there))}]")
            self.good = max(there, default=None) if after is None else after
            self._keeper, self._life, left = begin_life(
                settings, place, self._claim, self._emit, self._open, newest=self.good
            )
        except BaseException:
            self._claim.give_back()
            raise
        self.there = {step for step in there if after is None or step <= after}
        beyond = len(settings.tiers.deeper) + (settings.tiers.protection is not None and place.has_many_nodes)
        slots = settings.tiers.memory.slots or 2 + beyond
        self.slots = Slots(self._life, left, self._settle, slots=slots, newest=1)
        self._keeper.listen_with(
            Answers(
                lease=self.slots.lease, release=self.slots.release, stop_at=lambda step, why: None,
                base_at=lambda step: None, halt=lambda why: None,  # the loop is not ours: nobody asks it to stop
            )
        )  # fmt: skip
        self._sealed: int | None = None  # by this rank
        _PRESENT[settings.directory] = self
        self._emit(Started(rank=place.rank, world=place.world, pid=os.getpid(), step=self.good or 0, source="DCP"))

    def _begin_alone(self) -> None:
        check_level(self._until, self._settings, self.place)
        earlier = _PRESENT.get(self._settings.directory)
        if earlier is not None:
            earlier.end()
        claim.make(self._places)

    def _check_alike(self, after: int | None) -> None:
        """All ranks go on from one step, and those of a node have one keeper, and so one directory."""
        place = self.place
        mine = msgspec.msgpack.encode((os.fsencode(self._settings.directory), after))
        told = [msgspec.msgpack.decode(one, type=tuple[bytes, int | None]) for one in topology.exchange(mine, place)]
        for rank, (node, (there, step)) in enumerate(zip(place.nodes, told, strict=True)):
            if step != told[0][1]:
                raise BadConfig(f"rank 0 has after={told[0][1]}, and rank {rank} after={step}: give all ranks the same")
            first = place.nodes.index(node)
            if there != told[first][0]:
                one, other = Path(os.fsdecode(told[first][0])), Path(os.fsdecode(there))
                raise BadConfig(f"rank {first} saves to {one}, and rank {rank} of the same node to {other}")

    def _open(self) -> Sources:
        return Sources(self._places, self._claim.run, is_common=self._claim.disk_is_common)

    def _survey(self) -> set[int]:
        """The steps that are there: whole, or committed and damaged. What a broken save left is none."""
        with self._open() as sources:
            mine = msgspec.msgpack.encode(sources.survey())
        survey = merge([msgspec.msgpack.decode(one, type=Survey) for one in topology.exchange(mine, self.place)])
        damaged = {one.step for one in survey.rejections if one.certain and one.step > 0}
        return restorable(survey) | damaged | {h.step for h in survey.holdings if h.source not in ("memory", "partner")}

    # -- a save

    def info(self) -> ImageInfo:
        place = self.place
        return ImageInfo(format=image.FORMAT, run=self._life.run, rank=place.rank, world=place.world)

    def lay_out(self, wanted: list[Wanted], extras_bytes: int) -> ImageLayout:
        """The same layout for every save of the same tensors: what else there is may grow a little."""
        return image.lay_out(wanted, self.info(), 8 + (1 << max(_LEAST_EXTRAS, extras_bytes.bit_length())))

    def open_slot(self, layout: ImageLayout, good: int | None) -> tuple[int, memoryview]:
        """`good`: the newest checkpoint that is whole, as rank 0 knows."""
        self._check_open()
        self.good = good  # an arena that another follows must be settled on every rank
        self.slots.forget_after(good)
        if good is not None and self.slots.has(good):
            self.slots.let_go()
        return self.slots.open(layout)

    def seal(self, slot: int, step: int) -> None:
        self._check_open()
        self.slots.seal(slot, step)
        self._sealed = step

    def _check_open(self) -> None:
        if self._is_over:
            raise Misuse(f"this Writer was closed, or another one of {self._settings.directory} has taken its place")

    def finish(self, step: int) -> None:
        """Rank 0: the checkpoint exists; wait until it is as safe as it is to be."""
        self.good = step
        self.there = self.there | {step}
        if self._until is not Level.SEALED:
            self._await(self._until, step)

    def _await(self, level: Level, step: int) -> None:
        if not self._keeper.wait_for(level, step, _PATIENCE_S, as_base=True):
            name = level.name.lower()
            raise EverstepError(
                f"step {step} is whole, but was not {name} within {_PATIENCE_S:.0f} s; see `everstep status "
                f"{self._settings.directory}` and the keeper's events. It goes there when that is possible."
            )

    def _settle(self) -> None:
        """Before another arena follows: what only the present one holds is made durable."""
        if self.good is not None and self.slots.has(self.good):
            self._await(Level.DURABLE, self.good)

    # -- ending

    def close(self) -> None:
        """The newest checkpoint of this life as deep as it goes; then its memory is given back."""
        if self._is_over:
            return
        is_whole = self._sealed is not None and self._sealed == self.good
        try:
            if self.place.rank == 0 and is_whole and self._sealed is not None:
                self._await(Level.DURABLE, self._sealed)
                if self._settings.tiers.deeper:
                    self._await(Level.SHARED, self._sealed)
        except BaseException:
            self.end()
            raise
        self.end(final=self._sealed is not None)
        self._emit(Finished(rank=self.place.rank, step=self.good or 0))

    def end(self, *, final: bool = False) -> None:
        """Whatever is sealed is the keeper's now, who writes it. `final`: nobody comes back for the memory."""
        if self._is_over:
            return
        self._is_over = True
        _PRESENT.pop(self._settings.directory, None)
        self._keeper.close(final=final)
        self.slots.close()
        self._claim.give_back()


def _agree(place: Topology, attempt: Callable[[], None]) -> None:
    """All ranks can, or all of them raise why one could not."""
    failure: Exception | None = None
    try:
        attempt()
    except (EverstepError, OSError, ValueError) as error:
        failure = error
    problems = topology.exchange(str(failure or "").encode(), place)
    if failure is not None:
        raise failure
    for rank, problem in enumerate(problems):
        if problem:
            raise EverstepError(f"rank {rank}: {problem.decode()}")
