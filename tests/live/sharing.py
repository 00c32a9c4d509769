"""A program whose model is cut over ranks by FSDP2: replicas of it, or one; for a Team to run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # once, before ranks are forked
from lives import digest
from team import STEPS, Act, Here, nothing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep
from everstep.capture.sharded import local_of


def train_sharded(
    name: int,
    directory: Path,
    act: Act,
    *,
    shards: int | None = 2,
    steps: int = STEPS,
    dropout: float = 0.1,
    aside: Act = nothing,
    **options: Any,
) -> dict[str, Any]:
    """`shards`: the ranks of a replica; None: all of them, on the mesh that FSDP makes by itself."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    # 31 and 3 rows cannot be cut evenly
    model = nn.Sequential(
        nn.Linear(8, 31), nn.Dropout(dropout), nn.Tanh(), nn.Linear(31, 32), nn.Tanh(), nn.Linear(32, 3)
    )
    shape = (world // shards, shards) if shards else ()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if shape else None
    for module in (model[0], model[3], model):
        fully_shard(module, mesh=mesh)
    _make_blank(model)
    torch.manual_seed(rank)  # so that dropout differs from rank to rank, and must be restored
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(480, 8, generator=generator), torch.arange(480))
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    losses: list[float] = []
    seen: list[list[int]] = []
    run = everstep.guard(
        model, optimizer, loader, dir=directory, extra={"losses": losses, "seen": seen}, steps=steps, epochs=None,
        **{"strategy": "snapshot", "linger": "60s", **options},
    )  # fmt: skip
    here = Here(name, run, model, optimizer, 0)
    for step in run.live():
        with step as (x, which):
            here.tries += 1
            loss = nn.functional.cross_entropy(model(x), which % 3)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # which is a collective of DTensors
            _make_blank(model)
            act(here)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seen.append(which.tolist())
        aside(here)
    parts = [local_of(parameter) for parameter in model.parameters()]
    states = [{key: local_of(value) for key, value in optimizer.state[p].items()} for p in model.parameters()]
    return {
        "pid": os.getpid(),
        "step": run.step,
        "rank": int(os.environ["RANK"]),
        "world": int(os.environ["WORLD_SIZE"]),
        "seen": seen,
        "tries": here.tries,
        "weight": sum(float(part.detach().double().abs().sum()) for part in parts),
        "state": digest(parts, states),
        "own": digest(losses, torch.get_rng_state()),
    }


def _make_blank(model: nn.Module) -> None:
    """An operation of which torch remembers how long its result is here."""
    for parameter in model.parameters():
        assert local_of(parameter.new_zeros(parameter.shape)).shape == local_of(parameter).shape
