"""From memory to a tier that outlives all nodes: parts as they come, the commit by whoever brings the last one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from everstep.config import Keep
from everstep.errors import Damaged
from everstep.events import FlushCancelled, Retired, Sank, Sink
from everstep.keeper import flush
from everstep.keeper.lane import HeldBase
from everstep.keeper.protocol import Flush, Hello
from everstep.keeper.transit import CalledOff, Transit
from everstep.store.log import cut_after, log_folder, rank_of, segments
from everstep.store.manifest import (
    parity_folder,
    parity_steps,
    read_record,
    read_single_part,
    step_folder,
    step_folders,
)
from everstep.store.memory import MemoryTier
from everstep.store.tier import Tier
from everstep.tiers import Deeper, Shared, rate_of
from everstep.types import ParityRecord, Part, Source


def forget_guests(guests: MemoryTier, hello: Hello) -> None:
    """What others entrusted to this node in lives that went another way than the present one makes room."""
    after = -1 if hello.resumed_from is None else hello.resumed_from
    for step in step_folders(guests):
        if step > after and not _is_of(guests, step_folder(step), Part, hello):
            guests.delete_folder(step_folder(step))
    for step in parity_steps(guests):
        if step > after and not _is_of(guests, parity_folder(step), ParityRecord, hello):
            guests.delete_folder(parity_folder(step))
    named = {name for start in segments(guests) for name in guests.names(log_folder(start))}
    ranks = {rank for rank in map(rank_of, named) if rank is not None}
    cut_after(guests, hello.resumed_from, ranks, hello.run, hello.generation)


def _is_of(guests: MemoryTier, folder: str, kind: type[Part] | type[ParityRecord], hello: Hello) -> bool:
    """Whether something in a folder is of the present life, which may only have lost its keeper."""
    for name in guests.names(folder):
        try:
            if not name.endswith(".json"):
                continue
            record = read_record(guests, name, Part) if kind is Part else read_record(guests, name, ParityRecord)
            if record.generation == hello.generation:
                return True
        except (Damaged, OSError):
            continue
    return False


def _kept_on(chosen: Deeper, hello: Hello) -> Keep:
    """How many checkpoints stay on a deeper tier."""
    keep = chosen.keep if isinstance(chosen, Shared) else None
    if keep is None:
        return Keep(last=hello.keep_last, every=hello.keep_every)
    return Keep(every=1) if keep == "all" else Keep(last=keep)


class DeeperWork:
    stays = False

    def __init__(
        self, chosen: Deeper, tier: Tier, hello: Hello, emit: Sink, objection: Callable[[str, int], str], *,
        retires: bool,
    ) -> None:  # fmt: skip
        """`objection`: why a step is not wanted there any more. `retires`: this node lets go what nobody needs."""
        self.tier: Source = "shared" if isinstance(chosen, Shared) else "objects"
        self.name: str = self.tier
        self._chosen, self._tier, self._hello = chosen, tier, hello
        self._emit, self._objection, self._retires = emit, objection, retires
        self._has_begun = False
        self._transit: Transit | None = None

    def flush(self) -> Flush | None:
        """What is on its way, and how far."""
        transit = self._transit
        return transit.state() if transit is not None else None

    def do(self, base: HeldBase) -> int:
        size = sum(seal.length for _, _, seal in base.images())
        transit = Transit(self.name, base.step, size, rate_of(self._chosen), partial(self._objection, self.name))
        self._transit = transit
        try:
            return self._bring(base, transit)
        except CalledOff as error:
            done = transit.state()
            self._emit(
                FlushCancelled(
                    step=base.step, tier=self.name, bytes=done.bytes, of_bytes=done.of_bytes, reason=str(error)
                )
            )  # fmt: skip
            raise
        finally:
            self._transit = None

    def _bring(self, base: HeldBase, transit: Transit) -> int:
        size = 0
        if self._retires and not self._has_begun:
            for step in flush.disown(self._tier, self._hello.resumed_from, self._hello.run, self._hello.generation):
                self._emit(Retired(step=step, reason="it was passed over when the run went on from an earlier one"))
            self._has_begun = True
        for arena, slot, seal in base.images():
            if self._has(base.step, arena.rank, seal.generation, seal.length):
                transit.count(seal.length)
                continue  # brought before something failed
            torch = self._hello.torch
            part = flush.persist_part(self._tier, arena, slot, torch_version=torch, passing=transit.passing)
            if part is None:
                raise Damaged("it was overwritten while it was read", tier="memory", step=base.step, rank=arena.rank)
            size += part.bytes
        self._commit(base.step)
        return size

    def _has(self, step: int, rank: int, generation: str, size: int) -> bool:
        try:
            part = read_single_part(self._tier, step, rank, self._hello.run, step_folder)
        except (FileNotFoundError, Damaged):
            return False
        return (part.generation, part.bytes) == (generation, size)

    def _commit(self, step: int) -> bool:
        """By whoever brings the last part; if that one could not see the others' yet, by the first who can."""
        world = self._hello.world
        return flush.commit(self._tier, step, range(world), world, self._hello.generation)

    def reach(self, base: int) -> int:
        return base  # records stay nearer

    def over(self, base: int, before: int) -> None:
        if not self._commit(base):
            raise Damaged("not all parts of it can be read there", tier=self._tier.name, step=base)
        if self._retires:
            for gone in flush.retire(self._tier, _kept_on(self._chosen, self._hello), self._hello.run):
                self._emit(Retired(step=gone, reason=f"newer checkpoints are on {self._tier.name}"))
            flush.clean(self._tier)
        self._emit(Sank(step=base, tier=self.name))
