"""What people do with sharded models, for the harness that kills them."""

from __future__ import annotations

import torch
from features import FEATURES, Numbers
from harness import Trial
from laid_out import Net, Pair, laid_out
from parallel import sealed
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

SHARDED: list[str] = []


def train(trial: Trial, kind: str, model: nn.Module, *, evaluates: bool = False) -> None:
    model, optimizer = laid_out(kind, model)
    data = Numbers(48)
    sees_all = kind in ("tp", "fsdp_tp")  # ranks that have parts of one computation
    sampler = DistributedSampler(data, num_replicas=1 if sees_all else None, rank=0 if sees_all else None, seed=3)
    loader = DataLoader(data, batch_size=2, shuffle=False) if sees_all else DataLoader(data, 2, sampler=sampler)
    run = trial.guard(model, optimizer, loader, epochs=None, steps=8)
    for x, _ in trial.batches(run):
        tokens = (x.abs() * 10).long() % 7
        out = model(tokens)
        loss = nn.functional.cross_entropy(out.reshape(-1, 7), (tokens.reshape(-1) + 1) % 7)
        trial.at("forward")
        loss.backward()
        trial.at("backward")
        sealed(trial)
        if run.step in (3, 6):
            run.wait("durable")
        optimizer.step()
        trial.at("step")
        optimizer.zero_grad()
        trial.lost(loss)
        if evaluates and run.step < 7:  # FSDP leaves whole parameters in the modules after that
            with torch.no_grad():
                trial.extra["losses"].append(model(tokens).sum().item())


def feature(kind: str, name: str, make: type[nn.Module], **options: bool) -> None:
    FEATURES[name] = lambda trial: train(trial, kind, make(), **options)
    SHARDED.append(name)


feature("fsdp", "fsdp", Net)
feature("fsdp", "fsdp_that_evaluates", Net, evaluates=True)
feature("hsdp", "hsdp", Net)
feature("tp", "tensor_parallel", Net)
feature("fsdp_tp", "fsdp_over_tensor_parallel", Pair)
feature("zero", "zero", Pair)
