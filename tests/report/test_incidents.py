"""What a report tells of how lives ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from everstep.events import Closed, Event, Finished, Halted, Stopping
from everstep.report.series import incidents

ENDS = [
    Closed(rank=0, step=3),
    Finished(rank=0, step=3),
    Halted(rank=0, step=3, why="now"),
    Stopping(rank=0, signal="SIGTERM", step=3),
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: type(end).__name__)
def test_however_a_life_was_ended_it_is_told(end: Event) -> None:
    story: Any = SimpleNamespace(events=[end])
    assert [kind for _, kind, _ in incidents(story)] == [type(end).__name__]
