"""The Trainer of transformers: one callback, and `trainer.train()` goes on where it was killed, bit for bit.

The cut is made when a step begins: by then the step before it is over, with its logs, its evaluation and its own
checkpoint. What Trainer knows at that moment travels with every checkpoint of ours: its state, the losses that it has
not logged yet, its callbacks, and how the epoch's order was drawn. Trainer skips the batches that are over by itself,
as it does after resume_from_checkpoint. On one device, with DDP and FSDP2.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from everstep.capture.extras import random_state, set_random_state
from everstep.capture.position import generators_of
from everstep.errors import BadConfig, Mismatch
from everstep.integrations.versions import need
from everstep.run import Run, guard

need("transformers", "everstep.integrations.transformers", least="5.3", below="6")

from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

_OF_STATE = ("epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history", "best_metric",
             "best_global_step", "best_model_checkpoint")  # fmt: skip
_OF_TRAINER = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")


class EverstepCallback(TrainerCallback):
    """`trainer.add_callback(EverstepCallback(trainer, dir=...))`. `run` is the guarded run from `train` on."""

    run: Run

    def __init__(
        self, trainer: Trainer, dir: str | Path, *, extra: dict[str, object] | None = None, **options: Any
    ) -> None:
        """`extra` and `options`: as for everstep.guard(); keep= is save_total_limit unless it is given."""
        self._trainer, self._dir, self._options = trainer, dir, options
        self._extra: dict[str, object] = extra if extra is not None else {}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self._trainer
        _check(trainer)
        self._progress = self._extra["transformers"] = _Progress(trainer)
        optimizer = trainer.optimizer
        options = {"keep": args.save_total_limit, **self._options} if args.save_total_limit else self._options
        self.run = guard(
            trainer.model_wrapped, optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer,
            dir=self._dir, scheduler=trainer.lr_scheduler, scaler=trainer.accelerator.scaler, extra=self._extra,
            epochs=None, steps=state.max_steps, **options,
        )  # fmt: skip
        if self.run.resumed_from is not None:
            self._progress.go_on()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._progress.begin_epoch()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.run.set_random()
        self.run.done()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._progress.steps += 1

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if "train_runtime" in logs:  # all is over; the best model may be loaded next, which is none of our state
            self.run.done()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.run.finish()
        self._progress.let_go()


def _check(trainer: Trainer) -> None:
    is_fsdp1 = trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
    if is_fsdp1 or trainer.is_deepspeed_enabled or trainer.args.n_gpu > 1:
        raise BadConfig(
            "Everstep keeps the state of one device, of DDP and of FSDP2 (fsdp_version 2) with transformers, and this "
            "Trainer uses the first FSDP, DeepSpeed or DataParallel: start it with torchrun and without them, or leave "
            "EverstepCallback out."
        )
    if trainer.args.auto_find_batch_size:
        raise BadConfig("auto_find_batch_size starts the training anew within itself: give the batch size")


class _Progress:
    """Where Trainer stands, with state_dict and load_state_dict for guard(extra=...)."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._generators = generators_of(trainer.callback_handler.train_dataloader)
        self._began: dict[str, Any] | None = None
        self._goes_on = self._is_over = False
        self.epoch, self.steps = -1, 0  # this epoch, and the steps that were done in it

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "world": trainer.args.world_size,
            "epoch": self.epoch,
            "steps": self.steps,
            "began": self._began,
            "is_over": trainer.control.should_training_stop,
            "state": {name: getattr(trainer.state, name) for name in _OF_STATE},
            "trainer": {name: getattr(trainer, name) for name in _OF_TRAINER},
            "callbacks": [[type(one).__name__, one.state()["attributes"]] for one in self._stateful()],
        }

    def _stateful(self) -> list[Any]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        if saved["world"] != trainer.args.world_size:
            raise Mismatch(
                f"Trainer's epochs were counted by {saved['world']} ranks and this job has {trainer.args.world_size}; "
                "start it with as many"
            )
        self.epoch, self.steps, self._began = saved["epoch"], saved["steps"], saved["began"]
        self._goes_on = True
        for name, value in saved["state"].items():
            setattr(trainer.state, name, value)
        for name, value in saved["trainer"].items():
            setattr(trainer, name, value)
        trainer._tr_loss = trainer._tr_loss.to(trainer.args.device)
        self._is_over = saved["is_over"] or trainer.state.global_step >= trainer.state.max_steps
        mine = self._stateful()
        if [type(one).__name__ for one in mine] != [name for name, _ in saved["callbacks"]]:
            raise Mismatch(f"the Trainer had other callbacks with a state: {[name for name, _ in saved['callbacks']]}")
        for one, (_, attributes) in zip(mine, saved["callbacks"], strict=True):
            vars(one).update(attributes)

    def begin_epoch(self) -> None:
        if self._goes_on and self._began is not None:
            set_random_state(self._began["random"])
            for generator, state in zip(self._generators, self._began["generators"], strict=True):
                generator.set_state(state)
        else:
            self.epoch, self.steps = self.epoch + 1, 0
            states = [generator.get_state() for generator in self._generators]
            self._began = {"random": random_state(), "generators": states}
        self._goes_on = False

    def go_on(self) -> None:
        """Pass over the epochs that are over, unheard by all callbacks, and over the same batches of the next."""
        trainer, handler, resumed, steps = self._trainer, self._trainer.callback_handler, self.epoch, self.steps
        run_epoch, tell_epoch, heard = trainer._run_epoch, handler.on_epoch_begin, itertools.count()

        def on_epoch_begin(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> TrainerControl:
            is_past = next(heard) < resumed or self._is_over
            return control if is_past else tell_epoch(args, state, control)

        def _run_epoch(*, epoch: int, **rest: Any) -> None:
            if self._is_over or epoch < resumed:
                return
            if epoch == resumed and steps:
                done = steps * trainer.args.gradient_accumulation_steps
                rest |= {"epochs_trained": epoch, "steps_trained_in_current_epoch": done}
                rest["resume_from_checkpoint"] = "everstep"  # where nothing is: the random state is ours to set
            run_epoch(epoch=epoch, **rest)

        trainer._run_epoch, handler.on_epoch_begin = _run_epoch, on_epoch_begin

    def let_go(self) -> None:
        vars(self._trainer).pop("_run_epoch", None)
        vars(self._trainer.callback_handler).pop("on_epoch_begin", None)
