"""How busy the accelerators of this node are, as NVML says, in a timeline of their own. Without NVML nothing happens.

The keeper asks, so that no trainer does. An answer that stays the same is one span, of a second at most.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from everstep.timeline import Kind, Timeline, device_part

EVERY_S = 0.05
_SHARE = 0.1  # of its time, that asking takes at most
_LONGEST_S = 1.0  # until an answer is written down although it has not changed


class Devices:
    """Asks in a thread of its own until it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._since: dict[int, tuple[int, float]] = {}  # device -> how busy it is, and since when
        self._spans = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="everstep-devices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join(timeout=5.0)

    def _work(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except Exception:
            return  # no package, no driver or no device: there is nobody to ask
        timeline = Timeline(self._path)
        rest_s = EVERY_S
        while not self._ending.wait(rest_s):
            began = time.monotonic()
            for device, handle in enumerate(handles):
                self._note(timeline, device, _busy(pynvml, handle), time.monotonic())
            took_s = time.monotonic() - began
            rest_s = max(EVERY_S - took_s, took_s / _SHARE)
        now = time.monotonic()
        for device in list(self._since):
            self._note(timeline, device, None, now)
        timeline.close()

    def _note(self, timeline: Timeline, device: int, percent: int | None, now: float) -> None:
        known = self._since.get(device)
        if known is not None and known[0] == percent and now - known[1] < _LONGEST_S:
            return
        if known is not None:
            self._spans += 1
            timeline.mark(Kind.DEVICE, self._spans, known[1], now, device_part(device, known[0]))
        if percent is None:
            self._since.pop(device, None)
        else:
            self._since[device] = (percent, now)


def _busy(pynvml: Any, handle: object) -> int | None:
    """Per cent of its time; None if the device does not say, or is gone."""
    try:
        return int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except Exception:
        return None
