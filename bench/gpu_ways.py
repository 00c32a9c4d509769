"""One method on one model, from its beginning to its end: where it writes, whether it fits, how long it may take."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path

import gpu_models
from gpu_merge import LEFT_OUT
from gpu_methods import OURS, SHM, Everstep, Method, folder_prefix, slots_for, state_bytes
from gpu_models import Case
from gpu_peers import OTHERS

from everstep.capture.host import free_memory

METHODS = {method.name: method for method in (*OURS, *OTHERS)}
# What takes too long for what it tells. By name it is run all the same.
SPARED = {
    "gpt2-xl": {
        "Everstep, direct": "for want of time; its folder in shared memory makes it what mode host is",
        "Everstep, replica": "for want of time; its loop does what that of the dense log does",
        "DCP async_save, pinned and staged": "for want of time; one save takes as long as two other methods",
        "DCP async_save": "for want of time; one save takes as long as two other methods",
    }
}


class Overrun(TimeoutError):
    """A model has had its time, in the middle of a method: what that has left on the model nobody knows."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Ends what the main thread does with `Overrun`, once it returns to the interpreter."""

    def end(*_: object) -> None:
        raise Overrun(f"the time of the model was over after {seconds:.0f} s of this method")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def why_left_out(case: Case, method: type[Method], scratch: Path) -> str:
    """Why there is no room for a method, in words for its cell; empty if there is."""
    state = state_bytes(case)
    gradient = sum(parameter.nbytes for parameter in case.model.parameters())
    memory, disk = method.needs(state, gradient, slots_for(state) or 3)
    for what, needed, free in (
        ("memory", memory, free_memory(None)),
        ("disk", disk, shutil.disk_usage(scratch).free),
    ):
        if needed > free:
            return f"{LEFT_OUT}needs {needed / 1e9:.0f} GB of {what}, and {free / 1e9:.0f} are free"
    return ""


class Ways:
    """A method's object, and a new one for another interval if it has to be."""

    _removal: threading.Thread | None = None  # of what one before has left: some disks take long to free blocks

    def __init__(self, case: Case, method: type[Method], scratch: Path) -> None:
        self.method, self._case, self._scratch = method, case, scratch
        self._way: Method | None = None
        self._root: Path | None = None

    def at(self, interval: int) -> Method:
        if self._way is None or not self._way.goes_on(interval):
            self.close()
            if issubclass(self.method, Everstep) and not self.method.stays_in_memory:
                self.until_removed()  # in its first steps it learns how fast the disk is
            self._root = Path(tempfile.mkdtemp(prefix=folder_prefix(), dir=self._folder()))
            self._way = self.method(self._case, self._root, interval)
            self.until_removed()
        return self._way

    def _folder(self) -> Path:
        """What stays in memory begins with a base, too: it is not timed, so it need not wait for a disk."""
        state = state_bytes(self._case)
        room = 1.1 * ((slots_for(state) or 3) + 1) * state
        fits = self.method.stays_in_memory and SHM.is_dir() and shutil.disk_usage(SHM).free > room
        return SHM if fits and free_memory(None) > room else self._scratch

    def close(self) -> None:
        way, self._way = self._way, None
        try:
            if way is not None:
                way.close()
        finally:
            if self._root is not None:
                self.until_removed()
                Ways._removal = threading.Thread(target=shutil.rmtree, args=(self._root, True))
                Ways._removal.start()
                self._root = None

    @classmethod
    def until_removed(cls) -> None:
        if cls._removal is not None:
            cls._removal.join()


def step_seconds(case: Case) -> float:
    for _ in range(5):
        case.step()
    gpu_models.sync()
    began = time.perf_counter()
    for _ in range(8):
        case.step()
    gpu_models.sync()
    step_s = (time.perf_counter() - began) / 8
    case.lead = max(1, min(3, ceil(0.1 / step_s)))
    return step_s
