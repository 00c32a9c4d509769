"""How fast bytes may leave: arithmetic on a clock that it is given.

Bytes are booked in order and pass in that order, at the rate. Nothing is saved up while nobody books, so what follows a
pause is one booking ahead of the rate at most. It never sleeps; whoever books does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Limiter:
    """Shared by all peers of a keeper, from any thread. `bytes_per_s` None: no limit."""

    def __init__(self, bytes_per_s: float | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._booked = 0  # bytes, since the beginning,
        self._passed = 0.0  # and how many of them the rate has let through
        self._settled_at = clock()
        self._bytes_per_s = self._checked(bytes_per_s)

    def change(self, bytes_per_s: float | None) -> None:
        """From now on, also for those who wait already."""
        with self._lock:
            self._settle()
            self._bytes_per_s = self._checked(bytes_per_s)

    def book(self, size_bytes: int) -> int:
        """A ticket for so many bytes: they may be sent when `wait_s(ticket)` is 0."""
        with self._lock:
            self._settle()
            ticket = self._booked
            self._booked += size_bytes
            return ticket

    def wait_s(self, ticket: int) -> float:
        """How long until all that was booked before has passed, if the rate stays as it is."""
        with self._lock:
            self._settle()
            if self._bytes_per_s is None:
                return 0.0
            return max(0.0, (ticket - self._passed) / self._bytes_per_s)

    def _settle(self) -> None:
        now = self._clock()
        if self._bytes_per_s is None:
            self._passed = self._booked
        else:
            self._passed = min(self._booked, self._passed + self._bytes_per_s * (now - self._settled_at))
        self._settled_at = now

    @staticmethod
    def _checked(bytes_per_s: float | None) -> float | None:
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ValueError(f"a rate of {bytes_per_s} bytes a second lets nothing through; None means no limit")
        return bytes_per_s
