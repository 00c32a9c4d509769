"""Trains a small network with Lightning, guarded by one callback. Kill it whenever you like; start it again."""

from __future__ import annotations

import argparse

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from everstep.integrations.lightning import EverstepCallback


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))

    def configure_model(self) -> None:
        if self.device_mesh is not None:  # --fsdp
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Curve(L.Callback):  # what was logged, step by step: kept by Everstep because it has a state_dict
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        self.losses.append(float(trainer.callback_metrics["loss_step"]))
        print(f"step {trainer.global_step}, loss {self.losses[-1]:.4f}", flush=True)

    def on_train_epoch_end(self, trainer: L.Trainer, *_: object) -> None:
        self.losses.append(float(trainer.callback_metrics["loss_epoch"]))

    def state_dict(self) -> dict[str, object]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.losses = state["losses"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--fsdp", action="store_true")
    arguments = parser.parse_args()
    L.seed_everything(1, verbose=False)
    data = TensorDataset(x := torch.randn(320, 16), (x[:, :4] * x[:, 4:8]).argmax(dim=1))
    curve, guarded = Curve(), EverstepCallback(arguments.dir)
    strategy = L.strategies.ModelParallelStrategy(arguments.devices, 1) if arguments.fsdp else "auto"
    trainer = L.Trainer(
        max_epochs=arguments.epochs, accelerator="cpu", devices=arguments.devices, accumulate_grad_batches=2,
        strategy=strategy, callbacks=[curve, guarded], val_check_interval=5, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=64))
    print(f"resumed from {guarded.run.resumed_from}, now at step {trainer.global_step}, {len(curve.losses)} losses")


if __name__ == "__main__":
    main()
