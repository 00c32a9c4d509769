"""One life of one rank: what everybody who captures its state must know of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from everstep.capture.arena import Arena, ArenaKind
from everstep.capture.host import arena_root, choose_place, free_memory
from everstep.capture.moments import Moments
from everstep.capture.reserve import Reserve, base_slots, newest_kept
from everstep.config import Settings
from everstep.errors import NotEnoughMemory
from everstep.events import NO_LOG, Degraded, Sink, say
from everstep.image import ImageLayout
from everstep.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """From guard() to the end of the process."""

    run: str
    generation: str  # the same on all ranks, and never again
    topology: Topology
    settings: Settings
    emit: Sink
    attach: Callable[[Arena], None]  # show the keeper an arena
    moments: Moments = field(default_factory=Moments)
    failures: int = 0  # that ended earlier lives of the run
    reserve: Reserve | None = None  # what was taken before for the first arena of bases

    @property
    def newest(self) -> int:
        """How many of the newest steps are never overwritten."""
        return newest_kept(self.topology)

    @property
    def base_slots(self) -> int:
        return base_slots(self.settings, self.topology)

    def make_arena(self, layout: ImageLayout, *, kind: ArenaKind = "base", slots: int) -> Arena:
        create = partial(
            Arena.create, kind=kind, run=self.run, rank=self.topology.rank, world=self.topology.world, layout=layout,
            slots=slots,
        )  # fmt: skip
        size = layout.total_bytes
        given = self.reserve.give(slots, size) if self.reserve is not None and kind == "base" else None
        if given is not None:
            with suppress(NotEnoughMemory):  # its files cannot be named here: then it is as if there were none
                return create(given[0], reserved=given[1])
        return create(choose_place(self.settings.tiers.memory.path, slots * size, slots))

    def free_memory(self) -> int:
        """Bytes that arenas may still take."""
        return free_memory(arena_root(self.settings.tiers.memory.path))

    def tell_no_log(self, reason: str) -> None:
        """What is logged cannot be repeated; whoever asked for a log is told, and "auto" has only one way left."""
        self.emit(Degraded(what=NO_LOG, reason=reason))
        if self.topology.rank == 0 and self.settings.strategy != "auto":
            say(f"{NO_LOG}: {reason}")

    def seal(self, arena: Arena, slot: int, *, step: int, cut_time: float) -> None:
        """All of a slot is there. On persistent memory the bytes must be safe before the seal is, and then the seal."""
        if self.settings.mode == "direct":
            arena.flush(slot)
        arena.seal(slot, step=step, cut_time=cut_time, generation=self.generation)
        if self.settings.mode == "direct":
            arena.flush(slot)
