"""Checkpoints that a program makes itself, as bases like any other: a rank's arena, a checkpoint a slot.

What a training loop has `capture` do, a program that hands over a finished checkpoint does here: it meets the keeper,
fills a slot and seals it. From there on everything is as for any base.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from everstep.capture.arena import Arena
from everstep.capture.life import Life
from everstep.config import Settings
from everstep.errors import EverstepError
from everstep.events import Sink
from everstep.image import ImageLayout
from everstep.keeper.arrival import arrive, check
from everstep.keeper.client import KeeperClient
from everstep.keeper.session import checksums
from everstep.recover.survey import Sources
from everstep.store.claim import Claim
from everstep.topology import Topology

_SLOT_PATIENCE_S = 300.0


def begin_life(
    settings: Settings, place: Topology, claim: Claim, emit: Sink, look: Callable[[], Sources], *, newest: int | None
) -> tuple[KeeperClient, Life, list[Arena]]:
    """Meet the keeper; all ranks must come. `newest`: the number of the newest checkpoint of all lives before.

    Returns the arenas, too, that an earlier life has left.
    """
    check(settings, place)
    keeper = KeeperClient(settings.keeper, claim.run, settings.directory, emit)
    generation = arrive(keeper, settings, place, claim, emit, resumed_from=newest, replica="")
    left, rings = look().left_to(place, is_followed=False)
    life = Life(
        run=claim.run, generation=generation, topology=place, settings=settings, emit=emit, attach=keeper.attach
    )
    return keeper, life, [*left, *rings]


class Slots:
    """This rank's arena; its slots are lent to the keeper while it reads."""

    def __init__(self, life: Life, left: list[Arena], settle: Callable[[], None], *, slots: int, newest: int) -> None:
        """`left`: by an earlier life. `settle`: wait until nobody reads the arena that is to be followed by another.

        `newest`: how many of the newest sealed slots are never overwritten.
        """
        self._life, self._left, self._settle = life, left, settle
        self._count, self._newest = slots, newest
        self._arena: Arena | None = None
        self.layout: ImageLayout | None = None
        self._leased: set[int] = set()
        self._change = threading.Condition()

    # -- the keeper's thread

    def lease(self, step: int) -> int | None:
        with self._change:
            slot = self._arena.slot_of(step) if self._arena is not None else None
            if slot is not None:
                self._leased.add(slot)
            return slot

    def release(self, slot: int | None) -> None:
        """Give back one slot, or all of them when the keeper is gone."""
        with self._change:
            self._leased = self._leased - {slot} if slot is not None else set()
            self._change.notify_all()

    # -- filling

    def open(self, layout: ImageLayout) -> tuple[int, memoryview]:
        """A slot that nobody needs, not sealed any more, with its header in place."""
        if self._arena is None or self.layout != layout:
            self._follow(layout)
        arena = self._arena
        assert arena is not None
        with self._change:
            found = self._change.wait_for(lambda: self._free(arena) is not None, _SLOT_PATIENCE_S)
            slot = self._free(arena)
            if not found or slot is None:
                raise EverstepError("all slots have been read for minutes; is a tier stuck? See everstep status")
            arena.unseal(slot)
        return slot, arena.image(slot)

    def _free(self, arena: Arena) -> int | None:
        return arena.free_slot(self._newest, self._leased)

    def seal(self, slot: int, step: int) -> None:
        """What was filled exists; its checksums follow at once, so that no bit of it can turn unnoticed."""
        arena = self._arena
        assert arena is not None
        now = time.time()
        arena.set_live(step, now)
        self._life.seal(arena, slot, step=step, cut_time=now)
        checksums(arena, slot)

    def forget_after(self, step: int | None) -> None:
        """Whatever is newer was never whole, or is given up."""
        for arena in (*self._left, *((self._arena,) if self._arena is not None else ())):
            arena.unseal_after(step)

    def has(self, step: int) -> bool:
        """Whether the present arena holds a checkpoint, and no earlier one is needed for it."""
        return self._arena is not None and self._arena.slot_of(step) is not None

    def let_go(self) -> None:
        """Give up earlier arenas: all ranks have newer checkpoints in their present ones."""
        while self._left:
            arena = self._left.pop()
            arena.remove()
            arena.close()

    def close(self) -> None:
        """Whatever is sealed stays."""
        for arena in (*self._left, *((self._arena,) if self._arena is not None else ())):
            arena.close()
        self._left, self._arena = [], None

    # -- the arena

    def _follow(self, layout: ImageLayout) -> None:
        """Another arena takes the place of the present one, which is kept until nobody needs it."""
        if self._arena is not None:
            self._settle()
        arena = self._take_over(layout) or self._life.make_arena(layout, slots=self._count)  # or there is no room
        with self._change:
            if self._arena is not None:
                self._left.append(self._arena)
            self._arena, self.layout, self._leased = arena, layout, set()
        self._life.attach(arena)

    def _take_over(self, layout: ImageLayout) -> Arena | None:
        """One that is there and fits; to make it anew would wipe what it holds."""
        for arena in self._left:
            if (arena.kind, arena.layout_digest, arena.slot_bytes) == ("base", layout.digest, layout.total_bytes):
                self._left.remove(arena)
                arena.adopt(layout)
                return arena
        return None
