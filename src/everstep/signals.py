"""SIGTERM, SIGINT or a halt as a wish: the step is finished, saved, and all ranks leave together, in good order."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from everstep.events import say

_GRACE_S, _GRACE_STEPS = 2.0, 5  # after SIGTERM, for the step to end
_HEARD_S = 0.5  # until all ranks have heard of the last step
_END = b"\0"  # no signal has this number


class Signals:
    """Hears the signals of this process, and knows which step is the last."""

    def __init__(self, step_s: Callable[[], float], *, stands_by: bool = False) -> None:
        """`step_s`: how long a step takes. `stands_by`: there is none yet that could be finished."""
        self._step_s, self._stands_by = step_s, stands_by
        self._tell: Callable[[int, str], None] | None = None
        self._leaves_alone = False
        self._received: int | None = None
        self._stop_at: int | None = None  # the last step, as all ranks know it,
        self.halt = ""  # and why, if no signal asked for it
        self._is_leaving = False
        self._pid = os.getpid()
        self._over = False
        self._forking = threading.local()  # what each thread that forks lets through otherwise
        self._old: dict[int, Any] = {}
        self._woken = self._told = -1  # where signals were told before, and where they are told now
        if threading.current_thread() is threading.main_thread():
            self._catch()

    def _catch(self) -> None:
        hear, self._told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(hear, True)
        self._woken = signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(hear,), name="everstep-signals", daemon=True).start()
        self._old = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGINT)}
        ours = weakref.ref(self)
        os.register_at_fork(
            before=lambda: _hold_back(ours()),
            after_in_parent=lambda: _let_through(ours()),
            after_in_child=lambda: _let_be_a_child(ours()),
        )

    def join(self, tell: Callable[[int, str], None] | None, *, leaves_alone: bool) -> None:
        """This process has a place from now on. `tell`: the other ranks of the last step, if there are any.

        `leaves_alone`: after a signal the others go on without this one. A halt is for all.
        """
        self._tell, self._leaves_alone, self._stands_by = tell, leaves_alone, False

    def _watch(self, hear: int) -> None:
        """A trainer that hangs in a collective cannot finish its step: after a while it leaves without, losing nothing.

        Python runs signal handlers between two of its own instructions, which a hanging trainer never reaches.
        """
        while (number := os.read(hear, 1)) not in (_END, b""):
            if number[0] == signal.SIGTERM:
                deadline = time.monotonic() + max(_GRACE_S, _GRACE_STEPS * self._step_s())
                while time.monotonic() < deadline and not self._over and not self._is_leaving:
                    time.sleep(0.05)
                if not self._over and not self._is_leaving:
                    os._exit(128 + signal.SIGTERM)
        os.close(hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.is_forked:
            return  # SIGINT goes to a whole group: the workers of a loader are needed until the step is done
        if self._over:  # it ended in another thread, or somebody has put this back
            self._restore()
            os.kill(self._pid, number)
            return
        if self._stands_by:
            raise SystemExit(128 + number)
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: do not wait for the step
        self._received = number
        name = signal.Signals(number).name
        say(f"{name}: finishing the step, then saving and leaving")

    def stop_at(self, step: int, halt: str) -> None:
        """Another rank leaves after this step. `halt`: why, unless it received a signal."""
        self.halt = self.halt or halt
        self._stop_at = step if self._stop_at is None else min(self._stop_at, step)

    def hear_halt(self, why: str) -> None:
        self.halt = why

    def is_last(self, step: int) -> bool:
        """Whether this step is the last one.

        Ranks leave at the same step. Whoever was told first appoints one so far ahead that all others hear of it before
        they are there.
        """
        if (self._received is not None or self.halt) and self._stop_at is None:
            if self._tell is None or self._is_for_one:
                return True
            self._stop_at = step + max(2, math.ceil(_HEARD_S / max(self._step_s(), 1e-3)))
            self._tell(self._stop_at, self.halt)
        return self._stop_at is not None and step >= self._stop_at

    def will_leave(self, step: int) -> bool:
        """Whether the run ends with this step, as far as all ranks know it."""
        if self._tell is None or self._is_for_one:
            return self.is_asked
        return self._stop_at is not None and step >= self._stop_at

    @property
    def _is_for_one(self) -> bool:
        return self._leaves_alone and not self.halt

    @property
    def is_asked(self) -> bool:
        """Whether this process is to leave as soon as it can."""
        return self._received is not None or bool(self.halt)

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the trainer, which shares its sockets and must not close them for both."""
        return os.getpid() != self._pid

    def leave(self) -> int | None:
        """The wish is being granted: nobody needs to be impatient. Returns the signal; None: it is a halt."""
        self._is_leaving = True
        return self._received or (None if self.halt else signal.SIGTERM)

    def give_back(self) -> None:
        """Signals are again what they were before; if another run hears them by now, once that gives them back."""
        self._over = True
        if threading.current_thread() is threading.main_thread():
            self._restore()

    def pass_on(self) -> None:
        """A signal that came while the run ended, when no step was left to leave after, is the program's to hear."""
        if self._received is not None and not self._is_leaving:
            os.kill(self._pid, self._received)

    def _restore(self) -> None:
        if not self._old:
            return
        old, woken = self._before()
        for number, handler in old.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, handler)
        told = signal.set_wakeup_fd(-1)
        if told < 0 or told != self._told:  # whoever came later will tell us again, as he found it
            signal.set_wakeup_fd(told, warn_on_full_buffer=False)
            return
        try:
            signal.set_wakeup_fd(woken)
        except (ValueError, OSError):  # whoever wanted to be woken is gone
            signal.set_wakeup_fd(-1)
        self._end_thread()

    @property
    def _older(self) -> Signals | None:
        """Of a run that was over while this one heard its signals."""
        older = getattr(self._old[signal.SIGTERM], "__self__", None)
        return older if isinstance(older, Signals) and older._over else None

    def _before(self) -> tuple[Mapping[int, Any], int]:
        """Handlers, and where signals were told, of whoever was there before and is still."""
        return self._older._before() if self._older is not None else (self._old, self._woken)

    def _end_thread(self) -> None:
        if self._older is not None:
            self._older._end_thread()
        if self._told < 0:  # long since, and somebody has only put its handlers back
            return
        with suppress(BlockingIOError):  # full of signals: it is awake, and comes to the end
            os.write(self._told, _END)  # forked children may hold this side open
        os.close(self._told)
        self._told = -1


def _hold_back(signals: Signals | None) -> None:
    """A child that is terminated before it is known to be one would wake us: it shares our pipe."""
    if signals is not None and not signals._over:
        signals._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_through(signals: Signals | None) -> None:
    if signals is not None and hasattr(signals._forking, "mask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, signals._forking.mask)
        del signals._forking.mask


def _let_be_a_child(signals: Signals | None) -> None:
    """A forked child is not the trainer: SIGTERM ends it as ever, and the trainer does not hear of it."""
    if signals is not None and not signals._over:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signals._before()[0][signal.SIGTERM])
    _let_through(signals)


@contextmanager
def heard_by(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Ctrl-C, and being asked to end, both mean this for a while."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
