"""The recipe for Horovod, tried with a stand-in: Horovod 0.28.1 cannot be built for the torch of these tests.

The stand-in is made as Horovod makes its own: a class derived from that of the optimizer, over the same groups, which
averages gradients inside step(). Where Horovod has its own collectives, it has those of torch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from killed import check_ranks_resumed_bit_for_bit, job
from lives import run_directory, told

import everstep
from everstep.events import Degraded


class _DistributedOptimizer(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super(self.__class__, self).__init__(params)

    def synchronize(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def skip_synchronize(self) -> None:
        raise NotImplementedError

    def step(self, closure: Any = None) -> Any:
        self.synchronize()
        return super(self.__class__, self).step(closure)


def distributed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    kind = type(optimizer.__class__.__name__, (optimizer.__class__,), dict(_DistributedOptimizer.__dict__))
    return kind(optimizer.param_groups)


def train() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--strategy", default="auto")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    everstep.init_process_group("gloo")
    x = torch.randn(160, 8)
    data = TensorDataset(x, x[:, :3].argmax(dim=1))
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = distributed(torch.optim.Adam(model.parameters(), lr=0.01))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=1))
    run = everstep.guard(
        model, optimizer, loader, dir=arguments.dir, epochs=None, steps=25, strategy=arguments.strategy
    )
    for features, labels in run:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()


def test_an_optimizer_that_averages_within_its_step_is_killed_and_resumed_bit_for_bit() -> None:
    check_ranks_resumed_bit_for_bit(train, kill=9)


def test_it_is_never_repeated_from_a_log() -> None:
    """A step that is tried once more by itself would average with nobody."""
    with run_directory() as directory:
        job(train, directory, "--strategy", "log")
        assert {event.reason for event in told(directory, Degraded)} == {
            "Adam averages gradients of all ranks within step(), as Horovod does: one of them cannot repeat it"
        }
