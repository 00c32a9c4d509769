"""Which memory is pinned: no more than whole pages around what is copied to a device; of slots all or none."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from everstep.capture import pinned
from everstep.capture.pinned import _NEAR_BYTES, _PAGE, _spans
from everstep.capture.sheet import Sheet
from everstep.events import Event


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
    """What a driver has that knows neither twice nor never."""
    now: set[int] = set()

    class Driver:
        def cudaHostRegister(self, begin: int, size: int, flags: int) -> int:
            assert begin not in now
            now.add(begin)
            return 0

        def cudaHostUnregister(self, begin: int) -> int:
            now.remove(begin)
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    return now


@pytest.mark.parametrize("refused", [None, 0, 2])
def test_what_cannot_be_pinned_as_a_whole_is_not_and_nobody_lets_go_of_it(
    refused: int | None, registered: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letting go of what is not pinned is an error that the next kernel of training would hear of."""
    flats = [torch.zeros(8, dtype=torch.uint8) for _ in range(4)]
    register, asked = pinned._register, count()
    monkeypatch.setattr(pinned, "_register", lambda *where: 2 if next(asked) == refused else register(*where))
    told: list[Event] = []
    sheet = Sheet(layout=None, arena=None, flats=flats, runs={}, lanes={}, drained={})  # type: ignore[arg-type]
    assert sheet.pin(told.append) == (refused is None)
    assert registered == (set() if refused is not None else {flat.data_ptr() for flat in flats})
    assert len(told) == (refused is not None)
    sheet.close()
    sheet.close()
    assert not registered
