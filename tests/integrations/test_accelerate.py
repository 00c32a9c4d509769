"""A loop of Accelerate under Everstep: killed and resumed bit for bit; what cannot be kept is refused."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from killed import check_ranks_resumed_bit_for_bit, check_resumed_bit_for_bit, example
from lives import live

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")


@pytest.fixture
def cases() -> Any:
    """Loaded by those who run one, which takes seconds."""
    return importlib.import_module("accelerate_cases")


def test_the_example_is_killed_and_resumed_bit_for_bit() -> None:
    state = check_resumed_bit_for_bit(example("train_accelerate").main, kills=(16,))
    assert state["step"] == 33 and len(state["extra"]["losses"]["value"]) == 63


@pytest.mark.soak
def test_two_ranks_of_ddp_are_killed_and_resumed_bit_for_bit() -> None:
    check_ranks_resumed_bit_for_bit(example("train_accelerate").main, kill=8)


@pytest.mark.soak
@pytest.mark.parametrize("kill", [1, 8, 31])
def test_two_ranks_of_fsdp2_are_killed_and_resumed_bit_for_bit(cases: Any, kill: int) -> None:
    check_ranks_resumed_bit_for_bit(cases.train_sharded, kill=kill, sharded=True)


@pytest.mark.soak
@pytest.mark.parametrize("kills", [(1,), (10,), (11,), (12, 13), (22, 23), (32,), (33,)], ids=str)
def test_it_may_be_killed_after_any_step(kills: tuple[int, ...]) -> None:
    check_resumed_bit_for_bit(example("train_accelerate").main, kills=kills)


@pytest.mark.soak
@pytest.mark.parametrize("kills", [(7,), (15,), (16, 17)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 4},
        {"kind": "drawn"},
        {"kind": "drawn", "use_seedable_sampler": True},
        {"use_seedable_sampler": True},
        {"kind": "stream"},
        {"kind": "workers"},
    ],
    ids=str,
)
def test_whatever_is_trained_goes_on_bit_for_bit(cases: Any, options: dict[str, Any], kills: tuple[int, ...]) -> None:
    state = check_resumed_bit_for_bit(lambda: cases.train(**options), kills=kills)
    assert state["extra"]["accelerate.0"]["state"] == {"seen": len(state["extra"]["losses"]["value"])}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"distributed": "FSDP"},
            "keeps the state of one device, of DDP and of FSDP2 (fsdp_version=2) with Accelerate, and this is FSDP",
        ),
        ({"prepared": False}, "prepare model, optimizer and loader with accelerator.prepare"),
        ({"use_stateful_dataloader": True}, "use_stateful_dataloader is not needed"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_refused(cases: Any, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    def refused() -> dict[str, Any]:
        sys.argv = ["example", "--dir", str(tmp_path / "run")]
        cases.guard_wrongly(**options)
        return {}

    outcome = live(refused)
    assert "BadConfig" in outcome.error and said in outcome.error
    assert not (tmp_path / "run").exists()
