"""Tensors that cannot simply be written into, and state that could not be found again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everstep
from everstep.errors import Unstorable


class Expanded(nn.Module):
    """Many elements at one place: frozen, kept and volatile."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.full((1, 4), value).expand(3, 4), requires_grad=False)
        self.register_buffer("kept", torch.full((4, 1), value).expand(4, 5))
        self.register_buffer("volatile", torch.full((), value).expand(2, 2), persistent=False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    sum(p.square().sum() for p in model.parameters() if p.requires_grad).backward()  # type: ignore[union-attr]
    optimizer.step()


def test_expanded_tensors_come_back_as_expanded_as_they_were(tmp_path: Path) -> None:
    def life(value: float) -> tuple[nn.Module, everstep.Run]:
        model = Expanded(value)
        return model, everstep.guard(model, torch.optim.SGD(model.parameters(), lr=0.1), dir=tmp_path, keeper="inline")

    model, run = life(3.0)
    step(model, run._state.subjects.optimizers[0])
    run.done()
    run.close()
    again, run = life(5.0)
    run.close()
    assert run.resumed_from == 1
    for name in ("frozen", "kept", "volatile"):
        ours, theirs = getattr(model, name), getattr(again, name)
        assert torch.equal(theirs, ours) and theirs.stride() == ours.stride() and 0 in ours.stride()
    assert torch.equal(again.linear.weight, model.linear.weight)


class Odd(torch.optim.Optimizer):
    """Keeps a tensor of every parameter wherever it is told to."""

    def __init__(self, parameters: Any, put: Callable[[dict[Any, Any], Tensor], None]) -> None:
        super().__init__(parameters, {})
        self._put = put

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self._put(self.state[parameter], parameter)


@pytest.mark.parametrize(
    ("put", "why"),
    [
        (lambda state, p: state.update({"exp.avg": torch.zeros_like(p)}), "under 'exp.avg', and only names without"),
        (lambda state, p: state.update({0: torch.zeros_like(p)}), "under 0, and only names without"),
        (lambda state, p: state.update({"n": torch.zeros(2)._neg_view()}), "its memory holds other values"),
    ],
    ids=["a name with a dot", "a number", "negated"],
)
def test_state_that_could_not_be_found_again_is_refused_before_it_is_lost(
    put: Callable[[dict[Any, Any], Tensor], None], why: str, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    optimizer = Odd(model.parameters(), put)
    run = everstep.guard(model, optimizer, dir=tmp_path, keeper="inline", strategy="snapshot")
    try:
        step(model, optimizer)
        with pytest.raises(Unstorable, match=why):
            run.done()
    finally:
        run.give_up()


def test_a_restore_that_fails_gives_optimizers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with everstep.guard(model, optimizer, dir=tmp_path, keeper="inline") as run:
        step(model, optimizer)
        run.done()
    fresh = torch.optim.AdamW(model.parameters())

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the device is gone"):
        patch.setattr(torch, "_foreach_copy_", fail)
        everstep.guard(model, fresh, dir=tmp_path, keeper="inline")
    assert not fresh.state, "tensors that nobody has filled"
    with everstep.guard(model, fresh, dir=tmp_path, keeper="inline"):
        assert all(torch.equal(fresh.state[p]["exp_avg"], optimizer.state[p]["exp_avg"]) for p in model.parameters())
