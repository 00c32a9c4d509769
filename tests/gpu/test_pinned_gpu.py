"""On a CUDA device: memory that is pinned while it is copied, or that cannot be."""

from __future__ import annotations

import copy
import ctypes
import sys
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from torch import nn

import everstep
from everstep.capture import pinned
from everstep.capture.pinned import pin, pinned_for, pinned_until_let_go
from everstep.capture.reserve import Reserve
from everstep.events import Degraded, Event
from everstep.mapped import Mapped
from everstep.store.blocks import room_for

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import run_directory

DEVICE = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(200),
]


def test_memory_that_cannot_be_pinned_is_told_of_and_training_goes_on() -> None:
    memory, events = [Mapped(-1, 1 << 20), Mapped(-1, 1 << 20)], list[Event]()
    taken = memory[1].span
    assert int(torch.cuda.cudart().cudaHostRegister(*taken, 0)) == 0  # by somebody else
    try:
        assert not pin(memory, {DEVICE}, events.append)
        assert [type(event) for event in events] == [Degraded]
        assert (torch.ones(8, device="cuda") + 1).sum().item() == 16  # torch does not find the error of somebody else
        assert not torch.frombuffer(memory[0], dtype=torch.uint8).is_pinned()
    finally:
        torch.cuda.cudart().cudaHostUnregister(taken[0])
    assert pin(memory, {DEVICE}, events.append) and torch.frombuffer(memory[0], dtype=torch.uint8).is_pinned()


def test_sources_are_pinned_only_while_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_WORTH_BYTES", 0)
    monkeypatch.setattr(pinned, "_NEAR_BYTES", 0)  # `before` may lie near to the others
    memory = torch.randint(0, 255, (8 << 20,), dtype=torch.uint8)
    before = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8).pin_memory()
    sources = [memory[1000:500_000], memory[6_000_001:7_000_000], before, torch.empty(0)]
    targets = [torch.empty_like(source, device="cuda") for source in sources]
    with pinned_for({DEVICE}, sources):
        assert all(source.is_pinned() for source in sources[:3])
        torch._foreach_copy_(targets, sources, non_blocking=True)
    assert [source.is_pinned() for source in sources[:3]] == [False, False, True]
    assert all(torch.equal(target.cpu(), source) for target, source in zip(targets, sources, strict=True))


def test_memory_is_pinned_while_it_is_read_into_and_until_it_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_WORTH_BYTES", 2 << 20)
    let_go: list[int] = []
    unregister = pinned._unregister

    def watched(begin: int, device: torch.device) -> None:
        ctypes.string_at(begin, 8 << 20)  # is still there
        let_go.append(begin)
        unregister(begin, device)

    monkeypatch.setattr(pinned, "_unregister", watched)
    with pinned_until_let_go({DEVICE}, room_for) as room:
        large, small = room(8 << 20), room(1 << 20)
        large[:] = bytes(range(256)) * (len(large) // 256)
    tensor = torch.frombuffer(large, dtype=torch.uint8)
    assert tensor.is_pinned() and not torch.frombuffer(small, dtype=torch.uint8).is_pinned()
    assert torch.equal(tensor.to("cuda", non_blocking=True).cpu(), tensor)
    begin = tensor.data_ptr()
    del large, small
    assert not let_go  # the tensor still looks into it
    del tensor
    assert let_go == [begin]
    with pinned_until_let_go({DEVICE}, room_for) as room:  # maybe at the same address
        again = room(8 << 20)
    assert torch.frombuffer(again, dtype=torch.uint8).is_pinned()
    assert (torch.ones(8, device="cuda") + 1).sum().item() == 16


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(3))).cuda().to(memory_format=torch.channels_last)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def train(run: everstep.Run, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, 2048, device="cuda")).sum().backward()
        optimizer.step()
        run.done()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [value.detach().clone() for value in (*model.parameters(), *states)]


@pytest.mark.parametrize("refused", [False, True])
def test_a_large_state_comes_back_through_pinned_memory(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    registered: list[int] = []
    register = pinned._register

    def watched(begin: int, size: int, device: torch.device) -> int:
        registered.append(size)
        return 1 if refused else register(begin, size, device)

    with run_directory() as directory:
        model, optimizer = make()
        with everstep.guard(model, optimizer, dir=directory, keeper="inline") as run:
            train(run, model, optimizer, 2)
        wanted = values(model, optimizer)
        monkeypatch.setattr(pinned, "_register", watched)
        model, optimizer = make()
        with everstep.guard(model, optimizer, dir=directory, keeper="inline") as run:
            assert run.resumed_from == 2 and sum(registered) > 100 << 20
            found = values(model, optimizer)
            assert len(found) == len(wanted) and all(map(torch.equal, wanted, found))


@pytest.mark.parametrize("in_time", [True, False])
def test_slots_that_were_pinned_while_a_disk_was_read_hold_what_is_captured(
    monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    """And a program may record a CUDA graph as soon as guard() has returned."""
    by: list[str] = []
    register, end = pinned._register, Reserve.end_pinning

    def watched(begin: int, size: int, device: torch.device) -> int:
        by.append(threading.current_thread().name.split("_")[0])
        return register(begin, size, device)

    def late(self: Reserve) -> None:
        wait([self._taking] if self._taking is not None else [])
        end(self)

    with run_directory() as directory:
        model, optimizer = make()
        with everstep.guard(model, optimizer, dir=directory, keeper="inline") as run:
            train(run, model, optimizer, 2)
        monkeypatch.setattr(pinned, "_register", watched)
        if in_time:
            monkeypatch.setattr(Reserve, "end_pinning", late)
        model, optimizer = make()
        with everstep.guard(model, optimizer, dir=directory, keeper="inline") as run:
            slots = by.count("everstep-reserve")
            assert run.resumed_from == 2 and (slots == 3 if in_time else slots <= 3)
            graph, number = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
            with torch.cuda.graph(graph):
                number += 1
            graph.replay()
            train(run, model, optimizer, 4)
            assert number.sum().item() == 8 and by.count("everstep-reserve") == slots
            arena = run._capture.arena()
            assert arena is not None and all(slot.pinned_bytes == arena.slot_bytes for slot in arena.slots)
            assert len(by) == 1 + 3  # what was read, and each slot once
        wanted = values(model, optimizer)
        model, optimizer = make()
        with everstep.guard(model, optimizer, dir=directory, keeper="inline") as run:
            assert run.resumed_from == 6 and all(map(torch.equal, wanted, values(model, optimizer)))


def test_values_on_the_host_are_logged_beside_gradients_of_a_device() -> None:
    """No device copies into the slots of those values, and so they are not pinned."""
    with run_directory() as directory:
        model, optimizer = make()
        average = copy.deepcopy(model).cpu().requires_grad_(False)
        with everstep.guard([model, average], optimizer, dir=directory, keeper="inline", strategy="log") as run:
            for _ in range(8):
                model(torch.randn(4, 2048, device="cuda")).sum().backward()
                optimizer.step()
                for mean, new in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(new.detach().cpu(), 0.1)
                run.done()
        found = everstep.open(directory).load(8)
        for name, wanted in average.named_parameters():
            assert torch.equal(found[f"model.1.{name}"], wanted)
