"""Many small tensors of a device are gathered by a CUDA graph: their bits, of the tensors that are there now."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.capture import gathering
from everstep.capture.gathering import Gathering
from everstep.events import Degraded, read_events
from everstep.image import parse
from everstep.recover.assemble import view
from everstep.recover.needs import Needs

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import run_directory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(200),
]


@pytest.fixture
def directory() -> Iterator[Path]:
    with run_directory() as folder:
        yield folder


def network(layers: int = 200) -> nn.Module:
    """Small tensors of two dtypes, some of them strided, and dropout, which draws from the device's generator."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(40, 40), nn.Dropout(0.1)) for _ in range(layers))).cuda()
    for layer in list(model)[::3]:
        layer[0].weight.data = layer[0].weight.data.t()  # type: ignore[index,union-attr]
    model.half_ones = nn.Parameter(torch.ones(33, device="cuda", dtype=torch.bfloat16))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step)).cuda()
    (model(x).square().sum() + model.half_ones.float().sum()).backward()  # type: ignore[union-attr,operator]
    optimizer.step()
    optimizer.zero_grad()


def newest(run: everstep.Run) -> dict[str, torch.Tensor]:
    """What the newest base has of the model."""
    run.wait("sealed")
    arena = run._capture.arena()
    assert arena is not None
    slot = arena.slot_of(run.step)
    assert slot is not None
    layout, info = parse(arena.image(slot), arena.slot_bytes)
    found = view({0: (layout, info, memoryview(arena.image(slot)))}, run.step, Needs(None, 0, 1))
    return {name.removeprefix("model."): found.tensor(name) for name in found.names() if name.startswith("model.")}


def graphs(run: everstep.Run) -> list[Gathering]:
    assert run._capture.shape is not None
    return [one for one in run._capture.shape.gathered.values() if one._graph is not None]


def same(run: everstep.Run, model: nn.Module) -> bool:
    found, wanted = newest(run), dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    return all(torch.equal(found[name], wanted[name].detach().cpu()) for name in wanted)


@pytest.mark.parametrize("mode", ["host", "device"])
def test_a_base_has_the_values_of_its_step(directory: Path, mode: Any) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with everstep.guard(model, optimizer, dir=directory, keeper="inline", mode=mode) as run:
        for step in range(6):
            train(model, optimizer, step)
            run.done()
            assert same(run, model)
        assert graphs(run)


def test_tensors_that_were_replaced_are_gathered_anew(directory: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with everstep.guard(model, optimizer, dir=directory, keeper="inline") as run:
        for step in range(9):
            train(model, optimizer, step)
            if step in (4, 6):
                old = model[1][0].weight  # type: ignore[index,union-attr]
                old.data = old.data * 2  # type: ignore[union-attr,operator]
                assert graphs(run)
            run.done()
            assert same(run, model)
        assert graphs(run)


def test_random_numbers_are_those_of_a_run_without_captures(directory: Path) -> None:
    states = []
    for guarded in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = everstep.guard(model, optimizer, dir=directory, keeper="inline") if guarded else None
        torch.cuda.manual_seed(3)
        for step in range(8):
            train(model, optimizer, step)
            if run is not None:
                run.done()
        if run is not None:
            assert graphs(run)
            run.close()
        values = [p.detach().clone() for p in model.parameters()]
        states.append((values, torch.cuda.get_rng_state()))
    assert all(map(torch.equal, states[0][0], states[1][0]))
    assert torch.equal(states[0][1], states[1][1])


def test_a_refusal_is_told_once_and_copies_go_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses(torch.cuda.CUDAGraph):
        def capture_begin(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("not here")

    monkeypatch.setattr(gathering.torch.cuda, "CUDAGraph", Refuses)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with everstep.guard(model, optimizer, dir=directory, keeper="inline") as run:
        for step in range(5):
            train(model, optimizer, step)
            run.done()
            assert same(run, model)
        assert not graphs(run)
    told = [event for event in read_events(directory) if isinstance(event, Degraded)]
    assert [event.reason for event in told if "many launches" in event.what] == ["not here"]
