"""The wish to go back, as a record on a run's disk: its next life goes on from that step, and forgets the wish."""

from __future__ import annotations

from collections.abc import Collection

from everstep.errors import Damaged, EverstepError, NothingToRestore
from everstep.events import Degraded, Sink
from everstep.image import FORMAT
from everstep.store.manifest import put_record, read_record
from everstep.store.tier import Tier
from everstep.types import Rewind

RECORD = "rewind.json"
WHEN = "End the run (`everstep halt`), and wait until `everstep status` says trainers: none; keeper: none."


def read(tier: Tier) -> int | None:
    """The step that was asked for, if any. Damaged if it cannot be read: nobody may go on from another one then."""
    try:
        return read_record(tier, RECORD, Rewind).step
    except FileNotFoundError:
        return None
    except Damaged as error:
        way = "somebody wanted to go back, and it said where to; `everstep rewind --undo` deletes it"
        raise Damaged(f"{error.reason}: {way}", tier=error.tier, file=error.file) from None


def ask(tier: Tier, step: int, known: Collection[int]) -> list[int]:
    """To go back to one of the steps that can be restored; the newer ones."""
    if step not in known:
        there = ", ".join(map(str, sorted(known))) or "none"
        raise NothingToRestore(f"step {step} cannot be restored; these can: {there}")
    take_back(tier)
    put_record(tier, RECORD, Rewind(format=FORMAT, step=step))
    return sorted(one for one in known if one > step)


def take_back(tier: Tier) -> None:
    """Nobody wants to go back any more."""
    tier.delete(RECORD)


def forget(tier: Tier, emit: Sink) -> None:
    """It was done: whatever is newer is set aside."""
    try:
        tier.delete(RECORD)
    except (EverstepError, OSError) as error:
        emit(Degraded(what="the next life would go back once more", reason=f"{RECORD} cannot be deleted: {error}"))
