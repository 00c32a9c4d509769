"""When the parts of a step began, as those see it who are called anyway: the loop, the hooks on DDP and on optimizers.

Nothing of the user's program is touched for it, so what nobody is called for is left out. The boundary between forward
and backward is the first bucket that DDP hands over to be reduced: what backward did before it counts as forward. Of a
device these are the times at which its work was handed to it, not those at which it was done.
"""

from __future__ import annotations

import time

from everstep.timeline import Kind, Mark, unmarked

_FEW = 4  # optimizers; one a parameter, inside backward, says nothing of the phases of a step and would cost too much


class Moments:
    """Of one life of one rank: a handful of clock calls a step."""

    def __init__(self, mark: Mark = unmarked, *, step: int = 0, optimizers: int = 1) -> None:
        """`step`: that the life begins with."""
        self.mark, self._is_clear = mark, optimizers <= _FEW
        self._step = step + 1  # under way
        self._cut_at = self._kept_at = time.monotonic()
        self._forget()

    def _forget(self) -> None:
        self._batches = 0
        self._given_at = self._reduces_at = self._updates_at = 0.0
        self._has_updated = False

    def given(self) -> None:
        """The loop has a batch."""
        now = time.monotonic()
        if not self._batches:
            self.mark(Kind.DATA, self._step, self._kept_at, now)
            self._given_at = now
        self._batches += 1

    def reduces(self) -> None:
        """DDP has a bucket of gradients."""
        if not self._reduces_at:
            self._reduces_at = time.monotonic()

    def reduced(self) -> None:
        """The last bucket of a pass is reduced."""
        self.mark(Kind.COMMUNICATION, self._step, self._reduces_at, time.monotonic())

    def updates(self) -> None:
        """An optimizer is about to step."""
        if not self._is_clear:
            return
        self._updates_at = now = time.monotonic()
        if self._has_updated:
            return
        self._has_updated = True
        if self._reduces_at and self._batches == 1:
            self.mark(Kind.FORWARD, self._step, self._given_at, self._reduces_at)
            self.mark(Kind.BACKWARD, self._step, self._reduces_at, now)
        else:
            self.mark(Kind.COMPUTE, self._step, self._given_at or self._kept_at, now)

    def waited(self, begin: float, end: float, optimizer: int) -> None:
        """Its update had to wait for copies."""
        self.mark(Kind.GATE, self._step, begin, end, optimizer)
        self._updates_at = end

    def updated(self, optimizer: int) -> None:
        """An optimizer has stepped."""
        if self._is_clear:
            self.mark(Kind.UPDATE, self._step, self._updates_at, time.monotonic(), optimizer)

    def recorded(self, begin: float, end: float, optimizer: int) -> None:
        """What it consumes was copied in front of it."""
        if self._is_clear:
            self.mark(Kind.RECORD, self._step, begin, end, optimizer)

    def cut(self, step: int) -> float:
        """A step is over; the seconds that it took."""
        before, self._cut_at = self._cut_at, time.monotonic()
        self.mark(Kind.STEP, step, before, self._cut_at)
        self._step = step + 1
        self._forget()
        return self._cut_at - before

    def kept(self, step: int) -> None:
        """All that was to be done at the cut is done."""
        self._kept_at = time.monotonic()
        self.mark(Kind.CUT, step, self._cut_at, self._kept_at)
