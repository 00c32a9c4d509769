"""What is read for a device lies in memory that is pinned, from its reading until nobody looks into it any more.

Without a device: who pins is somebody who only writes it down.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import everstep
from everstep.capture import pinned
from everstep.capture.pinned import pinned_until_let_go
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

    def unregister(begin: int, device: torch.device, memory: memoryview) -> None:
        ctypes.string_at(begin, now.pop(begin))  # ends the process if it is not mapped any more

    monkeypatch.setattr(pinned, "_register", register)
    monkeypatch.setattr(pinned, "_unregister", unregister)
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


def test_a_base_that_is_read_from_the_disk_is_pinned_and_let_go(
    held: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    most: list[int] = []
    register = pinned._register

    def watched(begin: int, size: int) -> int:
        most.append(size)
        return register(begin, size)

    monkeypatch.setattr(pinned, "_register", watched)
    monkeypatch.setattr(load, "cuda_devices", lambda subjects: {DEVICE})
    with run_directory() as directory:
        model = nn.Linear(1024, 3 * CHUNK_BYTES // 4096)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with everstep.guard(model, optimizer, dir=directory, keeper="inline") as run:
            model(torch.ones(1, 1024)).sum().backward()
            optimizer.step()
            run.done()
        again = nn.Linear(1024, 3 * CHUNK_BYTES // 4096)
        optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
        with everstep.guard(again, optimizer, dir=directory, keeper="inline") as run:
            assert run.resumed_from == 1 and len(most) == 1 and most[0] > 3 * CHUNK_BYTES
        assert all(map(torch.equal, model.parameters(), again.parameters()))
        gc.collect()
        assert not held
