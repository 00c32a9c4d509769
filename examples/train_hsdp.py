"""Trains replicas of a model that FSDP2 shards, and goes on when a rank is lost:

everstep run --nproc 4 --spares 1 examples/train_hsdp.py --dir runs/hsdp
"""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--width", type=int, default=255)
    parser.add_argument("--shards", type=int, default=2, help="ranks of a replica")
    parser.add_argument("--on-loss", nargs="+", default=["spare", "rollback", "restart"])
    arguments = parser.parse_args()

    torch.manual_seed(1)
    everstep.init_process_group("gloo")
    inputs = torch.randn(6000, 64)
    data = TensorDataset(inputs, inputs[:, :8].argmax(1))
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, seed=1))
    width, shards = arguments.width, arguments.shards
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)]
    model = nn.Sequential(*layers)
    # also in a spare, which takes itself for the first of as many ranks until it is called
    mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))
    for module in (model[0], model[3], model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []

    run = everstep.guard(
        model, optimizer, loader, dir=arguments.dir, extra={"losses": losses}, epochs=None, steps=arguments.steps,
        on_loss=arguments.on_loss,
    )  # fmt: skip
    for step in run.live():
        with step as (x, y):  # entered again if it has to be done again
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    state = everstep.open(arguments.dir).load()  # whole tensors, of all ranks
    weights = [state[name].numpy().tobytes() for name in sorted(state) if name.startswith("model.")]
    place = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} (process {os.getpid()})"
    bits = hashlib.sha256(b"".join(weights)).hexdigest()[:16]
    print(f"{place}: {run.step} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}, weights {bits}")


if __name__ == "__main__":
    main()
