"""The Trainer of transformers under Everstep: killed and resumed bit for bit; what cannot be kept is refused."""

from __future__ import annotations

import importlib
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from killed import check_ranks_resumed_bit_for_bit, check_resumed_bit_for_bit, differences, example, last_state, life
from lives import run_directory

import everstep
from everstep.errors import BadConfig

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


@pytest.fixture(autouse=True)
def loaded() -> None:
    """Trainer loads DeepSpeed where it is installed: once here, and not in every life."""
    if find_spec("deepspeed") is not None:
        importlib.import_module("deepspeed")


@pytest.fixture
def cases() -> Any:
    """Loaded by those who run one, which takes seconds."""
    return importlib.import_module("transformers_cases")


def test_the_example_is_killed_and_resumed_bit_for_bit() -> None:
    state = check_resumed_bit_for_bit(example("train_hf").main, kills=(19,))
    kept = state["extra"]["transformers"]["state"]["state"]
    assert kept["global_step"] == 36 and kept["epoch"] == 3.0
    assert sum("loss" in entry for entry in kept["log_history"]) == 12


@pytest.mark.soak
def test_two_ranks_of_ddp_are_killed_and_resumed_bit_for_bit() -> None:
    check_ranks_resumed_bit_for_bit(example("train_hf").main, kill=8)


@pytest.mark.soak
@pytest.mark.parametrize("kill", [1, 8, 15])
def test_two_ranks_of_fsdp2_are_killed_and_resumed_bit_for_bit(cases: Any, kill: int) -> None:
    check_ranks_resumed_bit_for_bit(cases.train_sharded, kill=kill, sharded=True)


@pytest.mark.soak
@pytest.mark.parametrize("kills", [(1,), (12,), (13, 14), (3, 6, 24), (35,), (36,)], ids=str)
def test_it_may_be_killed_after_any_step(kills: tuple[int, ...]) -> None:
    check_resumed_bit_for_bit(example("train_hf").main, kills=kills)


BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps"}


@pytest.mark.soak
@pytest.mark.parametrize("kills", [(6,), (21,), (22, 23)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2, "num_train_epochs": 6},
        {"max_steps": 50},
        {"kind": "drawn"},
        {"kind": "stream", "max_steps": 50},
        {"dataloader_num_workers": 1},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
        {**BEST, "save_steps": 5, "save_total_limit": 1},
    ],
    ids=str,
)
def test_whatever_is_trained_goes_on_bit_for_bit(cases: Any, options: dict[str, Any], kills: tuple[int, ...]) -> None:
    check_resumed_bit_for_bit(lambda: cases.train(**options), kills=kills)


@pytest.mark.soak
def test_the_callback_changes_nothing_in_the_training(cases: Any, tmp_path: Path) -> None:
    """The same logs as without it."""
    with run_directory() as directory:
        life(lambda: cases.example_without_callback(tmp_path / "logs.json"), tmp_path / "run")
        life(example("train_hf").main, directory)
        kept = last_state(directory)["extra"]["transformers"]["state"]["state"]["log_history"]
    assert differences(kept, json.loads((tmp_path / "logs.json").read_text())) == []


@pytest.mark.soak
@pytest.mark.parametrize("limit", [1, 3])
def test_as_many_checkpoints_stay_as_save_total_limit_says_and_those_of_trainer_are_its_own(
    cases: Any, limit: int
) -> None:
    options = {"save_strategy": "steps", "save_steps": 9, "save_total_limit": limit}
    with run_directory() as directory:
        life(lambda: cases.train(is_patient=True, **options), directory)
        deadline = time.monotonic() + 60
        while len(everstep.open(directory).steps()) > limit and time.monotonic() < deadline:
            time.sleep(0.05)  # the keeper tidies up behind the trainer
        assert len(everstep.open(directory).steps()) == limit
        theirs = sorted(directory.with_name("trainer").glob("checkpoint-*"))
        assert len(theirs) == limit and all((one / "trainer_state.json").exists() for one in theirs)


def test_what_cannot_be_kept_is_refused(cases: Any) -> None:
    usual = {"is_fsdp_enabled": False, "is_deepspeed_enabled": False, "n_gpu": 1, "auto_find_batch_size": False}
    wrong = {"is_fsdp_enabled": True, "is_deepspeed_enabled": True, "n_gpu": 2, "auto_find_batch_size": True}
    for name, value in wrong.items():
        settings = SimpleNamespace(**{**usual, name: value})
        trainer = SimpleNamespace(args=settings, accelerator=SimpleNamespace(is_fsdp2=False), **vars(settings))
        sentence = "give the batch size" if name == "auto_find_batch_size" else "FSDP, DeepSpeed or DataParallel"
        with pytest.raises(BadConfig, match=sentence):
            cases.EverstepCallback(trainer, "nowhere").on_train_begin(settings, SimpleNamespace(), SimpleNamespace())
