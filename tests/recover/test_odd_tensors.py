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


def test_state_that_is_there_is_filled_and_not_made_again(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with everstep.guard(model, optimizer, dir=tmp_path, keeper="inline") as run:
        step(model, optimizer)
        run.done()
    saved = {p: {key: value.clone() for key, value in state.items()} for p, state in optimizer.state.items()}
    step(model, optimizer)
    optimizer.state[model.bias]["exp_avg"] = torch.zeros(3)
    optimizer.state[model.bias]["beside"] = torch.zeros(3)
    before = {id(value) for state in optimizer.state.values() for value in state.values()}
    with everstep.guard(model, optimizer, dir=tmp_path, keeper="inline"):
        for parameter, state in saved.items():
            assert state.keys() == optimizer.state[parameter].keys()
            assert all(torch.equal(optimizer.state[parameter][key], value) for key, value in state.items())
        made = [value for state in optimizer.state.values() for value in state.values() if id(value) not in before]
        assert [id(one) for one in made] == [id(optimizer.state[model.bias]["exp_avg"])], "only what had another shape"


class Tables(torch.optim.Optimizer):
    """One table for all parameters, as optimizers of eight bits have it; and one parameter as its own state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        table = torch.linspace(0.1, 0.9, 5)
        self._first = (table, table.flip(0))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(low=self._first[0], high=self._first[1], own=parameter)
                    if parameter.dim() > 1:
                        del state["own"]
                with torch.no_grad():
                    parameter -= state["low"][0] * parameter.grad
                    state["low"] += state["high"].sum() / 100


def test_a_tensor_that_is_the_state_of_several_parameters_is_one_tensor_again(tmp_path: Path) -> None:
    def life(steps: int, dir: Path) -> tuple[nn.Module, Tables]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        optimizer = Tables(model.parameters())
        with everstep.guard(model, optimizer, dir=dir, keeper="inline", strategy="snapshot") as run:
            while run.step < steps:
                step(model, optimizer)
                run.done()
        return model, optimizer

    life(3, tmp_path / "halted")
    model, optimizer = life(5, tmp_path / "halted")
    whole, _ = life(5, tmp_path / "whole")
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), whole.parameters(), strict=True))
    states = list(optimizer.state.values())
    for key in ("low", "high"):
        assert len({id(state[key]) for state in states}) == 1
    assert all(optimizer.state[p].get("own", p) is p for p in model.parameters())


def test_what_had_another_dtype_is_not_loaded_and_neither_is_its_state(tmp_path: Path) -> None:
    def life(dtype: torch.dtype, **how: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        model.weight.data = model.weight.data.to(dtype)
        model.register_buffer("seen", torch.full((2,), 7, dtype=dtype), persistent=False)
        optimizer = torch.optim.AdamW(model.parameters())
        with everstep.guard(model, optimizer, dir=tmp_path, keeper="inline", **how) as run:
            if run.step == 0:
                step(model, optimizer)
                model.seen += 1
                run.done()
        return model, optimizer

    first, _ = life(torch.float32)
    model, optimizer = life(torch.bfloat16, strict=False)
    assert set(optimizer.state) == {model.bias} and torch.equal(model.bias, first.bias)
    assert torch.equal(model.seen, first.seen) and model.seen.dtype == torch.float32
    step(model, optimizer)
