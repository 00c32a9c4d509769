"""Programs for transformers' Trainer, apart from the tests that use them: only who runs those has to load it."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fsdp_on_cpus import shard_on_cpus
from killed import example
from torch import nn
from torch.utils.data import IterableDataset, RandomSampler
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from everstep.integrations.transformers import EverstepCallback


class Net(nn.Module):
    """Any module with a loss is a model for Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows() -> list[dict[str, torch.Tensor]]:
    x = torch.randn(84, 8, generator=torch.Generator().manual_seed(3))
    return [{"x": row, "labels": row[:3].argmax()} for row in x]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from rows()


class Drawn(Trainer):
    """Its order is drawn from a generator that goes on from epoch to epoch."""

    def _get_train_sampler(self, *_: object) -> RandomSampler:
        return RandomSampler(self.train_dataset, generator=torch.Generator().manual_seed(11))


class Patient(TrainerCallback):
    """Waits now and then until a step is on the disk, so that there are some to choose from."""

    def __init__(self, guarded: EverstepCallback) -> None:
        self._guarded = guarded

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step and state.global_step % 9 == 0:
            assert self._guarded.run.wait("durable", 60)


def train(kind: str = "plain", *, is_patient: bool = False, **options: Any) -> None:
    usual = {"num_train_epochs": 3, "per_device_train_batch_size": 4, "logging_steps": 4, "save_strategy": "no"}
    directory = Path(sys.argv[2])
    settings = TrainingArguments(
        output_dir=str(directory.with_name("trainer")), use_cpu=True, report_to="none", disable_tqdm=True, seed=2,
        **{**usual, **options},
    )  # fmt: skip
    torch.manual_seed(2)
    make = Drawn if kind == "drawn" else Trainer
    data = Stream() if kind == "stream" else rows()
    trainer = make(Net(), settings, train_dataset=data, eval_dataset=rows()[:8])
    if options.get("load_best_model_at_end"):
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=6, early_stopping_threshold=0.05))
    guarded = EverstepCallback(trainer, dir=directory)
    trainer.add_callback(guarded)
    if is_patient:
        trainer.add_callback(Patient(guarded))
    trainer.train()


def train_sharded() -> None:
    """The example, whose blocks and tied weights are sharded."""
    shard_on_cpus()
    module = example("train_hf")
    module.TrainingArguments = partial(
        TrainingArguments, fsdp=True, fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": "GPT2Block"}
    )
    module.main()


def example_without_callback(path: Path) -> None:
    """The example, but nobody guards it; what it has logged is written down."""
    module = example("train_hf")
    module.EverstepCallback = lambda trainer, dir: module.Tell()
    logged: list[Any] = []

    class Seen(module.Trainer):
        def log(self, logs: dict[str, float], *rest: Any) -> None:
            super().log(logs, *rest)
            logged[:] = self.state.log_history

    module.Trainer = Seen
    try:
        module.main()
    except AttributeError:  # it asks the callback for its run, when all is over
        path.write_text(json.dumps(logged))
