"""Trains a small network with Accelerate, guarded by one call. Kill it whenever you like; start it again."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from everstep.integrations.accelerate import guard


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()

    set_seed(1)
    x = torch.randn(328, 16)
    data = TensorDataset(x, (x[:, :4] * x[:, 4:8]).argmax(dim=1))
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    loader = DataLoader(data, batch_size=16, shuffle=True)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    losses: list[float] = []
    run = guard(accelerator, loader, dir=arguments.dir, extra={"losses": losses}, epochs=arguments.epochs)
    for features, labels in run:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(features), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        accelerator.print(f"step {run.step + accelerator.sync_gradients}, loss {losses[-1]:.4f}", flush=True)
    accelerator.print(f"resumed from {run.resumed_from}, now at step {run.step}, {len(losses)} losses")
    accelerator.end_training()


if __name__ == "__main__":
    main()
