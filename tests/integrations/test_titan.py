"""A loop in the manner of torchtitan, which is not iterated by the run: killed and resumed bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from killed import check_resumed_bit_for_bit, example


def test_the_example_is_killed_and_resumed_bit_for_bit() -> None:
    state = check_resumed_bit_for_bit(example("train_titan").main, kills=(17,))
    assert state["step"] == 40 and state["extra"]["train"]["state"]["tokens_seen"] == 40 * 2 * 8 * 16


@pytest.mark.soak
@pytest.mark.parametrize("kills", [(1,), (2, 3), (39,), (40,)], ids=str)
def test_it_may_be_killed_after_any_step(kills: tuple[int, ...]) -> None:
    check_resumed_bit_for_bit(example("train_titan").main, kills=kills)
