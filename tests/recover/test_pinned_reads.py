"""What is read for a device lies in memory that is pinned, from its reading until nobody looks into it any more.

Without a device: who pins is somebody who only writes it down.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.capture import pinned, reserve
from everstep.capture.arena import Arena
from everstep.capture.host import populate
from everstep.capture.pinned import pinned_until_let_go
from everstep.capture.reserve import Reserve
from everstep.capture.snapshot import Capture
from everstep.errors import Mismatch
from everstep.image import CHUNK_BYTES, ImageLayout
from everstep.recover import load
from everstep.store.blocks import room_for

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import run_directory

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """What is pinned, by address."""
    now: dict[int, int] = {}

    def register(begin: int, size: int, device: torch.device) -> int:
        assert begin not in now, "pinned twice, or never let go"
        now[begin] = size
        return 0

    def unregister(begin: int, device: torch.device) -> None:
        ctypes.string_at(begin, now.pop(begin))  # ends the process if it is not mapped any more

    monkeypatch.setattr(pinned, "_register", register)
    monkeypatch.setattr(pinned, "_unregister", unregister)
    monkeypatch.setattr(pinned, "_WORTH_BYTES", 1 << 20)
    return now


def test_memory_is_pinned_until_nobody_looks_into_it(held: dict[int, int]) -> None:
    with pinned_until_let_go({DEVICE}, room_for) as room:
        large, small, nothing = room(8 << 20), room(4096), room(0)
    assert list(held.values()) == [8 << 20] and len(small) == 4096 and not nothing
    tensor = torch.frombuffer(large, dtype=torch.uint8)[5:]
    del large
    assert held
    del tensor
    assert not held


def test_what_was_read_in_vain_is_let_go_before_the_next_is_read(
    held: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    register = pinned._register
    monkeypatch.setattr(pinned, "_register", lambda *where: time.sleep(0.05) or register(*where))
    before: list[weakref.ref[object]] = []
    with pinned_until_let_go({DEVICE}, room_for) as room:
        for _ in range(3):
            made = room(8 << 20)
            assert all(one() is None for one in before)
            before.append(weakref.ref(made.obj))
            del made
    assert not held


def test_an_error_of_the_thread_that_pins_is_told(held: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*where: object) -> int:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(pinned, "_register", fail)
    monkeypatch.setattr(pinned, "_unregister", lambda *where: None)  # who may have it after all, and is asked to let go
    with pytest.raises(RuntimeError, match="the driver is gone"), pinned_until_let_go({DEVICE}, room_for) as room:
        room(8 << 20)


ROWS = 3 * CHUNK_BYTES // 4096
SLOTS = 3


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose disk has step 1, and whose memory is gone. Whoever resumes it is taken for one with a device."""
    monkeypatch.setattr(load, "cuda_devices", lambda subjects: {DEVICE})
    with run_directory() as folder:
        train(folder, ROWS)
        yield folder
    gc.collect()  # runs that are over have their files open until then


