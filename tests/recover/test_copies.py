"""A directory of a run that was copied has the same name, and nothing of the other's memory."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from lives import STEPS, kill_keeper, live, must_finish, run_directory, train_tiny, undisturbed
from test_rewind import killed_at

import everstep
from everstep.errors import Misuse

PROCESS: dict[str, Any] = {"keeper": "process", "linger": "30s", "tiers": [everstep.Disk(every=2)]}


def test_a_copy_does_not_take_the_memory_of_the_original_and_waits_for_it_to_be_gone() -> None:
    with run_directory() as directory:
        copy, moved = directory.with_name("copy"), directory.with_name("moved")
        assert live(lambda: train_tiny(directory, killed_at(2), **PROCESS)).killed
        shutil.copytree(directory, copy)
        assert live(lambda: train_tiny(directory, killed_at(4, lambda run: None), **PROCESS)).killed
        assert everstep.open(copy).plan().step == 2
        outcome = live(lambda: train_tiny(copy, **PROCESS))
        assert Misuse.__name__ in outcome.error and f"{copy} was moved or copied from {directory}" in outcome.error
        directory.rename(moved)  # which is no copy, but the keeper does not know of it
        outcome = live(lambda: train_tiny(moved, **PROCESS))
        assert Misuse.__name__ in outcome.error and f"{moved} was moved or copied from {directory}" in outcome.error
        kill_keeper(moved)
        result = must_finish(lambda: train_tiny(moved, **PROCESS))
        assert result["resumed_from"] == 4 and result["digest"] == undisturbed()
        result = must_finish(lambda: train_tiny(copy, **PROCESS))  # nobody has memory any more
        assert result["resumed_from"] == 2 and result["digest"] == undisturbed()
        assert everstep.open(moved).latest() == everstep.open(copy).latest() == STEPS


def test_a_link_to_the_directory_is_no_copy() -> None:
    with run_directory() as directory:
        assert live(lambda: train_tiny(directory, killed_at(3), **PROCESS)).killed
        link = directory.with_name("link")
        link.symlink_to(directory)
        assert must_finish(lambda: train_tiny(link, **PROCESS))["resumed_from"] == 3


@pytest.fixture(autouse=True)
def _quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """Lives say from where they go on."""
