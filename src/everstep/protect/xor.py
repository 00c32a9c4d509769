"""One loss, by exclusive or: every block of a stripe is the sum of all others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Xor:
    """The code with one row of parity. It needs nothing but numpy, and is as fast as reading the bytes."""

    def __init__(self, width: int) -> None:
        self._weights = bytes([1]) * width

    def weights(self, wanted: int, present: Sequence[int]) -> bytes:
        return self._weights

    def combine(self, weights: bytes, chunks: Sequence[Bytes], out: Bytes) -> None:
        longest, *others = sorted(chunks, key=len, reverse=True)
        if not others:
            out[: len(longest)] = longest
        else:  # the first two at once: a pass over `out` less
            second, *others = others
            np.bitwise_xor(longest[: len(second)], second, out=out[: len(second)])
            if len(second) < len(longest):
                out[len(second) : len(longest)] = longest[len(second) :]
        for chunk in others:
            head = out[: len(chunk)]
            np.bitwise_xor(head, chunk, out=head)
        out[len(longest) :] = 0
