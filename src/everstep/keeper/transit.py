"""A base on its way to a deeper tier: how far it is, how fast it may go, and whether anybody still wants it there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from everstep.keeper.protocol import Flush
from everstep.keeper.rate import Limiter

_LOOK_S = 0.05  # between two looks at whether it is still wanted, while a chunk waits for its turn


class CalledOff(Exception):
    """It is not wanted any more; why, is its text."""


class Transit:
    def __init__(
        self, tier: str, step: int, of_bytes: int, bytes_per_s: float | None, objection: Callable[[int], str]
    ) -> None:
        """`objection`: why a step is not wanted any more; empty if it is."""
        self._tier, self._step, self._of_bytes, self._objection = tier, step, of_bytes, objection
        self._limiter = Limiter(bytes_per_s)
        self._lock = threading.Lock()
        self._bytes = 0

    def passing(self, size_bytes: int) -> None:
        """As a tier calls it before every chunk: in its turn, or CalledOff."""
        self.check()
        ticket = self._limiter.book(size_bytes)
        while wait_s := self._limiter.wait_s(ticket):
            time.sleep(min(wait_s, _LOOK_S))
            self.check()
        self.count(size_bytes)

    def check(self) -> None:
        if reason := self._objection(self._step):
            raise CalledOff(reason)

    def count(self, size_bytes: int) -> None:
        """So many bytes are there, or about to be."""
        with self._lock:
            self._bytes += size_bytes

    def state(self) -> Flush:
        return Flush(tier=self._tier, step=self._step, bytes=self._bytes, of_bytes=self._of_bytes)
