"""Copies to the host are queued at once, and others may pass between them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from everstep.capture import shape
from everstep.capture.shape import Lane


@pytest.mark.parametrize("sizes", [[], [5], [10], [4, 4, 4, 4, 4], [30, 1], [1] * 25], ids=str)
def test_a_turnstile_stands_after_every_few_bytes(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[tuple[list[Tensor], list[Tensor]]] = []
    monkeypatch.setattr(shape, "PASSING_BYTES", 10)
    monkeypatch.setattr(torch, "_foreach_copy_", lambda into, out, **_: queued.append((into, out)))
    turnstile = torch.zeros(1), torch.ones(1)
    lane = Lane(stream=cast(Any, None), cut=cast(Any, None), end=cast(Any, None), turnstile=turnstile)
    targets, sources = ([torch.zeros(size, dtype=torch.uint8) for size in sizes] for _ in range(2))
    lane.copy(targets, sources)
    into, out_of = queued[0] if queued else ([], [])
    stands = [at for at, one in enumerate(into) if one is turnstile[0]]
    assert stands == [at for at, one in enumerate(out_of) if one is turnstile[1]]
    assert [id(one) for one in into if one is not turnstile[0]] == list(map(id, targets))
    assert [id(one) for one in out_of if one is not turnstile[1]] == list(map(id, sources))
    between = [0, *stands, len(into)]
    passing = [sum(one.nbytes for one in out_of[a:b] if one is not turnstile[1]) for a, b in pairwise(between)]
    assert all(size >= 10 for size in passing[:-1]) and passing[-1] < 10
    assert all(size - out_of[b - 1].nbytes < 10 for size, b in zip(passing, stands, strict=False))
