"""Which memory is pinned: no more than whole pages around what is copied to a device; of slots all or none."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest
import torch

from everstep.capture import pinned
from everstep.capture.pinned import _NEAR_BYTES, _PAGE, _spans, pin, pin_first
from everstep.capture.sheet import Sheet
from everstep.events import Event
from everstep.mapped import Mapped

DEVICE, SIZE = torch.device("cuda", 0), 1 << 20


def test_neighbours_are_pinned_at_once_and_what_lies_between_distant_ones_is_not() -> None:
    memory = torch.zeros(8 << 20, dtype=torch.uint8)
    begin = memory.data_ptr()
    near, far = [memory[5000:9000], memory[9000 + _NEAR_BYTES // 2 :][:100]], memory[7_000_000:7_000_001]
    first, second = ((at, at + size) for at, size in _spans([far, near[1], torch.empty(0), near[0]]))
    assert first[0] <= begin + 5000 and first[1] >= begin + 9100 + _NEAR_BYTES // 2
    assert first[1] < begin + 9100 + _NEAR_BYTES
    assert second[0] <= begin + 7_000_000 < second[1] <= second[0] + 2 * _PAGE
    assert all(address % _PAGE == 0 for address in (*first, *second))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """What a driver has that knows neither twice nor never, and wants all of it to be mapped until it is let go."""
    now: set[int] = set()

    class Driver:
        def cudaHostRegister(self, begin: int, size: int, flags: int) -> int:
            assert begin not in now
            now.add(begin)
            return 0

        def cudaHostUnregister(self, begin: int) -> int:
            ctypes.string_at(begin, SIZE)  # ends the process if it is not mapped any more
            now.remove(begin)
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return now


def mapped() -> Mapped:
    return Mapped(-1, SIZE)


@pytest.mark.parametrize("refused", [None, 0, 2])
def test_what_cannot_be_pinned_as_a_whole_is_not_and_nobody_lets_go_of_it(
    refused: int | None, registered: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letting go of what is not pinned is an error that the next kernel of training would hear of."""
    slots = [mapped() for _ in range(4)]
    register, asked = pinned._register, count()
    monkeypatch.setattr(pinned, "_register", lambda *where: 2 if next(asked) == refused else register(*where))
    told: list[Event] = []
    assert pin(slots, {DEVICE}, told.append) == (refused is None)
    assert registered == (set() if refused is not None else {slot.span[0] for slot in slots})
    assert len(told) == (refused is not None)
    for slot in [*slots, *slots]:
        slot.unpin()
    assert not registered


def test_what_is_pinned_is_not_pinned_again_unless_more_of_it_is_wanted(registered: set[int]) -> None:
    slot = mapped()
    assert pin_first(SIZE // 2, slot, {DEVICE}) == pin_first(SIZE // 2, slot, {DEVICE}) == 0
    assert pin([slot], {DEVICE}, lambda event: None)
    assert slot.pinned_bytes == SIZE and len(registered) == 1


@pytest.mark.parametrize("how", ["closed", "forgotten", "looked into", "given to the collector"])
def test_memory_is_let_go_before_it_is_unmapped_whoever_forgets_it(how: str, registered: set[int]) -> None:
    slot = mapped()
    assert pin([slot], {DEVICE}, lambda event: None)
    if how == "closed":
        slot.close()
    if how == "looked into":
        tensor = torch.frombuffer(memoryview(slot), dtype=torch.uint8)[5:]
        with pytest.raises(BufferError):
            slot.close()
        assert not registered and tensor.sum() == 0
        assert pin([slot], {DEVICE}, lambda event: None)
        del slot
        assert registered
        del tensor
    elif how == "given to the collector":
        slot.itself = slot  # type: ignore[attr-defined]
        del slot
        assert registered
        gc.collect()
    else:
        del slot
    assert not registered


def test_who_is_interrupted_while_it_is_pinned_leaves_an_owner_behind(
    registered: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    register = pinned._register

    def interrupted(*where: Any) -> int:
        register(*where)
        raise KeyboardInterrupt

    monkeypatch.setattr(pinned, "_register", interrupted)
    slot = mapped()
    with pytest.raises(KeyboardInterrupt):
        pin([slot], {DEVICE}, lambda event: None)
    assert registered
    del slot
    assert not registered


def test_who_is_interrupted_while_it_is_let_go_lets_go_again(
    registered: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    unregister, interrupts = pinned._unregister, [True]

    def interrupted(*where: Any) -> None:
        if interrupts:
            interrupts.clear()
            raise KeyboardInterrupt
        unregister(*where)

    monkeypatch.setattr(pinned, "_unregister", interrupted)
    slot = mapped()
    assert pin([slot], {DEVICE}, lambda event: None)
    with pytest.raises(KeyboardInterrupt):
        slot.unpin()
    assert registered
    del slot
    assert not registered


def test_what_was_pinned_before_something_failed_is_let_go(
    registered: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    register = pinned._register

    def failing(*where: Any) -> int:
        register(*where)
        raise RuntimeError("the device cannot be changed back")

    monkeypatch.setattr(pinned, "_register", failing)
    slot = mapped()
    with pytest.raises(RuntimeError):
        pin([slot], {DEVICE}, lambda event: None)
    assert not registered


def test_a_mapping_that_ends_in_another_way_or_becomes_shorter_is_let_go(registered: set[int]) -> None:
    with mapped() as slot:
        assert pin([slot], {DEVICE}, lambda event: None)
    assert not registered and slot.closed
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        slot = Mapped(file.fileno(), SIZE)
        assert pin([slot], {DEVICE}, lambda event: None)
        slot.resize(SIZE // 2)
        assert not registered


def test_a_device_that_is_lost_stops_nobody_from_letting_go(
    registered: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = mapped()
    assert pin([slot], {DEVICE}, lambda event: None)

    def lost(device: torch.device) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "device", lost)
    slot.close()
    assert slot.closed


def test_what_no_device_copies_into_is_not_pinned(registered: set[int]) -> None:
    """Such as values of a log that the loop writes on the host, beside gradients of a device."""
    sheet = Sheet(layout=None, arena=None, flats=[], runs={}, lanes={}, drained={})  # type: ignore[arg-type]
    assert sheet.pin(lambda event: None) and not registered


def test_a_forked_child_does_not_let_go_of_what_its_parent_has_pinned(registered: set[int]) -> None:
    slot = mapped()
    assert pin([slot], {DEVICE}, lambda event: None)
    child = os.fork()
    if child == 0:
        slot.close()
        os._exit(len(registered))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_an_end_of_the_interpreter_calls_no_driver() -> None:
    """Which may be gone by then."""
    program = """
import os
from everstep.mapped import Mapped
slot = Mapped(-1, 4096)
assert slot.pin(4096, lambda: 0, lambda write=os.write: write(2, b"let go")) == 0
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
