"""State that classes say themselves that they have, and parameters that several optimizers have: the same bits."""

from __future__ import annotations

import copy
import io
import os
import signal
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lives import digest, live, must_finish, told
from torch import Tensor, nn

import everstep
from everstep.capture import snapshot
from everstep.errors import BadConfig
from everstep.events import Degraded

STEPS = 7


class Slowing(torch.optim.Optimizer):
    """An optimizer that counts beside its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.add_(parameter.grad, alpha=-0.1 / self.count)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict.pop("count")
        super().load_state_dict(state_dict)


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, which keeps slow weights and says all of it in a state_dict() of its own."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.count += 1
        if self.count % 3 == 0:
            for slow, fast in zip(self.slow, (p for g in self.param_groups for p in g["params"]), strict=True):
                fast.copy_(slow.lerp_(fast, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict["base"])
        self.slow, self.count = state_dict["slow"], state_dict["count"]
        self.param_groups = self.base.param_groups


class Counting(nn.Module):
    """A layer whose forward depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, given: Tensor) -> Tensor:
        self.count += 1
        return given * (1 + self.count)

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def _one(kind: Callable[[Any], torch.optim.Optimizer], *, counts: bool = False) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), Counting() if counts else nn.Tanh(), nn.Linear(4, 2))
    return model, [kind(model.parameters())]


def _shared(kinds: tuple[type, type] = (torch.optim.SGD, torch.optim.SGD)) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return model, [kind(model[0].parameters(), lr=0.1) for kind in kinds]


CASES: dict[str, Callable[[], Any]] = {
    "an optimizer that counts": lambda: _one(Slowing),
    "an optimizer around another": lambda: _one(lambda p: Lookahead(torch.optim.Adam(p, lr=0.1))),
    "a module with an extra state": lambda: _one(lambda p: torch.optim.SGD(p, lr=0.1), counts=True),
    "a parameter of two optimizers": _shared,
    "a parameter of two kinds of optimizers": lambda: _shared((torch.optim.Adam, torch.optim.SGD)),
}


