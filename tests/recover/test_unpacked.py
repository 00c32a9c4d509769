"""Gradients that a compressor packed, as a chain gives them to those who repeat its steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from everstep.capture.compress import Bf16
from everstep.recover.chain import _Buffer
from everstep.types import Piece


class OnDevice(torch.Tensor):
    """Says that it lies on a device, so that buffers are unpacked as they are there."""

    is_cuda = True  # type: ignore[assignment]


def step(values: list[float]) -> Any:
    """What the records of a step have."""
    return {0: SimpleNamespace(tensor=lambda _: torch.tensor(values, dtype=torch.bfloat16))}


def test_what_was_unpacked_for_a_step_stays_while_another_thread_unpacks_the_next() -> None:
    piece = Piece(name="packed.0.values", dtype="BF16", shape=(4,), start=(0,), extent=(4,), offset=0, length=8)
    buffer = _Buffer({"values": [(0, piece)]}, Bf16, torch.empty(4).as_subclass(OnDevice))
    first = buffer.elements(step([1.0, 2.0, 3.0, 4.0]), 1, 2)
    second = buffer.elements(step([5.0, 6.0, 7.0, 8.0]), 1, 2)
    assert (first.tolist(), second.tolist()) == ([2.0, 3.0], [6.0, 7.0])
