"""Trains under DDP, and goes on when a rank is lost: `everstep run --nproc 3 --spares 1 train_live.py --dir DIR`."""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--on-loss", nargs="+", default=["spare", "rollback", "restart"])
    parser.add_argument("--detect", default="10s")
    arguments = parser.parse_args()

    torch.manual_seed(1)
    everstep.init_process_group("gloo")
    inputs = torch.randn(6000, 64)
    data = TensorDataset(inputs, inputs[:, :8].argmax(1))
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, seed=1))
    width = arguments.width
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []

    run = everstep.guard(
        model, optimizer, loader, dir=arguments.dir, extra={"losses": losses}, epochs=None, steps=arguments.steps,
        on_loss=arguments.on_loss, detect_timeout=arguments.detect,
    )  # fmt: skip
    for step in run.live():
        with step as (x, y):  # entered again if it has to be done again
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
    place = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} (process {os.getpid()})"
    print(f"{place}: {run.step} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}, weights {weights}")


if __name__ == "__main__":
    main()
