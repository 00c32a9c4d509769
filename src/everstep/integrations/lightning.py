"""Lightning's Trainer: one callback, and `Trainer.fit` goes on where it was killed, bit for bit.

The cut is made where Lightning asks for its next batch: by then the step before it is over, with its validation, its
schedulers and its logs. What the loops, callbacks and metrics know at that moment travels with every checkpoint, and
the train dataloader becomes one that knows where it stands. On one device, with DDP and FSDP2.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everstep import topology
from everstep.capture.position import Feed
from everstep.errors import BadConfig, Mismatch
from everstep.integrations.lightning_loops import Loops
from everstep.integrations.versions import need
from everstep.run import Run, guard

need("lightning", "everstep.integrations.lightning", least="2.6", below="2.7")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import (  # noqa: E402
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.trainer.states import RunningStage  # noqa: E402
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature  # noqa: E402

_KEPT = SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy


class EverstepCallback(Callback):
    """Give it to `Trainer(callbacks=[...])`. `run` is the guarded run from `fit` on."""

    run: Run

    def __init__(self, dir: str | Path, *, extra: dict[str, object] | None = None, **options: Any) -> None:
        """`extra` and `options`: as for everstep.guard()."""
        self._dir, self._options = dir, options
        self._extra: dict[str, object] = extra if extra is not None else {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            _check(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loops = self._extra["lightning"] = Loops(trainer)
        epochs, steps = trainer.fit_loop.max_epochs, trainer.max_steps
        self.run = guard(
            trainer.strategy.model, trainer.optimizers, dir=self._dir,
            scheduler=[one.scheduler for one in trainer.lr_scheduler_configs],
            scaler=getattr(trainer.precision_plugin, "scaler", None), extra=self._extra,
            epochs=epochs if epochs and epochs > 0 else None, steps=steps if steps > 0 else None, **self._options,
        )  # fmt: skip
        if self.run.resumed_from is not None:
            trainer._checkpoint_connector._loaded_checkpoint = {}  # a ckpt_path was where it once began
            loops.go_on()
        self._feed_through(trainer)

    def _feed_through(self, trainer: Trainer) -> None:
        """Put a loader that knows where it stands in the place of the one that Lightning has prepared.

        This is the last word on a loader before Lightning begins to iterate it, which moves the random state.
        """
        prepared, fed = trainer.strategy.process_dataloader, itertools.count()

        def process(loader: object) -> object:
            if trainer.state.stage != RunningStage.TRAINING:
                return prepared(loader)
            if next(fed) and trainer.fit_loop._combined_loader is None:
                raise BadConfig("Everstep resumes one train dataloader, and here are several: make one of their data")
            return FedLoader(prepared(loader), trainer, self.run)

        trainer.strategy.process_dataloader = process

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.run.done()
        self.run.finish()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.run.finish()  # had it been over already, no loop has begun or ended
        self._let_go(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if hasattr(self, "run"):
            self.run.__exit__(type(exception), exception, None)
            self._let_go(trainer)

    def _let_go(self, trainer: Trainer) -> None:
        vars(trainer.strategy).pop("process_dataloader", None)
        vars(trainer.fit_loop.epoch_loop).pop("on_run_start", None)


def _check(trainer: Trainer, module: LightningModule) -> None:
    """Whatever would not come back as it was is refused before anything is trained."""
    kind = type(trainer.strategy)
    if not issubclass(kind, _KEPT) or issubclass(kind, DeepSpeedStrategy):
        raise BadConfig(
            f"{kind.__name__} divides the state among ranks in a way of its own, and Everstep keeps one device, "
            "DDP and FSDP2 with Lightning: use strategy='ddp' or ModelParallelStrategy, or leave the callback out."
        )
    for one, of in ((module, LightningModule), *((callback, Callback) for callback in trainer.callbacks)):
        if type(one).on_save_checkpoint is not of.on_save_checkpoint:
            raise BadConfig(
                f"{type(one).__name__}.on_save_checkpoint() writes into a checkpoint file, which Everstep does not "
                "make: keep that state in buffers, in state_dict(), or in EverstepCallback(extra=...)."
            )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise BadConfig("training_step(dataloader_iter) hides when a batch is asked for: let it take a batch")


class FedLoader:
    """What Lightning iterates: tells the run whenever a batch is asked for, and Lightning where the data stands."""

    def __init__(self, loader: object, trainer: Trainer, run: Run) -> None:
        place = topology.here()
        self._loader, self._run, self._fit = loader, run, trainer.fit_loop
        self._feed = Feed(loader, place.rank, place.world)
        self._before: deque[dict[str, Any]] = deque(maxlen=1)  # where the data stood before the last batch
        self._is_resumed, self._untrained = False, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        epoch = self._fit.epoch_progress.current.processed
        if not self._is_resumed or self._feed.epoch != epoch:
            self._feed.end_pass()
            self._feed.epoch = epoch
        self._is_resumed = False
        return self  # the pass begins with its first batch: its order is drawn then, and must be drawn again from there

    def __next__(self) -> Any:
        self._feed.begin_pass()
        if self._untrained:
            self._untrained -= 1  # Lightning had this one already when the cut was made
        else:
            self._run.set_random()
        self._run.done()
        self._before.append(self._feed.position())
        return self._feed.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """Where training stands: a loader without a length is asked for a batch more than is trained on."""
        position = self._feed.position()
        ahead = position["batches"] - self._fit.epoch_loop.batch_progress.current.ready
        return {"position": self._before[-1] if ahead else position, "untrained": ahead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        position, self._untrained = state["position"], state["untrained"]
        if position["world"] != self._feed.world:
            raise Mismatch(
                f"Lightning's loops were saved by {position['world']} ranks and this job has {self._feed.world}; they "
                "count batches of a rank, so start it with as many"
            )
        self._feed.restore(position)
        self._is_resumed = True
