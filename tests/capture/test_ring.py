"""Records that are on their way while the next step is recorded, as those of a device are."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.capture.sheet import Sheet
from everstep.events import Replayed, read_events

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import live, must_finish, run_directory, train_tiny


def slowly(directory: Path, **options: Any) -> dict[str, Any]:
    """A life whose records are sealed only after the next step has begun."""
    finish = Sheet.finish

    def later(sheet: Sheet, *arguments: Any) -> None:
        time.sleep(0.03)
        finish(sheet, *arguments)

    Sheet.leaves_later = property(lambda sheet: True)  # type: ignore[assignment, method-assign]
    Sheet.finish = later  # type: ignore[method-assign]
    return train_tiny(directory, strategy="log", steps=12, **options)


@pytest.mark.parametrize("ratio", [None, 0.2], ids=["dense", "with residuals"])
def test_a_slot_that_is_still_being_filled_is_not_given_away(ratio: float | None) -> None:
    def compress() -> dict[str, Any]:
        return {} if ratio is None else {"compress": everstep.compress.TopK(ratio)}

    with run_directory() as one, run_directory() as two:
        whole = must_finish(lambda: train_tiny(one, steps=12, **compress()))

        def die_at_eight(run: everstep.Run) -> None:
            if run.step:
                run.wait("durable")  # a ring that is full would end the chain
            if run.step == 8:
                os.kill(os.getpid(), signal.SIGKILL)

        assert live(lambda: slowly(two, at_step=die_at_eight, **compress())).killed
        resumed = must_finish(lambda: slowly(two, **compress()))
        assert resumed["resumed_from"] >= 6
        assert resumed["digest"] == whole["digest"]
        assert any(isinstance(event, Replayed) for event in read_events(two))


def test_when_a_record_cannot_leave_the_device_its_residuals_are_let_go_too_and_the_loop_hears_of_it() -> None:
    """The next update waits until both have left spare memory; whatever happens to the first, it must not for ever."""
    launch = Sheet.launch
    launched: list[str] = []

    def fails(sheet: Sheet, *arguments: Any) -> float:
        launched.append(sheet.arena.kind)
        if sheet.arena.kind == "log":
            raise RuntimeError("the link is gone")
        return launch(sheet, *arguments)

    def life() -> dict[str, Any]:
        Sheet.leaves_later = property(lambda sheet: True)  # type: ignore[assignment, method-assign]
        Sheet.launch = fails  # type: ignore[method-assign]
        with pytest.raises(everstep.EverstepError, match="the link is gone"):
            train_tiny(directory, strategy="log", compress=everstep.compress.TopK(0.2))
        return {"launched": launched}

    with run_directory() as directory:
        assert must_finish(life)["launched"][:2] == ["log", "values"]