def train(
    folder: Path, rows: int, *, steps: int = 1, strict: bool = True, begun: Callable[[], object] = int
) -> tuple[everstep.Run, nn.Linear]:
    """`begun`: called when guard() has returned."""
    model = nn.Linear(1024, rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with everstep.guard(model, optimizer, dir=folder, keeper="inline", strict=strict) as run:
        begun()
        for _ in range(steps):
            model(torch.ones(1, 1024)).sum().backward()
            optimizer.step()
            run.done()
    return run, model


@pytest.fixture
def in_time(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All slots are taken and pinned before guard() returns, as they are while gigabytes are read."""
    end = reserve.Reserve.end_pinning

    def late(self: reserve.Reserve) -> None:
        wait([self._taking] if self._taking is not None else [])
        end(self)

    monkeypatch.setattr(reserve.Reserve, "end_pinning", late)


@pytest.fixture
def asked(held: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """By which thread, and for how many bytes, something was pinned."""
    found: list[tuple[str, int]] = []
    register = pinned._register

    def watched(begin: int, size: int, device: torch.device) -> int:
        found.append((threading.current_thread().name, size))
        return register(begin, size, device)

    monkeypatch.setattr(pinned, "_register", watched)
    return found


@pytest.fixture
def at_first_cut(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What the slots have pinned when the arena is made, before training itself would pin them for a device."""
    found: list[list[int]] = []
    make = Capture._make_arena

    def watched(self: Capture, layout: ImageLayout) -> Arena:
        arena = make(self, layout)
        found.append([slot.pinned_bytes for slot in arena.slots])
        assert all(size in (0, arena.slot_bytes) for size in found[-1])
        return arena

    monkeypatch.setattr(Capture, "_make_arena", watched)
    return found


@pytest.mark.usefixtures("in_time")
def test_what_is_read_is_pinned_and_let_go_and_slots_are_pinned_meanwhile(
    held: dict[int, int], asked: list[tuple[str, int]], at_first_cut: list[list[int]], directory: Path
) -> None:
    run, model = train(directory, ROWS, steps=0)
    assert run.resumed_from == 1 and len(asked) == 1 + SLOTS and min(asked)[1] > 3 * CHUNK_BYTES
    assert torch.equal(model.weight, everstep.open(directory).load(1)["model.weight"])
    assert not held and not at_first_cut  # of a run without a cut nothing is left


@pytest.mark.usefixtures("in_time")
def test_the_first_cut_finds_its_slots_pinned(
    held: dict[int, int], asked: list[tuple[str, int]], at_first_cut: list[list[int]], directory: Path
) -> None:
    run, _ = train(directory, ROWS, steps=2)
    assert run.step == 3 and len(asked) == 1 + SLOTS
    (sizes,) = at_first_cut
    assert len(sizes) == SLOTS and all(sizes)
    assert not held  # the run is over


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("rows", [ROWS // 2, 2 * ROWS])
def test_slots_that_do_not_fit_another_program_are_let_go_by_the_device(
    rows: int, held: dict[int, int], asked: list[tuple[str, int]], at_first_cut: list[list[int]], directory: Path
) -> None:
    run, _ = train(directory, rows, steps=2, strict=False)
    assert run.step == 3 and len(asked) == 1 + SLOTS and at_first_cut == [[0] * SLOTS]
    assert not held


def test_no_thread_pins_anything_once_guard_has_returned(
    held: dict[int, int], asked: list[tuple[str, int]], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that records a CUDA graph does not forgive it."""
    go_on, first = threading.Event(), iter([True])

    def slow(spans: Sequence[tuple[int, int]], **how: int) -> int:
        assert next(first, False) or go_on.wait(20)
        return populate(spans, **how)

    monkeypatch.setattr(reserve, "populate", slow)
    run, _ = train(directory, ROWS, steps=2, begun=go_on.set)
    assert run.step == 3 and len(asked) == 2  # what was read, and one slot
    assert not held


def test_a_thread_that_pins_is_waited_for_before_guard_returns(
    held: dict[int, int], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register, under_way, began = pinned._register, list[str](), threading.Event()
    end_pinning = Reserve.end_pinning

    def slow(*where: Any) -> int:
        if threading.current_thread().name.startswith("everstep-reserve"):
            under_way.append("began")
            began.set()
            time.sleep(0.3)
            under_way.append("ended")
        return register(*where)

    def when_it_is_under_way(self: Reserve) -> None:
        assert began.wait(60)
        end_pinning(self)

    monkeypatch.setattr(pinned, "_register", slow)
    monkeypatch.setattr(Reserve, "end_pinning", when_it_is_under_way)
    at_return: list[list[str]] = []
    train(directory, ROWS, steps=1, begun=lambda: at_return.append(under_way[:]))
    assert at_return == [under_way] and under_way.count("began") == under_way.count("ended") > 0
    assert not held


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("refused", [1, 2, 3])
def test_what_a_driver_refuses_is_left_to_the_first_cut(
    refused: int, held: dict[int, int], at_first_cut: list[list[int]], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register, asked = pinned._register, count(1)

    def refuse(*where: Any) -> int:
        is_slot = threading.current_thread().name.startswith("everstep-reserve")
        return 2 if is_slot and next(asked) == refused else register(*where)

    monkeypatch.setattr(pinned, "_register", refuse)
    run, _ = train(directory, ROWS, steps=2)
    assert run.step == 3 and [bool(size) for size in at_first_cut[0]] == [at < refused for at in range(1, 1 + SLOTS)]
    assert next(asked) == refused + 1  # it is not asked again
    assert not held


def test_a_guard_that_refuses_lets_go_of_all(held: dict[int, int], directory: Path) -> None:
    with pytest.raises(Mismatch):
        try:
            train(directory, 2 * ROWS)
        except Mismatch as error:
            error.__traceback__ = None  # which looks into what was read
            gc.collect()
            assert not held
            raise
