"""A loop that goes on without those who are lost: a step that could not be finished comes again.

What a life in this process begins with is the same as in a new process: all ranks of the view meet, the newest step
that all can have is restored from the nearest tier, and capture begins anew. Only the process stays, with all that was
expensive to make.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol

from everstep.errors import BadConfig
from everstep.live.presence import Presence

_END = object()


class Living(Protocol):
    """What a run lends to its loop."""

    def __iter__(self) -> Iterator[Any]:
        """Batches, from where the run stands."""

    def end_life(self) -> None:
        """Let go of what belongs to the present life; whatever is sealed stays."""

    def begin_again(self) -> None:
        """Begin a life in the present group. Restart if there is nothing that it could go on from."""

    def tell_went_on(self, presence: Presence) -> None: ...


class LiveStep:
    """Entering it gives the batch. An error of the program leaves it as any error does; a lost peer's does not."""

    def __init__(self, batch: Any, presence: Presence) -> None:
        self._batch, self._presence = batch, presence

    def __enter__(self) -> Any:
        return self._batch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return error is not None and self._presence.is_by_loss(error)


def live_steps(run: Living, presence: Presence) -> Iterator[LiveStep]:
    batches = iter(run)
    while True:
        try:
            batch = next(batches, _END)  # ends the step before, in which a loss can be noticed too
        except (RuntimeError, ConnectionError) as error:
            if not presence.is_by_loss(error):
                raise
            batch = None
        if batch is _END:
            return
        if presence.lost is None:
            yield LiveStep(batch, presence)
        if presence.lost is not None:
            _go_on(run, presence)
            batches = iter(run)


def stand_by(run: Living, presence: Presence | None) -> None:
    """As a spare: wait for a place, and take it."""
    if presence is None:
        raise BadConfig("this process is a spare (EVERSTEP_SPARE): guard() needs on_loss=['spare', ...]")
    presence.enrol_as_spare()
    _go_on(run, presence)


def _go_on(run: Living, presence: Presence) -> None:
    """With those who are left; once more, if one of them is lost meanwhile."""
    has_begun = False
    while not has_begun or presence.lost is not None:
        run.end_life()
        try:
            presence.meet(presence.next_view())
            run.begin_again()
            has_begun = True
        except (RuntimeError, ConnectionError) as error:
            if not presence.is_by_loss(error):
                raise
    run.tell_went_on(presence)
