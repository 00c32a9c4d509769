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
from everstep.keeper.sinking import Sinking
from everstep.keeper.transit import CalledOff, Transit
from everstep.store.claim import sign
from everstep.store.tier import Tier
from everstep.tiers import Deeper, Shared, rate_of
from everstep.types import Source


def _kept_on(chosen: Deeper, hello: Hello) -> Keep:
    """How many checkpoints stay on a deeper tier."""
    keep = chosen.keep if isinstance(chosen, Shared) else None
    if keep is None:
        return Keep(last=hello.keep_last, every=hello.keep_every)
    return Keep(every=1) if keep == "all" else Keep(last=keep)


class DeeperWork:
    stays = False

    def __init__(
        self, chosen: Deeper, tier: Tier, hello: Hello, records: Sinking, emit: Sink,
        objection: Callable[[str, int], str], *, retires: bool,
    ) -> None:  # fmt: skip
        """`records`: those that follow the bases. `objection`: why a step is not wanted there any more. `retires`: this
        node lets go what nobody needs."""
        self.tier: Source = "shared" if isinstance(chosen, Shared) else "objects"
        self.name: str = self.tier
        self.records = records
        self._chosen, self._tier, self._hello = chosen, tier, hello
        self._emit, self._objection, self._retires = emit, objection, retires
        self._has_begun = False
        self._transit: Transit | None = None

    def flush(self) -> Flush | None:
        """What is on its way, and how far."""
        transit = self._transit
        return transit.state() if transit is not None else None

    def do(self, base: HeldBase) -> int:
        if not self._has_begun:
            sign(self._tier, self._hello.run, self._emit)  # it may not have been there when the run began
            if self._retires:
                self._begin()
            self._has_begun = True
        self.records.hold(base.step)
        try:
            return self._send(base)
        except BaseException:
            self.records.let_go()
            raise

    def _send(self, base: HeldBase) -> int:
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

    def _begin(self) -> None:
        """What other lives left beyond the step that this one goes on from is gone before anything of it is there."""
        hello = self._hello
        for step in flush.disown_all(self._tier, hello.resumed_from, hello.run, hello.generation):
            self._emit(Retired(step=step, reason="it was passed over when the run went on from an earlier one"))

    def _bring(self, base: HeldBase, transit: Transit) -> int:
        size = 0
        for arena, slot, seal in base.images():
            if flush.part_in_place(self._tier, arena, slot, self._hello.run) is not None:
                transit.count(seal.length)
                continue  # brought before something failed
            torch = self._hello.torch
            part = flush.persist_part(self._tier, arena, slot, torch_version=torch, passing=transit.passing)
            if part is None:
                raise Damaged("it was overwritten while it was read", tier="memory", step=base.step, rank=arena.rank)
            size += part.bytes
        self._commit(base.step)
        return size

    def _commit(self, step: int) -> bool:
        """By whoever brings the last part; if that one could not see the others' yet, by the first who can."""
        world = self._hello.world
        return flush.commit(self._tier, step, range(world), world, self._hello.generation)

    def reach(self, base: int) -> int:
        return self.records.reach(base)

    def over(self, base: int, before: int) -> None:
        if not self._commit(base):
            raise Damaged("not all parts of it can be read there", tier=self._tier.name, step=base)
        oldest = None
        if self._retires:
            keep = _kept_on(self._chosen, self._hello)
            for gone in flush.retire(self._tier, keep, self._hello.run):
                self._emit(Retired(step=gone, reason=f"newer checkpoints are on {self._tier.name}"))
            flush.clean(self._tier)
            oldest = flush.oldest_followed(self._tier, keep, self._hello.run)
        self.records.follow(base, oldest=oldest)
        self._emit(Sank(step=base, tier=self.name))
