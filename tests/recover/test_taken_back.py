"""A life that begins in objects which have been trained further than what it begins with."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

import everstep


def test_state_that_an_optimizer_has_made_since_is_taken_back(tmp_path: Path) -> None:
    """As a cell of a notebook finds it that is run again, a rank that goes back, or whoever finds a log wrong."""
    model = nn.ModuleDict({"early": nn.Linear(3, 3), "late": nn.Linear(3, 3)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(name: str) -> None:
        optimizer.zero_grad()
        model[name](torch.ones(3)).sum().backward()
        optimizer.step()

    with everstep.guard(model, optimizer, dir=tmp_path / "run", keeper="inline") as run:
        step("early")
        run.done()
        kept = copy.deepcopy(optimizer.state_dict())
    step("late")
    assert optimizer.state_dict()["state"].keys() > kept["state"].keys()
    with everstep.guard(model, optimizer, dir=tmp_path / "run", keeper="inline") as run:
        assert run.resumed_from == 1
        assert optimizer.state_dict()["state"].keys() == kept["state"].keys()
