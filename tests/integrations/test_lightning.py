"""Lightning's Trainer under Everstep: killed and resumed bit for bit; what cannot be kept is refused."""

from __future__ import annotations

import importlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from killed import check_ranks_resumed_bit_for_bit, check_resumed_bit_for_bit, example, last_state, life
from lives import run_directory

from everstep.errors import BadConfig

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")


@pytest.fixture
def cases() -> Any:
    """Loaded by those who run one, which takes seconds."""
    return importlib.import_module("lightning_cases")


def test_the_example_is_killed_and_resumed_bit_for_bit() -> None:
    state = check_resumed_bit_for_bit(example("train_lightning").main, kills=(13,))
    kept = state["extra"]["lightning"]["state"]
    assert kept["fit"]["epoch_progress"]["current"]["completed"] == 4
    assert len(kept["callbacks"]["Curve"]["losses"]) == 4 * 20 + 4


@pytest.mark.soak
@pytest.mark.parametrize("kills", [(1,), (10,), (20, 21), (5, 6, 7), (39,), (40,)], ids=str)
def test_it_may_be_killed_after_any_step(kills: tuple[int, ...]) -> None:
    check_resumed_bit_for_bit(example("train_lightning").main, kills=kills)


@pytest.mark.soak
@pytest.mark.parametrize("kills", [(6,), (14,), (15, 16)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"loader": "plain"},
        {"loader": "plain", "val_check_interval": 3},
        {"loader": "plain", "max_steps": 33, "max_epochs": -1},
        {"loader": "plain", "limit_train_batches": 9, "reload_dataloaders_every_n_epochs": 2},
        {"loader": "plain", "by_hand": True},
        {"loader": "stream"},
        {"loader": "stateful"},
        {"loader": "workers"},
    ],
    ids=str,
)
def test_whatever_is_trained_goes_on_bit_for_bit(cases: Any, options: dict[str, Any], kills: tuple[int, ...]) -> None:
    state = check_resumed_bit_for_bit(lambda: cases.train(**options), kills=kills)
    seen = state["extra"]["lightning"]["state"]["callbacks"]["Told"]["seen"]
    assert len(seen) >= 2 and "mean" in seen[1]


@pytest.mark.soak
def test_the_callback_changes_nothing_in_the_training(cases: Any, tmp_path: Path) -> None:
    """The same losses as without it."""
    module = example("train_lightning")

    def without() -> None:
        module.EverstepCallback = cases.Absent
        module.main()

    with run_directory() as directory:
        life(without, tmp_path / "losses.json")
        life(module.main, directory)
        kept = last_state(directory)["extra"]["lightning"]["state"]["callbacks"]["Curve"]["losses"]
    assert kept == json.loads((tmp_path / "losses.json").read_text())


@pytest.mark.soak
def test_two_ranks_of_ddp_are_killed_and_resumed_bit_for_bit() -> None:
    check_ranks_resumed_bit_for_bit(example("train_lightning").main, "--devices", 2, kill=7)


@pytest.mark.soak
def test_two_ranks_of_fsdp2_are_killed_and_resumed_bit_for_bit() -> None:
    check_ranks_resumed_bit_for_bit(example("train_lightning").main, "--devices", 2, "--fsdp", kill=7, sharded=True)


# -- what is refused


def test_sharded_strategies_are_refused_in_one_sentence(cases: Any) -> None:
    for strategy in cases.sharded():
        trainer = SimpleNamespace(strategy=strategy, callbacks=[])
        with pytest.raises(
            BadConfig, match=f"^{type(strategy).__name__} divides the state .* use strategy='ddp' or Model"
        ):
            cases.EverstepCallback("nowhere").setup(trainer, cases.Various(), "fit")


def test_what_cannot_be_kept_is_refused_before_the_training(cases: Any) -> None:
    with run_directory() as directory:
        with pytest.raises(BadConfig, match=r"Saves.on_save_checkpoint\(\) writes into a checkpoint file"):
            cases.fit(directory, cases.Various(), callbacks=(cases.Saves(),))
        with pytest.raises(BadConfig, match="hides when a batch is asked for"):
            cases.fit(directory, cases.TakesAll())
        assert not directory.exists()
        with pytest.raises(BadConfig, match="one train dataloader"):
            cases.fit(directory, cases.Various(), loaders=2)
