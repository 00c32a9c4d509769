"""Copies of a node's bases in the memory of others: what a lost node had, a partner has too."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from everstep.errors import Damaged
from everstep.events import Protected, Sink
from everstep.keeper import flush
from everstep.keeper.copies import Copies
from everstep.keeper.guests import forget_before
from everstep.keeper.lane import HeldBase
from everstep.store.memory import MemoryTier
from everstep.store.tier import Tier
from everstep.types import Source


class PartnerWork:
    name = "protect"
    tier: Source = "partner"
    stays = True

    def __init__(self, partners: Sequence[Tier], guests: MemoryTier, copies: Copies, emit: Sink) -> None:
        """`partners`: the memory that others lend us. `guests`: what we lend them."""
        self._partners, self._guests, self._emit = partners, guests, emit
        self.reach, self._copies = copies.reach, copies

    def do(self, base: HeldBase) -> int:
        with ThreadPoolExecutor(max(1, len(self._partners))) as pool:
            return sum(pool.map(lambda tier: self._copy(base, tier), self._partners))

    def _copy(self, base: HeldBase, tier: Tier) -> int:
        size = 0
        for arena, slot, _ in base.images():
            part = flush.persist_part(tier, arena, slot, torch_version=base.hello.torch)
            if part is None:
                raise Damaged("it was overwritten while it was read", tier="memory", step=base.step, rank=arena.rank)
            size += part.bytes
        return size

    def over(self, base: int, before: int) -> None:
        self._emit(Protected(step=base))
        self._copies.forget(before)
        forget_before(self._guests, before)
