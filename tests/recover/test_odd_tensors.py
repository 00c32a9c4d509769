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


class Elementwise(torch.optim.Optimizer):
    """Steps every element by itself, by a table that all parameters have."""

    everstep_elementwise = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self._table = torch.tensor([0.1, 0.01])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(table=self._table, m=torch.zeros_like(parameter))
                state["m"].mul_(0.9).add_(parameter.grad)
                parameter -= state["table"][0] * state["m"]


def test_steps_by_a_table_that_all_have_are_repeated_and_proven(tmp_path: Path) -> None:
    def life() -> tuple[everstep.Run, torch.optim.Optimizer, nn.Module]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        optimizer = Elementwise(model.parameters())
        tiers = [everstep.Memory(), everstep.Disk(every=1000)]
        return (
            everstep.guard(model, optimizer, dir=tmp_path, keeper="inline", strategy="log", tiers=tiers),
            optimizer, model,
        )  # fmt: skip

    run, optimizer, model = life()
    while run.step < 140:
        step(model, optimizer)
        run.done()
    run.wait("durable")
    run.give_up()
    run, again, other = life()
    try:
        assert run.resumed_from == 140 and run.status()["strategy"] == "log"
        assert len({id(state["table"]) for state in again.state.values()}) == 1
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
    finally:
        run.give_up()


class Eager(torch.optim.Optimizer):
    """Has its state from the beginning, and other tensors in its place after every step."""

    def __init__(self, parameters: Any, begin: Callable[[Tensor], dict[str, Tensor]]) -> None:
        super().__init__(parameters, {})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = begin(parameter)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                for power, key in enumerate(state, 1):
                    state[key] = state[key] * 0.9 + parameter.grad**power
                parameter -= 0.1 * state["m"]


def two_views(parameter: Tensor) -> dict[str, Tensor]:
    memory = torch.zeros_like(parameter)
    return {"m": memory, "v": memory.view_as(memory)}


def neighbours(parameter: Tensor) -> dict[str, Tensor]:
    memory = torch.zeros(2, *parameter.shape)
    return {"m": memory[0], "v": memory[1]}


BEGIN: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "expanded": lambda p: {"m": torch.zeros(()).expand_as(p)},
    "two views of one memory": two_views,
    "neighbours in one memory": neighbours,
    "the parameter's own memory": lambda p: {"m": p.data},
    "with holes": lambda p: {"m": torch.zeros(*p.shape, 2)[..., 0]},
}


@pytest.mark.parametrize("begin", BEGIN)
def test_state_that_others_have_a_part_in_is_not_filled_where_it_lies(begin: str, tmp_path: Path) -> None:
    def life(steps: int, dir: Path) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        optimizer = Eager(model.parameters(), BEGIN[begin])
        with everstep.guard(model, optimizer, dir=dir, keeper="inline", strategy="snapshot") as run:
            while run.step < steps:
                step(model, optimizer)
                run.done()
        return [*model.parameters(), *(v for p in model.parameters() for v in optimizer.state[p].values())]

    life(3, tmp_path / "halted")
    halted, whole = life(5, tmp_path / "halted"), life(5, tmp_path / "whole")
    assert all(torch.equal(*pair) for pair in zip(halted, whole, strict=True))


def test_state_that_is_of_no_parameter_comes_back_though_no_parameter_has_any(tmp_path: Path) -> None:
    def life() -> torch.optim.Optimizer:
        model = nn.Linear(2, 2)
        optimizer = Odd(model.parameters(), lambda state, parameter: None)
        optimizer.state["seen"] = torch.zeros(4)
        with everstep.guard(model, optimizer, dir=tmp_path, keeper="inline", strategy="snapshot") as run:
            if run.step == 0:
                step(model, optimizer)
                optimizer.state["seen"] = torch.ones(4)
                run.done()
        return optimizer

    life()
    assert torch.equal(life().state["seen"], torch.ones(4))


class Rotated(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("rotation", torch.eye(2), persistent=False)
        self.to(dtype)


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda ps: Eager(ps, lambda p: {"m": torch.zeros_like(p)})])
def test_what_has_another_dtype_now_is_left_as_it_is_with_its_state(make: Any, tmp_path: Path) -> None:
    def life(dtype: torch.dtype, **how: Any) -> tuple[Rotated, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Rotated(dtype)
        optimizer = make(model.parameters())
        with everstep.guard(model, optimizer, dir=tmp_path, keeper="inline", strategy="snapshot", **how) as run:
            step(model, optimizer)
            run.done()
        return model, optimizer

    life(torch.float32)
    model, optimizer = life(torch.bfloat16, strict=False)
    assert {one.dtype for one in (*model.parameters(), *model.buffers())} == {torch.bfloat16}
    floats = [value for p in model.parameters() for value in optimizer.state[p].values() if value.dim()]
    assert floats and {value.dtype for value in floats} == {torch.bfloat16}
