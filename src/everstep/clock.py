"""Where time comes from, so that a simulator can bring its own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the epoch, for records that people read."""

    def monotonic(self) -> float:
        """Seconds that never go back, for intervals."""


class WallClock:
    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()
