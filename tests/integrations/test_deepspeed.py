"""DeepSpeed's ZeRO under Everstep: killed and resumed bit for bit; what cannot be kept is refused."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from killed import check_ranks_resumed_bit_for_bit, example, job
from lives import MeetingPlace, live, run_directory, way_to

import everstep
from everstep.errors import BadConfig

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")


@pytest.fixture(autouse=True)
def loaded() -> None:
    """DeepSpeed, as it is where there is no compiler: it would make a faster all-reduce for CPUs first, for minutes.

    Loaded once: lives are forked from here.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def train() -> Any:
    return example("train_deepspeed").main


def test_the_example_is_killed_and_resumed_bit_for_bit() -> None:
    state = check_ranks_resumed_bit_for_bit(train(), kill=9)
    counters = {"global_steps": 30, "global_samples": 960, "micro_steps": 60, "skipped_steps": 0}
    assert state["extra"]["deepspeed"]["state"] == counters
    assert state["optimizer.params.0.0"].shape == (674,)  # a half of all parameters, and of their moments


@pytest.mark.soak
@pytest.mark.parametrize("kill", [1, 10, 29])
@pytest.mark.parametrize("words", [("--stage", 1), ("--stage", 1, "--bf16"), ("--stage", 2, "--bf16")], ids=str)
def test_whatever_is_trained_goes_on_bit_for_bit(words: tuple[object, ...], kill: int) -> None:
    check_ranks_resumed_bit_for_bit(train(), *words, kill=kill)


@pytest.mark.soak
def test_another_number_of_ranks_is_refused_with_the_name_of_a_part() -> None:
    with run_directory() as directory:
        job(train(), directory, "--epochs", 1, kill_after=3)

        def alone() -> dict[str, Any]:
            sys.argv = ["example", "--dir", str(directory), "--epochs", "1"]
            train()()
            return {}

        assert re.search(
            r"Mismatch: checkpoint \d does not fit this program.*optimizer\.params\.0\.0", error_of(alone), re.S
        )
        assert everstep.open(directory).latest() in (2, 3)  # which is still there for two


@pytest.mark.soak
@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (
            {"stage": 0},
            {},
            "Everstep keeps ZeRO 1 and 2 without offloading, and this is a DeepSpeedEngine with a AdamW",
        ),
        ({"stage": 3}, {}, "with a DeepSpeedZeroOptimizer_Stage3 (stage 3): keep to engine.save_checkpoint()"),
        ({"stage": 1}, {"strategy": "log"}, "a log would have the steps of DeepSpeed's optimizer"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_refused(
    config: dict[str, Any], options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    def refused() -> dict[str, Any]:
        from everstep.integrations.deepspeed import guard

        guard(engine_of(config), [], dir=tmp_path / "run", **options)
        return {}

    assert said in error_of(refused)
    assert not (tmp_path / "run").exists()


def test_an_engine_or_its_optimizer_given_to_plain_guard_is_sent_to_the_right_door(tmp_path: Path) -> None:
    def refused() -> dict[str, Any]:
        engine = engine_of({"stage": 1})
        with pytest.raises(BadConfig, match=r"everstep.integrations.deepspeed.guard\(engine, loader, dir=...\) knows"):
            everstep.guard(engine, engine.basic_optimizer, dir=tmp_path / "run")
        everstep.guard(engine.module, [engine.optimizer], dir=tmp_path / "run")
        return {}

    assert "DeepSpeed keeps weights and optimizer in places of its own" in error_of(refused)


def engine_of(zero: dict[str, Any]) -> Any:
    import deepspeed

    everstep.init_process_group("gloo")
    deepspeed.init_distributed("gloo")
    model = nn.Linear(4, 3)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]


def error_of(refused: Any) -> str:
    meeting = MeetingPlace()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **way_to(meeting.port)}

    def life() -> dict[str, Any]:
        os.environ |= alone
        return dict(refused())

    outcome = live(life)
    meeting.close()
    assert "BadConfig" in outcome.error or "Mismatch" in outcome.error, outcome
    return outcome.error
