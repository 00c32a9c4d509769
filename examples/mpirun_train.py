"""Trains a small model under mpirun; kill it whenever you like, and start it again.

    mpirun -n 2 python examples/mpirun_train.py --dir runs/mpi

Rank, world and meeting point come from mpirun. On several nodes also say where rank 0 is: mpirun -x MASTER_ADDR=node1.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()

    torch.manual_seed(1)
    torch.set_num_threads(1)
    everstep.init_process_group("gloo")
    data = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=1))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    run = everstep.guard(model, optimizer, loader, dir=arguments.dir, epochs=None, steps=arguments.steps)
    for x, y in run:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, resumed from step {run.resumed_from}, now at step {run.step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
