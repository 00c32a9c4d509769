"""Steps that exist only as a base and records: read, exported and checked without the program that trained them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import digest, live, run_directory, tiny
from torch import nn

import everstep
from everstep import Disk

END = 12


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


class Own(torch.optim.SGD):
    """An optimizer that torch does not have."""


def train(directory: Path, aside: Path, make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    """Every step's state goes aside by torch's own means; then this process is killed, and a reboot takes the rest."""
    model, _, loader = tiny()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    options = {"tiers": [Disk(every=7)], "keep": 50, "strategy": "log", "keeper": "inline", **options}
    run = everstep.guard(model, optimizer, loader, dir=directory, scheduler=scheduler, epochs=None, **options)
    for x, y in run:
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state = {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedulers": [scheduler.state_dict()],
            "random": torch.get_rng_state(),
        }  # fmt: skip
        torch.save(state, aside / f"{run.step + 1}.pt")
        run.wait()  # the ring is small, and these steps are faster than any disk
        if run.step == END:
            os.kill(os.getpid(), signal.SIGKILL)
    return {}
