"""A loop that goes on without those who are lost: a step that could not be finished comes again.

What a life in this process begins with is the same as in a new process: all ranks of the view meet, the newest step
that all can have is restored from the nearest tier, and capture begins anew. Only the process stays, with all that was
expensive to make. Where those who are left have finished the step by themselves, the state stays as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist

from everstep.errors import BadConfig, Restart
from everstep.live.forward import Forward, Then
from everstep.live.presence import Presence

_END = object()
_UNBEGUN = "its life had not begun"


@dataclass(frozen=True, slots=True)
class Carried:
    """What a life goes on with, beside the state, when nothing is restored."""

    position: dict[str, Any]  # of the data
    reductions: list[dict[str, Any]]
    batch_samples: int  # of all ranks


class Living(Protocol):
    """What a run lends to its loop."""

    def __iter__(self) -> Iterator[Any]:
        """Batches, from where the run stands."""

    def done(self) -> bool:
        """A step is over, if one was made since the last time."""

    def carried(self) -> Carried:
        """What the next life goes on with, if the state stays as it is."""

    def end_life(self) -> None:
        """Let go of what belongs to the present life; whatever is sealed stays."""

    def begin_again(self, carried: Carried | None = None) -> None:
        """Begin a life in the present group. None: with what is restored; Restart if there is nothing."""

    def tell_went_on(self, presence: Presence, **without: int) -> None:
        """`without`: the buckets and samples that the lost took with them."""


class _Bearing:
    """An error of the program leaves it as any error does; a lost peer's does not."""

    def __init__(self, is_by_loss: Callable[[BaseException], bool]) -> None:
        self._is_by_loss = is_by_loss
        self.failure = ""  # by a loss

    def __enter__(self) -> Any:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not self._is_by_loss(error):
            return False
        self.failure = str(error) or type(error).__name__
        return True


class LiveStep(_Bearing):
    """Entering it gives the batch."""

    def __init__(self, batch: Any, is_by_loss: Callable[[BaseException], bool], presence: Presence) -> None:
        super().__init__(is_by_loss)
        self._batch, self._presence = batch, presence

    def __enter__(self) -> Any:
        self._presence.watch.work()
        return self._batch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        is_borne = super().__exit__(kind, error, trace)
        if not is_borne:
            self._presence.set_free()
        return is_borne


@contextmanager
def _told_to_start_again() -> Iterator[None]:
    """A program that does not catch Restart ends with the code by which its launcher knows that."""
    try:
        yield
    except Restart:
        before = sys.excepthook

        def after(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            before(kind, error, trace)
            if isinstance(error, Restart):
                raise SystemExit(error.exit_code)

        sys.excepthook = after  # only now: torch puts another one over it with every group
        raise


def live_steps(run: Living, presence: Presence, forward: Forward | None) -> Iterator[LiveStep]:
    with _told_to_start_again():
        yield from _steps(run, presence, forward)


def _steps(run: Living, presence: Presence, forward: Forward | None) -> Iterator[LiveStep]:
    is_by_loss = presence.is_by_loss if forward is None else forward.is_by_loss
    batches = iter(run)
    while True:
        presence.watch.work()
        between, batch = _Bearing(is_by_loss), None
        with between:
            batch = next(batches, _END)
        if batch is _END:
            return
        step = LiveStep(batch, is_by_loss, presence)
        if not between.failure and (forward is not None or presence.lost is None):
            if forward is not None:
                forward.enter()
            presence.set_free()
            yield step
            presence.watch.work()
            with between:
                run.done()  # in which a loss can be noticed too
        if presence.lost is not None or (forward is not None and forward.is_under_way):
            _go_on(run, presence, forward, step.failure)
            batches = iter(run)


@_told_to_start_again()
def stand_by(run: Living, presence: Presence | None, forward: Forward | None) -> None:
    """As a spare: wait for a place, and take it."""
    if presence is None:
        raise BadConfig("this process is a spare (EVERSTEP_SPARE): guard() needs on_loss=['spare', ...]")
    presence.enrol_as_spare()
    _go_on(run, presence, forward, _UNBEGUN)


def _go_on(run: Living, presence: Presence, forward: Forward | None, broken: str) -> None:
    if forward is None:
        _go_back(run, presence)
    else:
        _go_forward(run, presence, forward, broken)


def _go_back(run: Living, presence: Presence) -> None:
    """With those who are left; once more, if one of them is lost meanwhile."""
    has_begun = False
    while not has_begun or presence.lost is not None:
        run.end_life()
        beginning = _Bearing(presence.is_by_loss)
        with beginning:
            presence.meet(presence.next_view())
            run.begin_again()
        has_begun = not beginning.failure
    run.tell_went_on(presence)


def _go_forward(run: Living, presence: Presence, forward: Forward, broken: str) -> None:
    """The same, with the state as it is where all have that of the same step.

    Nobody does the first step of a life before all have begun it: whoever is lost meanwhile is lost between two steps.
    """
    carried: Carried | None = None
    while (then := forward.ask(broken)) is not Then.GO_ON:
        if then is Then.CARRY:
            carried = carried or run.carried()
        run.end_life()
        beginning = _Bearing(presence.is_by_loss)
        with beginning:
            broken = "" if then is Then.CARRY else _UNBEGUN
            if then is Then.MEET:
                forward.meet()
            run.begin_again(carried if then is Then.CARRY else None)
            lossy = forward.has_begun(then)
            samples = round(lossy.batches * carried.batch_samples) if carried is not None else 0
            broken = ""
            run.tell_went_on(presence, buckets=lossy.buckets, samples=samples)
            dist.barrier()
        if not beginning.failure:
            return