def _life(directory: Path, case: str, die_at: int | None, **options: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    model, optimizers = CASES[case]()
    run = everstep.guard(model, optimizers, dir=directory, keeper="inline", **options)
    began = run.resumed_from
    while run.step < STEPS:
        torch.manual_seed(run.step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizers[run.step % 3 % len(optimizers)].step()
        if die_at == run.step + 1:
            run.wait("sealed")
            os.kill(os.getpid(), signal.SIGKILL)
        run.done()
    run.close()
    return {"resumed": began, "digest": digest(model.state_dict(), [one.state_dict() for one in optimizers])}


@pytest.mark.parametrize("strategy", ["snapshot", "log", "auto"])
@pytest.mark.parametrize("case", CASES)
def test_killed_it_ends_with_the_same_bits(tmp_path: Path, case: str, strategy: str) -> None:
    options = {"strategy": strategy, "tiers": [everstep.Disk(every=2)]}
    whole = must_finish(lambda: _life(tmp_path / "whole", case, None, **options))
    assert live(lambda: _life(tmp_path / "run", case, 5, **options)).killed
    again = must_finish(lambda: _life(tmp_path / "run", case, None, **options))
    assert again == {"resumed": 4, "digest": whole["digest"]}
    said = [event.reason for event in told(tmp_path / "run", Degraded) if "every step is a base" in event.what]
    assert bool(said) == (case != "a module with an extra state") or strategy == "snapshot"


def test_no_update_of_a_shared_parameter_passes_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever of its optimizers makes it."""
    model = nn.Linear(4, 2)  # and nothing that no optimizer has, for which all would wait
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with everstep.guard(model, optimizers, dir=tmp_path, keeper="inline", strategy="snapshot") as run:
        for optimizer in optimizers:
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        run.done()
        run.wait("sealed")
        shape = run._capture.shape
        assert isinstance(run._capture, snapshot.Capture) and shape is not None
        assert shape.gates.keys() == {0, 1}


def test_values_come_back_in_the_objects_that_the_program_has(tmp_path: Path) -> None:
    """However deep: others may hold them."""

    def life(fill: bool) -> dict[str, Any]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, seen, recent, array, tensor = [0.0], {0}, deque([0], 3), np.zeros(2), torch.zeros(2)
        counts: defaultdict[str, int] = defaultdict(int)
        wide = torch.zeros(1).expand(4)
        extra: dict[str, Any] = {
            "history": {"losses": losses, "seen": seen}, "deep": {"er": {"recent": recent}}, "array": array,
            "tensor": {"tensor": tensor}, "counts": counts, "wide": wide,
        }  # fmt: skip
        with everstep.guard(model, optimizer, dir=tmp_path, keeper="inline", extra=extra) as run:
            if fill:
                losses.append(1.5)
                seen.add(7)
                recent.extend([1, 2, 3, 4])
                array[:] = 2.5
                tensor.fill_(3.5)
                counts["a"] += 1
                extra["wide"] = torch.ones(1).expand(4)
                model(torch.ones(1)).backward()
                optimizer.step()
                run.done()
            counts["b"] += 1
            return {
                "losses": losses, "seen": seen, "recent": list(recent), "array": array.tolist(),
                "tensor": extra["tensor"]["tensor"].tolist(), "counts": dict(counts), "wide": extra["wide"].tolist(),
            }  # fmt: skip

    assert life(True) | {"counts": {"a": 1, "b": 2}} == life(False)


def test_a_loader_without_a_batch_is_refused_and_not_asked_for_ever(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        everstep.guard(model, optimizer, iter(()), dir=tmp_path, keeper="inline", epochs=None, steps=3) as run,
        pytest.raises(BadConfig, match="no batch in two passes"),
    ):
        list(run)


def test_what_two_places_had_in_common_does_not_take_the_value_of_both(tmp_path: Path) -> None:
    """Nor does what a list began with take the value of what has taken its place there."""

    def life(fill: bool) -> dict[str, Any]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        common, first = [0], torch.zeros(1)
        extra: dict[str, Any] = {"a": {"x": common, "y": common}, "weights": [first]}
        with everstep.guard(model, optimizer, dir=tmp_path, keeper="inline", extra=extra) as run:
            if fill:
                extra["a"]["x"], extra["a"]["y"] = [1], [2]
                extra["weights"][:] = [torch.ones(1)]
                model(torch.ones(1)).backward()
                optimizer.step()
                run.done()
            return {"a": extra["a"], "weights": extra["weights"], "first": first}

    assert life(True) == life(False) == {"a": {"x": [1], "y": [2]}, "weights": [torch.ones(1)], "first": torch.zeros(1)}


def test_tensors_in_extra_that_are_the_models_are_not_written_over(tmp_path: Path) -> None:
    """As the first value of what is best so far often is."""

    def life(die_at: int | None) -> dict[str, Any]:
        torch.manual_seed(1)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        extra: dict[str, Any] = {"best": {"weights": model.state_dict()}, "sums": {"loss": torch.tensor(0)}}
        run = everstep.guard(
            model, optimizer, dir=tmp_path / str(whole), keeper="inline", extra=extra, tiers=[everstep.Disk(every=2)]
        )
        while run.step < STEPS:
            torch.manual_seed(run.step)
            optimizer.zero_grad()
            loss = model(torch.randn(4, 3)).square().mean()
            loss.backward()
            optimizer.step()
            extra["sums"]["loss"] = extra["sums"]["loss"] + loss.detach()
            if run.step in (0, 2):
                extra["best"]["weights"] = copy.deepcopy(model.state_dict())
            if die_at == run.step:
                run.wait("sealed")
                os.kill(os.getpid(), signal.SIGKILL)
            run.done()
        run.close()
        return {"digest": digest(model.state_dict(), extra)}

    whole = True
    expected = must_finish(lambda: life(None))
    whole = False
    assert live(lambda: life(4)).killed
    assert must_finish(lambda: life(None)) == expected


def test_an_extra_state_has_the_same_name_under_a_wrapper_and_what_cannot_be_stored_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Odd(Counting):
        def get_extra_state(self) -> Any:
            return io.BytesIO()

    class Root(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), Odd())

        def forward(self, given: Tensor) -> Tensor:
            return super().forward(self.inner(given))

    def life(*, compiled: bool) -> int:
        model = Root()
        given = torch.compile(model, backend="eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with everstep.guard(given, optimizer, dir=tmp_path, keeper="inline") as run:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            run.done()
        return model.count

    assert life(compiled=False) == 1
    assert "get_extra_state() of model.inner.1" in capfd.readouterr().err
    assert life(compiled=True) == 2


def test_a_loop_that_finishes_or_closes_its_run_ends(tmp_path: Path) -> None:
    for number, end in enumerate((everstep.Run.finish, everstep.Run.close)):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = everstep.guard(model, optimizer, [torch.ones(1)] * 9, dir=tmp_path / str(number), keeper="inline")
        steps = 0
        for batch in run:
            model(batch).backward()
            optimizer.step()
            steps += 1
            if steps == 3:
                end(run)
        assert steps == run.step == 3
