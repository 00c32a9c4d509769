"""On a CUDA device: a copy of the training loop does not wait behind all those of a capture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.capture.shape import Run as Gathered
from everstep.capture.shape import make_lane

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import must_finish

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(120),
]


def a_copy_among_others() -> dict[str, Any]:
    size = 1 << 30
    source, target = torch.empty(size, dtype=torch.uint8, device="cuda"), torch.empty(size, dtype=torch.uint8)
    source.random_(0, 255)
    target, other = target.pin_memory(), torch.cuda.Stream()
    own, small = torch.ones(16, device="cuda"), torch.zeros(16).pin_memory()
    lane, gathered, passed = make_lane(source.device), Gathered(0, size, source), list[bool]()
    for _ in range(4):
        torch.cuda.synchronize()
        with torch.cuda.stream(lane.stream):
            gathered.leave(lane, target, 0, size)
            lane.end.record(lane.stream)
        with torch.cuda.stream(other):
            small.copy_(own, non_blocking=True)
            other.synchronize()
        passed.append(not lane.end.query())
    lane.drain()
    return {"passed": passed, "same": torch.equal(target, source.cpu())}


def test_a_copy_of_the_loop_passes_those_of_a_capture() -> None:
    result = must_finish(a_copy_among_others)
    assert result["same"]
    assert all(result["passed"][1:]), result["passed"]  # the first time a stream is made ready
