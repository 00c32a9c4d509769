"""Trains a small model on several nodes, each with a directory of its own. `two_nodes.sh` starts it and loses one."""

from __future__ import annotations

import argparse
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, help="of this node, and of no other")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--stand-still-at", type=int, help="once this step is safe, so that a node can be lost there")
    arguments = parser.parse_args()

    torch.manual_seed(1)
    torch.set_num_threads(1)
    everstep.init_process_group("gloo")
    data = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=1))
    width = arguments.width
    layers = nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # No tiers here: `everstep run --tiers ...` names them.
    run = everstep.guard(
        model, optimizer, loader, dir=arguments.dir, epochs=None, steps=arguments.steps, strategy="snapshot"
    )  # fmt: skip
    who = f"rank {dist.get_rank()} on {os.environ.get('EVERSTEP_NODE', 'this node')}"
    print(f"{who}: goes on from step {run.resumed_from}", flush=True)
    for x, y in run:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.step == arguments.stand_still_at:
            run.wait("protected")
            print(f"{who}: step {run.step} is protected", flush=True)
            time.sleep(3600)
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print(f"{who}: step {run.step}, weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
