"""How those who are left come out of a broken step at the same place, without doing it again: decided in rounds.

Reductions are numbered as DDP asks for them, which is the same on all ranks, and so are batches. After a loss every
rank says where it is, and all do the same next move; then they say it again. Nobody finishes a reduction that others
have not begun. So in what they reduce ranks are less than a pass apart, and who is ahead still has what others need:

    give      somebody has the result: it is everybody's
    reduce    nobody has it: it is made of the gradients of those who are left
    go on     somebody is in a later batch: whoever has finished an earlier one takes its next
    begin     all have finished the same batch: the life of the new group begins, with the state as it is
    give up   it cannot be done; nobody has updated anything since that would have to be undone by hand

Pure: touches no clock, process or socket.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from everstep.types import Noun


class Saying(Noun, frozen=True, kw_only=True):
    """Where one rank is."""

    batch: int  # that it is in, or has just finished
    share: float  # of the global batch
    needs: int | None = None  # the first reduction that it waits for; None: it has finished its batch
    has: tuple[int, ...] = ()  # reductions whose results it still holds
    broken: str = ""  # why it cannot finish its batch


class Give(Noun, frozen=True, kw_only=True):
    number: int
    source: int


class Reduce(Noun, frozen=True, kw_only=True):
    number: int
    present: float  # the share of the global batch that is still there

    def weight(self, share: float) -> float:
        """Of the gradient of a rank with this share: the sum is the average over what is still there."""
        return share / self.present


class GoOn(Noun, frozen=True, kw_only=True):
    batch: int


class Begin(Noun, frozen=True, kw_only=True):
    pass


class GiveUp(Noun, frozen=True, kw_only=True):
    reason: str


Move = Give | Reduce | GoOn | Begin | GiveUp


class Lossy(Noun, frozen=True, kw_only=True):
    """What a recovery went without."""

    buckets: int = 0  # that were reduced without the lost
    batches: float = 0.0  # that the lost had a share in, times the share

    @classmethod
    def of(cls, missing: Collection[Sequence[float]]) -> Lossy:
        """`missing`: of each batch, what share of it, in each bucket that was reduced without the lost."""
        return cls(buckets=sum(map(len, missing)), batches=sum(map(max, missing)))


def next_move(said: Sequence[Saying]) -> Move:
    """`said`: by all, in the order of ranks."""
    for rank, one in enumerate(said):
        if one.broken:
            return GiveUp(reason=f"rank {rank}: {one.broken}")
    number = min((one.needs for one in said if one.needs is not None), default=None)
    if number is None:
        last = max(one.batch for one in said)
        return Begin() if all(one.batch == last for one in said) else GoOn(batch=last)
    within = max(one.batch for one in said if one.needs == number)
    unaware = [rank for rank, one in enumerate(said) if one.needs != number and number not in one.has]
    for rank in unaware:
        if said[rank].needs is not None or said[rank].batch >= within:
            return GiveUp(reason=f"rank {rank} knows nothing of a reduction that others wait for")
    if unaware:
        return GoOn(batch=within)
    source = next((rank for rank, one in enumerate(said) if number in one.has), None)
    if source is not None:
        return Give(number=number, source=source)
    return Reduce(number=number, present=sum(one.share for one in said))
