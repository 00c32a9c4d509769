"""A base is one cut: every tensor in it is the value after the same step, however fast the next update comes.

The optimizer here adds one to everything, with nothing to compute in between, so that each update tries to overtake the
copies of the one before. After step n every element must be n. Without the gate it is not, and that is tested too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everstep
from everstep.capture import layout, shares
from everstep.capture.snapshot import Capture
from everstep.image import parse

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import run_directory

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")])
DEVICES = ["cpu", GPU]


class AddsOne(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["count"] = torch.zeros_like(parameter)
                parameter.add_(1)
                state["count"].add_(1)


class Counters(nn.Module):
    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.zeros(elements)) for _ in range(tensors))
        self.register_buffer("seen", torch.zeros(elements))


@pytest.fixture
def directory() -> Iterator[Path]:
    with run_directory() as folder:
        yield folder


def bases(run: everstep.Run) -> dict[int, set[float]]:
    """For every sealed step: the values that occur in its base."""
    arena = run._capture.arena()
    assert arena is not None
    found = {}
    for slot, seal in arena.seals().items():
        image, _ = parse(arena.image(slot), arena.slot_bytes)
        floats = np.frombuffer(
            arena.image(slot),
            dtype=np.float32,
            count=sum(p.length for p in image.pieces) // 4,
            offset=len(image.header),
        )
        found[seal.step] = set(np.unique(floats).tolist())
    return found


def torn(
    directory: Path, device: str, *, optimizers: int = 1, steps: int = 12, went_on: threading.Event | None = None,
    tensors: int = 8, elements: int | None = None, **options: Any,
) -> list[int]:  # fmt: skip
    """Train, looking at every base; the steps whose base was not one cut. `went_on`: told when an update is done."""
    model = Counters(tensors, elements or 1 << (21 if device == "cpu" else 24)).to(device)
    groups = [list(model.values)[i::optimizers] for i in range(optimizers)]
    made = [AddsOne(group) for group in groups]
    run = everstep.guard(model, made, dir=directory, keeper="inline", tiers=[everstep.Disk(every="1h")], **options)
    bad = []
    for step in range(1, steps + 1):
        model.seen.add_(1)  # a buffer moves before the gate, as in a forward pass
        for optimizer in reversed(made):
            optimizer.step()
        if went_on is not None:
            went_on.set()
            run.wait("sealed")
            went_on.clear()
        run.done()
        if step % 3 == 0:
            run.wait("sealed")
            bad += [n for n, values in bases(run).items() if values != {float(n)}]
    run.close()
    return bad


@pytest.mark.parametrize("device", DEVICES)
def test_no_update_overtakes_the_copy_of_the_step_before(directory: Path, device: str) -> None:
    assert torn(directory, device) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_no_update_overtakes_the_copy_into_spare_device_memory(directory: Path) -> None:
    assert torn(directory, "cuda", mode="device") == []


@pytest.mark.parametrize("device", DEVICES)
def test_no_update_overtakes_the_copies_of_many_small_tensors(directory: Path, device: str) -> None:
    assert torn(directory, device, tensors=2000, elements=1000) == []


@pytest.mark.parametrize("device", DEVICES)
def test_an_optimizer_per_parameter_is_gated_bucket_by_bucket(
    directory: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.capture.buckets.BUCKET_BYTES", {"cpu": 1 << 20, "cuda": 1 << 20})
    assert torn(directory, device, optimizers=8) == []


@pytest.mark.parametrize("device", DEVICES)
def test_without_the_gate_bases_are_torn_so_the_test_can_fail(
    directory: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, went_on = Capture._copy, threading.Event()

    def slowly(self: Capture, *arguments: Any) -> None:
        went_on.wait(1.0)  # for the last base that is looked at nobody goes on
        real(self, *arguments)

    monkeypatch.setattr(Capture, "_gate", lambda *_: None)
    monkeypatch.setattr(Capture, "_copy", slowly)
    assert torn(directory, device, steps=4, went_on=went_on) != []


@pytest.mark.parametrize("device", DEVICES)
def test_without_shadows_a_buffer_runs_ahead_so_the_test_can_fail(
    directory: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer moves before any gate; were it not copied in the cut, the base would hold its next value."""
    real, went_on = Capture._copy_and_seal, threading.Event()

    def from_the_live_buffer(self: Capture, job: Any) -> None:
        went_on.wait(1.0)
        assert self._shape is not None
        for shadows, sources in self._shape.cut_groups:
            torch._foreach_copy_(shadows, sources)
        real(self, job)

    monkeypatch.setattr(Capture, "_copy_and_seal", from_the_live_buffer)
    assert torn(directory, device, steps=4, went_on=went_on) != []


def test_the_gate_of_one_optimizer_does_not_wait_for_the_buckets_of_another(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.capture.buckets.BUCKET_BYTES", {"cpu": 1 << 20, "cuda": 1 << 20})
    model = Counters(tensors=4, elements=1 << 18)
    made = [AddsOne([value]) for value in model.values]
    run = everstep.guard(model, made, dir=directory, keeper="inline")
    for _ in range(2):
        for optimizer in reversed(made):
            optimizer.step()
        run.done()
    run.wait("sealed")
    shape = run._capture._shape
    assert shape is not None
    last = {optimizer: needed[-1] for optimizer, needed in shape.gates.items()}
    assert sorted(last, key=lambda optimizer: last[optimizer]) == [3, 2, 1, 0], (
        "buckets are not in the order of updates"
    )
    run.close()


def test_a_loop_that_writes_parameters_outside_the_optimizer_is_found_out_and_still_exact(directory: Path) -> None:
    model = Counters(tensors=4, elements=1 << 18)
    optimizer = AddsOne(model.values)
    run = everstep.guard(model, optimizer, dir=directory, keeper="inline", tiers=[everstep.Disk(every="1h")])
    for step in range(1, 7):
        with torch.no_grad():
            for value in model.values:
                value.sub_(1).add_(1)  # between the cut and the gate
        model.seen.add_(1)
        optimizer.step()
        run.done()
        if step > 2:
            run.wait("sealed")
            assert all(values == {float(n)} for n, values in bases(run).items())
    run.close()
    assert "no longer asynchronous" in (directory / "events-rank-00000.jsonl").read_text()


def test_nothing_per_tensor_happens_in_the_training_thread(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After warm-up a cut touches shadows and extras only: it makes no views and lists no tensors."""
    model = Counters(tensors=64, elements=16)
    optimizer = AddsOne(model.values)
    run = everstep.guard(model, optimizer, dir=directory, keeper="inline")
    for step in range(10):
        if step == 6:
            monkeypatch.setattr(shares.Share, "source", _forbidden)
            monkeypatch.setattr(layout.Subjects, "listing", _forbidden)
        model.seen.add_(1)
        optimizer.step()
        run.done()
    run.wait("sealed")
    assert run.status()["sealed_step"] == 10
    monkeypatch.undo()
    run.close()


def _forbidden(*_: Any) -> None:
    raise AssertionError("per-tensor work after warm-up")
