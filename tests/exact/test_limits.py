"""A finished run yields nothing more, unless it is allowed to go further."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import must_finish, run_directory, train_tiny


def test_a_finished_run_goes_on_when_its_limit_is_raised_and_matches_one_that_had_it_from_the_start() -> None:
    with run_directory() as one, run_directory() as two:
        whole = must_finish(lambda: train_tiny(one, steps=20))
        must_finish(lambda: train_tiny(two, steps=9))
        assert must_finish(lambda: train_tiny(two, steps=9))["resumed_from"] == 9
        longer = must_finish(lambda: train_tiny(two, steps=20))
    assert longer["resumed_from"] == 9
    assert longer["digest"] == whole["digest"]


def test_epochs_can_be_added_too() -> None:
    with run_directory() as one, run_directory() as two:
        whole = must_finish(lambda: train_tiny(one, steps=None, epochs=3))
        must_finish(lambda: train_tiny(two, steps=None, epochs=1))
        assert must_finish(lambda: train_tiny(two, steps=None, epochs=3))["digest"] == whole["digest"]
