"""Trains a small network under Ray Train: Ray starts all workers again when one dies, and they go on where they were.

    python examples/train_ray.py --dir runs/ray --kill-at 12

In its first life the last worker kills itself after that step.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep


def train(config: dict[str, Any]) -> dict[str, Any]:
    """What each worker does. Ray has made the process group already."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    x = torch.randn(320, 16)
    data = TensorDataset(x, (x[:, :4] * x[:, 4:8]).argmax(dim=1))
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, seed=1))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[float] = []
    run = everstep.guard(
        model, optimizer, loader, dir=config["dir"], epochs=None, steps=config["steps"], extra={"losses": losses}
    )
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: goes on from step {run.resumed_from}", flush=True)
    for features, labels in run:
        loss = nn.functional.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if run.resumed_from is None and run.step == config["kill_at"] and dist.get_rank() > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if run.should_exit():  # everstep halt: for Ray an end by SystemExit is a failure, and it would start again
            run.close()
            break
    return {"step": run.step, "losses": len(losses), "last": losses[-1]}


def fit(directory: Path, steps: int, kill_at: int | None = None) -> Any:
    return TorchTrainer(
        train,
        train_loop_config={"dir": str(directory), "steps": steps, "kill_at": kill_at},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(directory.with_name("ray")), failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    ).fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kill-at", type=int)
    arguments = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False)
    print(fit(arguments.dir.absolute(), arguments.steps, arguments.kill_at).return_value)
    ray.shutdown()
