"""Programs for Lightning, apart from the tests that use them: only who runs those has to load it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric

from everstep.integrations.lightning import EverstepCallback


class Stream(IterableDataset[Any]):
    """Has no length: Lightning reads a batch ahead of what it trains on."""

    def __iter__(self) -> Iterator[Any]:
        yield from tensors()


def tensors() -> TensorDataset:
    x = torch.randn(56, 8, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, (x[:, :3]).argmax(dim=1))


class Various(L.LightningModule):
    """Logs, metrics and optimizers of all sorts."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3)), nn.Linear(16, 3)
        self.mean = MeanMetric()

    def training_step(self, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("least", loss, on_step=False, on_epoch=True, reduce_fx="min")
        self.log("sum", loss, on_epoch=True, reduce_fx=sum)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val", nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1]))

    def configure_optimizers(self) -> Any:
        if not self.automatic_optimization:
            return [torch.optim.Adam(self.body.parameters()), torch.optim.SGD(self.head.parameters(), 0.1, 0.9)]
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "least"}}


class Told(L.Callback):
    """All that was to be seen at the end of every epoch."""

    def __init__(self, *, draws: bool) -> None:
        self._draws = draws
        self.seen: list[dict[str, float]] = []

    def on_train_start(self, *_: object) -> None:
        if self._draws:
            torch.rand(3)  # in every life: the random state is to be put back after it

    def on_train_epoch_end(self, trainer: L.Trainer, *_: object) -> None:
        self.seen.append({name: float(value) for name, value in sorted(trainer.callback_metrics.items())})

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def train(loader: str, *, by_hand: bool = False, **options: Any) -> None:
    L.seed_everything(5, verbose=False)
    loaders = {
        "plain": lambda: DataLoader(tensors(), 4, shuffle=True),
        "stream": lambda: DataLoader(Stream(), 4),
        "stateful": lambda: StatefulDataLoader(tensors(), 4, shuffle=True),
        "workers": lambda: DataLoader(tensors(), 4, shuffle=True, num_workers=1, persistent_workers=True),
    }
    callbacks = [
        Told(draws=loader == "plain"),
        EverstepCallback(sys.argv[2]),
        EarlyStopping("val", patience=1, min_delta=0.02),
    ]
    trainer = L.Trainer(
        accelerator="cpu", callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, **{"max_epochs": 3, **options},
    )  # fmt: skip
    trainer.fit(Various(by_hand), loaders[loader](), DataLoader(tensors(), 8))


class Absent(L.Callback):
    """In the place of ours: says which losses there are without it."""

    run = SimpleNamespace(resumed_from=None)

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def on_train_end(self, trainer: L.Trainer, *_: object) -> None:
        (curve,) = [one for one in trainer.callbacks if type(one).__name__ == "Curve"]
        self._path.write_text(json.dumps(curve.losses))


def sharded() -> list[object]:
    return [FSDPStrategy(), DeepSpeedStrategy.__new__(DeepSpeedStrategy)]  # which needs a package to be made


class Saves(L.Callback):
    def on_save_checkpoint(self, *_: object) -> None:
        pass


class TakesAll(Various):
    def training_step(self, dataloader_iter: Any) -> Any:
        return None


def fit(directory: object, module: L.LightningModule, loaders: int = 1, callbacks: tuple[L.Callback, ...] = ()) -> None:
    trainer = L.Trainer(
        accelerator="cpu", callbacks=[*callbacks, EverstepCallback(str(directory), keeper="inline")], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1,
    )  # fmt: skip
    trainer.fit(module, [DataLoader(tensors(), 4) for _ in range(loaders)])
