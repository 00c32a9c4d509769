"""How long a step of this loop takes, and whether the present one takes far longer: then somebody hangs.

Those who wait for a rank that hangs are as silent as it is. So whoever is in a step for much longer than any before it
says so, and all of the view are called to a stop: those who only waited come, and who does not come hangs.

A program is on its own time between leaving a step and asking for the next one. It may then do what it likes, for as
long as it likes: evaluate, write, wait. Nobody takes it for hung.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

_LEARNT_FROM = 10  # spans, before anything is called long: first steps compile
_REMEMBERED = 100
_TIMES = 10  # what usually is the longest
_LEAST = 3  # detection times
_LOOKS = 20  # within the least limit


class Watch:
    def __init__(self, detect_s: float, alarm: Callable[[float, float], None]) -> None:
        """`alarm`: is told how long the present span of work has taken, and how long the longest did before it."""
        self._least_s, self._alarm = _LEAST * detect_s, alarm
        self._spans: deque[float] = deque(maxlen=_REMEMBERED)
        self._since: float | None = None  # when the present span of work began
        self._broken_s = 0.0  # how long the last one took that a loss ended
        self.is_free = False  # the program is on its own time
        threading.Thread(target=self._look, name="everstep-watch", daemon=True).start()

    def work(self) -> None:
        """The program is in a step, or in the loop's hands."""
        self.is_free, self._since = False, time.monotonic()

    def rest(self) -> None:
        """It is on its own time."""
        since, self._since = self._since, None
        if since is not None:
            self._spans.append(time.monotonic() - since)
        self.is_free = True

    def recover(self) -> None:
        """It meets others again, which has bounds of its own."""
        since, self._since = self._since, None
        self._broken_s = time.monotonic() - since if since is not None else 0.0
        self.is_free = False

    def learn(self) -> None:
        """Nobody was lost: what took so long was a step."""
        self._spans.append(self._broken_s)

    def _look(self) -> None:
        told: float | None = None
        while True:
            time.sleep(self._least_s / _LOOKS)
            since, spans = self._since, list(self._spans)
            if since is None or since == told or len(spans) < _LEARNT_FROM:
                continue
            took_s, longest_s = time.monotonic() - since, max(spans)
            if took_s > max(self._least_s, _TIMES * longest_s):
                told = since
                self._alarm(took_s, longest_s)
