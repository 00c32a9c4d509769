"""Which memory is pinned while it is copied to a device: no more than whole pages around what is copied."""

from __future__ import annotations

import torch

from everstep.capture.pinned import _NEAR_BYTES, _PAGE, _spans


def test_neighbours_are_pinned_at_once_and_what_lies_between_distant_ones_is_not() -> None:
    memory = torch.zeros(8 << 20, dtype=torch.uint8)
    begin = memory.data_ptr()
    near, far = [memory[5000:9000], memory[9000 + _NEAR_BYTES // 2 :][:100]], memory[7_000_000:7_000_001]
    first, second = ((at, at + size) for at, size in _spans([far, near[1], torch.empty(0), near[0]]))
    assert first[0] <= begin + 5000 and first[1] >= begin + 9100 + _NEAR_BYTES // 2
    assert first[1] < begin + 9100 + _NEAR_BYTES
    assert second[0] <= begin + 7_000_000 < second[1] <= second[0] + 2 * _PAGE
    assert all(address % _PAGE == 0 for address in (*first, *second))
