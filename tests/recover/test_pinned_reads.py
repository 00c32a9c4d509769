"""What is read for a device lies in memory that is pinned, from its reading until nobody looks into it any more; and
what the captures that follow will need is pinned meanwhile.

Without a device: who pins is somebody who only writes it down.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import everstep
from everstep.capture import pinned
from everstep.capture.pinned import pinned_until_let_go
from everstep.capture.shape import Shape
from everstep.capture.snapshot import Capture
from everstep.image import CHUNK_BYTES
from everstep.recover import load
from everstep.store.blocks import room_for

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import run_directory

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """What is pinned, by address."""
    now: dict[int, int] = {}

    def register(begin: int, size: int) -> int:
        assert begin not in now, "pinned twice, or never let go"
        now[begin] = size
        return 0

    def unregister(begin: int, *_: object) -> None:
        end = begin + now.pop(begin)
        maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        assert any(int(low, 16) <= begin and end <= int(high, 16) for low, high in maps), "it is not mapped any more"

    monkeypatch.setattr(pinned, "_register", register)
    monkeypatch.setattr(pinned, "_unregister", unregister)
    monkeypatch.setattr(pinned, "_unregister_all", lambda begins: [unregister(begin) for begin in begins])
    monkeypatch.setattr(pinned, "_WORTH_BYTES", 1 << 20)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
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
    def fail(begin: int, size: int) -> int:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(pinned, "_register", fail)
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


def train(folder: Path, rows: int, *, steps: int = 1, strict: bool = True) -> tuple[everstep.Run, nn.Module]:
    model = nn.Linear(1024, rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with everstep.guard(model, optimizer, dir=folder, keeper="inline", strict=strict) as run:
        for _ in range(steps):
            model(torch.ones(1, 1024)).sum().backward()
            optimizer.step()
            run.done()
    return run, model


def sizes(held: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of all that is pinned from now on."""
    found: list[int] = []
    register = pinned._register

    def watched(begin: int, size: int) -> int:
        found.append(size)
        return register(begin, size)

    monkeypatch.setattr(pinned, "_register", watched)
    return found


def test_a_base_that_is_read_from_the_disk_is_pinned_and_let_go(
    held: dict[int, int], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = sizes(held, monkeypatch)
    run, model = train(directory, ROWS, steps=0)
    assert run.resumed_from == 1 and len(seen) == 1 + SLOTS and min(seen) > 3 * CHUNK_BYTES
    (tensors,) = [everstep.open(directory).load(1)]
    assert torch.equal(model.weight, tensors["model.weight"])
    gc.collect()
    assert not held


def test_slots_are_pinned_while_the_disk_is_read_and_not_again_at_the_first_cut(
    held: dict[int, int], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = sizes(held, monkeypatch)
    at_cut: list[tuple[bool, int]] = []
    make = Capture._make_shape

    def watched(self: Capture, extras_bytes: int) -> Shape:
        shape = make(self, extras_bytes)
        at_cut.append((shape.arena.is_pinned, len(held)))
        return shape

    monkeypatch.setattr(Capture, "_make_shape", watched)
    run, _ = train(directory, ROWS, steps=2)
    assert run.step == 3 and at_cut == [(True, SLOTS)] and len(seen) == 1 + SLOTS
    assert not held  # the run is over


@pytest.mark.parametrize("rows", [ROWS // 2, 2 * ROWS])
def test_slots_that_another_program_cannot_use_are_let_go_by_the_device_first(
    rows: int, held: dict[int, int], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = sizes(held, monkeypatch)
    run, _ = train(directory, rows, steps=2, strict=False)
    assert run.step == 3 and len(seen) == 1 + SLOTS
    assert not held


def test_what_can_be_pinned_in_part_only_is_not_pinned(
    held: dict[int, int], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register, answers = pinned._register, [0, 0, 2, 0]
    monkeypatch.setattr(pinned, "_register", lambda *where: answers.pop(0) or register(*where))
    train(directory, ROWS, steps=2)
    gc.collect()
    assert not held
