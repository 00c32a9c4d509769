"""What is read of a run, whatever state its files are in and however long it was."""

from __future__ import annotations

from io import StringIO

import pytest
from lives import must_finish, run_directory, train_tiny

from everstep.report.page import write_page
from everstep.report.story import Story, read_story


def test_events_that_cannot_be_read_are_named_and_the_others_are_shown() -> None:
    with run_directory() as directory:
        must_finish(lambda: train_tiny(directory))
        (directory / "events-keeper-gone.jsonl").mkdir()
        story = read_story(directory)
        assert story.events
        assert story.missing == ["1 lines of the events are torn or unknown, and left out."]


def test_when_a_run_began_is_looked_up_once_and_not_for_every_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Story] = []
    moments = Story._moments
    monkeypatch.setattr(Story, "_moments", lambda story: (looks.append(story), moments(story))[1])
    with run_directory() as directory:
        must_finish(lambda: train_tiny(directory))
        write_page([read_story(directory)], StringIO())
    assert 0 < len(looks) <= 2
