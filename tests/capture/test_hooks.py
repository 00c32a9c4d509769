"""Steps that Everstep would not see are refused, and those that a compiler takes apart are seen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import everstep
from everstep.capture.hooks import Unseen
from everstep.errors import Misuse

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import run_directory

REFUSED = r"parameters change, but no optimizer was seen to step"


def guarded(directory: Path) -> tuple[nn.Module, torch.optim.Optimizer, everstep.Run]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, everstep.guard(model, optimizer, dir=directory, keeper="inline")


@torch.no_grad()
def update_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.sub_(0.01)


def test_parameters_that_nobody_was_seen_to_update_are_refused_at_once() -> None:
    with run_directory() as directory:
        model, _, run = guarded(directory)
        run.done()
        update_by_hand(model)
        with pytest.raises(Misuse, match=REFUSED):
            run.done()
        with pytest.raises(Misuse, match=REFUSED), run:
            update_by_hand(model)  # and a run that ends says it, too
            run.done()
            run.done()


def test_and_after_steps_that_were_seen_before_long() -> None:
    with run_directory() as directory:
        model, optimizer, run = guarded(directory)
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
        run.done()
        with pytest.raises(Misuse, match=REFUSED):
            for _ in range(128):
                update_by_hand(model)
                run.done()
        assert run.step == 1


def test_gradients_may_be_accumulated_for_as_long_as_one_likes() -> None:
    with run_directory() as directory:
        model, optimizer, run = guarded(directory)
        for _ in range(300):
            model(torch.randn(4, 4)).sum().backward()
            run.done()
        optimizer.step()
        run.done()
        assert run.step == 1
        run.close()
        assert everstep.open(directory).steps() == [1]


def test_who_accumulates_little_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(Unseen, "_digest", lambda _: looks.append(1) or 0)
    with run_directory() as directory:
        model, optimizer, run = guarded(directory)
        for accumulated in (0, 60, 60):
            for _ in range(accumulated):
                model(torch.randn(4, 4)).sum().backward()
                run.done()
            model(torch.randn(4, 4)).sum().backward()
            optimizer.step()
            run.done()
        assert run.step == 3
        run.close()
    assert looks == []


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["snapshot", "log"])
def test_a_compiled_step_is_seen_and_kept(strategy: str) -> None:
    def train(directory: Path, steps: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = everstep.guard(model, optimizer, dir=directory, keeper="inline", strategy=strategy)
        step = torch.compile(optimizer.step)
        while run.step < steps:
            torch.manual_seed(run.step)
            model(torch.randn(4, 4)).sum().backward()
            step()
            optimizer.zero_grad()
            run.done()
        run.close()
        loaded = everstep.open(directory).load()
        return {name: value.clone() for name, value in loaded.items() if isinstance(value, torch.Tensor)}

    with run_directory() as one, run_directory() as two:
        whole = train(one, 9)
        train(two, 4)
        resumed = train(two, 9)
    assert len(whole) == 4 * 4  # parameters, and for each two moments and a count
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
