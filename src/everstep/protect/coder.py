"""Arithmetic on blocks: any block of a stripe as a weighted sum of as many others as the stripe has data blocks.

Encoding row r is asking for column `width + r` out of the data columns; recovering is asking for whatever is missing
out of whatever is there. So two verbs do for both: `weights`, once for a stripe, and `combine`, once for a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from everstep.protect.reed_solomon import ReedSolomon
from everstep.protect.xor import Bytes, Xor


class Coder(Protocol):
    """What a code can do. Columns are numbered as in `stripes`: the data of a stripe, then its parity."""

    def weights(self, wanted: int, present: Sequence[int]) -> bytes:
        """How much of each present column the wanted one holds; as many must be present as the stripe has data."""
        ...

    def combine(self, weights: bytes, chunks: Sequence[Bytes], out: Bytes) -> None:
        """The weighted sum of the chunks, into `out`, which is none of them.

        No chunk is longer than `out`; shorter ones count as if zeros followed.
        """
        ...


def coder_for(width: int, losses: int) -> Coder:
    """The code for stripes of `width` data blocks and `losses` parity blocks."""
    return Xor(width) if losses == 1 else ReedSolomon(width, losses)
