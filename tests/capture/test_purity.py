"""The self-test at the start finds optimizers and loops whose steps cannot be repeated, and names them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

from everstep.capture.layout import Subjects
from everstep.capture.purity import Purity
from everstep.capture.update import Call


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1))


def nothing() -> None:
    pass


def verdicts(
    network: nn.Module,
    optimizers: list[optim.Optimizer],
    afterwards: Callable[[], None] = nothing,
    steps: int = 3,
    every: int = 1,
) -> list[str | None]:
    """Train with the self-test beside; what it says at each cut."""
    subjects = Subjects(models=[network], optimizers=optimizers)
    purity, names = Purity(subjects), subjects.names()
    for i, optimizer in enumerate(optimizers):

        def before(o: optim.Optimizer, *_: Any, i: int = i) -> None:
            groups = [{k: v for k, v in group.items() if k != "params"} for group in o.param_groups]
            absent = {names[id(p)] for group in o.param_groups for p in group["params"] if p.grad is None}
            purity.before(i, Call(optimizer=i, groups=groups, absent=frozenset(absent)))

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(lambda *_, i=i: purity.after(i))
    found: list[str | None] = []
    for step in range(1, steps + 1):
        x = torch.linspace(-step, step, 40).view(8, 5)
        for optimizer in optimizers:
            optimizer.zero_grad()
        network(x).square().mean().backward()
        for i, optimizer in enumerate(optimizers):
            if step % (every if i else 1) == 0:
                optimizer.step()
        afterwards()
        found.append(purity.at_cut())
    return found


ORDINARY = [
    (optim.SGD, {}), (optim.SGD, {"momentum": 0.9, "nesterov": True}), (optim.SGD, {"momentum": 0.9, "fused": True}),
    (optim.Adam, {"amsgrad": True}), (optim.AdamW, {"fused": True}), (optim.AdamW, {"foreach": True}),
    (optim.Adagrad, {}), (optim.Adafactor, {}), (optim.RAdam, {}), (optim.ASGD, {}), (optim.Rprop, {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), ORDINARY)
def test_ordinary_optimizers_are_pure_and_the_run_is_as_without_the_test(kind: Any, options: dict[str, Any]) -> None:
    network, plain = model(), model()
    assert verdicts(network, [kind(network.parameters(), lr=0.01, **options)]) == [None, "", ""]
    optimizer = kind(plain.parameters(), lr=0.01, **options)
    for step in range(1, 4):
        optimizer.zero_grad()
        plain(torch.linspace(-step, step, 40).view(8, 5)).square().mean().backward()
        optimizer.step()
    assert all(map(torch.equal, network.parameters(), plain.parameters()))


class Descent(optim.Optimizer):
    """A user's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * self.factor())
                p.add_(self.noise(p))

    def factor(self) -> float:
        return 1.0

    def noise(self, p: Tensor) -> Tensor:
        return torch.zeros_like(p)


class Langevin(Descent):
    def noise(self, p: Tensor) -> Tensor:
        return torch.randn_like(p) * 0.01


class PythonNoise(Descent):
    def factor(self) -> float:
        return random.random()


class NumpyNoise(Descent):
    def factor(self) -> float:
        return float(np.random.rand())


class OwnGenerator(Descent):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.source = torch.Generator().manual_seed(1)

    def noise(self, p: Tensor) -> Tensor:
        return torch.randn(p.shape, generator=self.source)


class Counter(Descent):
    count = 0

    def factor(self) -> float:
        self.count += 1
        return 1 / self.count


class NestedCounter(Descent):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.books = {"calls": [0]}

    def factor(self) -> float:
        self.books["calls"][0] += 1
        return 1 / self.books["calls"][0]


class HiddenTensor(Descent):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.scale = torch.ones(())

    def factor(self) -> float:
        return float(self.scale.mul_(0.9))


class FromOutside(Descent):
    clock = itertools.count()

    def factor(self) -> float:
        return 1 / (2 + next(FromOutside.clock))


class FalseClaim(Descent):
    """Says that rows are independent, and normalizes by the whole."""

    everstep_elementwise = True

    def noise(self, p: Tensor) -> Tensor:
        return p * p.norm() * 0.01


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Langevin, "gives another model.0.weight"), (PythonNoise, "gives another"), (NumpyNoise, "gives another"),
     (OwnGenerator, "attribute source"), (Counter, "attribute count"), (NestedCounter, "attribute books"),
     (HiddenTensor, "attribute scale"), (FromOutside, "gives another"), (FalseClaim, "gives another")],
)  # fmt: skip
def test_an_optimizer_that_is_not_a_function_of_its_inputs_is_named(kind: type[Descent], words: str) -> None:
    network = model()
    first, second, third = verdicts(network, [kind(network.parameters())])
    assert first is None
    assert second == third
    assert second is not None and kind.__name__ in second and words in second


def test_a_function_of_its_inputs_is_pure_whoever_wrote_it() -> None:
    network = model()
    assert verdicts(network, [Descent(network.parameters())]) == [None, "", ""]


def test_a_loop_that_clamps_weights_after_the_step_is_found() -> None:
    network = model()

    def clamp() -> None:
        for parameter in network.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    _, second, _ = verdicts(network, [optim.AdamW(network.parameters())], clamp)
    assert second is not None and "something changes model.0.weight after AdamW.step()" in second


def test_a_post_hook_that_writes_parameters_is_found() -> None:
    network = model()
    optimizer = optim.SGD(network.parameters(), lr=0.1)
    found = verdicts(network, [optimizer], lambda: network[0].bias.data.mul_(0.9))
    assert "after SGD.step()" in str(found[1])


def test_every_optimizer_is_tried_and_one_that_rests_is_waited_for() -> None:
    network = model()
    both = [optim.AdamW(network[0].parameters()), optim.SGD(network[2].parameters(), lr=0.1)]
    assert verdicts(network, both, steps=5, every=2) == [None, None, None, "", ""]
    both = [optim.AdamW(network[0].parameters()), Langevin(network[2].parameters())]
    assert "Langevin" in str(verdicts(network, both)[1])


def test_refused_optimizers_are_refused_at_once() -> None:
    network = model()
    purity = Purity(Subjects(models=[network], optimizers=[optim.LBFGS(network.parameters())]))
    assert "LBFGS" in str(purity.at_cut())


def test_random_state_is_not_moved() -> None:
    network = model()

    def state() -> tuple[bytes, object, bytes]:
        return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes()

    before = state()
    verdicts(network, [Descent(network.parameters())])
    assert state() == before
