"""Parity made and used chunk by chunk, in a few chunks of memory, however long the data are.

It reads and writes through what the caller gives it. One call of the reader has a chunk from each of several members,
so that a caller may fetch them at the same time; what the reader or the writer raises goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from everstep.protect.coder import Coder, coder_for
from everstep.protect.stripes import Geometry, Mix, Place
from everstep.protect.xor import Bytes

CHUNK_BYTES = 1 << 20  # a stripe of eight takes 9 MiB of buffers, and a round trip is small beside its transfer


@dataclass(frozen=True, slots=True)
class Read:
    """Fill `into` with a member's bytes from `offset` on."""

    member: int
    place: Place
    offset: int
    into: memoryview


Reader = Callable[[Sequence[Read]], None]  # returns when all are filled
Writer = Callable[[int, memoryview], None]  # offset and bytes, which are its own only until it returns


def encode(geometry: Geometry, member: int, read: Reader, write: Writer, *, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Write a member's parity file, reading the data of the others."""
    rebuild(geometry, (), member, Place.PARITY, read, write, chunk_bytes=chunk_bytes)


def rebuild(
    geometry: Geometry,
    lost: Collection[int],
    member: int,
    place: Place,
    read: Reader,
    write: Writer,
    *,
    start: int = 0,
    stop: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Write a member's data or its parity file again, whole or from `start` to `stop`, in the order of its bytes.

    Neither the member nor any that is `lost` is read. Offsets are those within the member's data or parity file.
    """
    coder = coder_for(geometry.width, geometry.losses)
    buffers = [np.empty(chunk_bytes, np.uint8) for _ in range(geometry.width)]
    out = np.empty(chunk_bytes, np.uint8)
    for mix in geometry.mixes(place, member, lost, start=start, stop=stop):
        weights = coder.weights(mix.target.column, [block.column for block in mix.sources])
        for begin in range(0, mix.target.length, chunk_bytes):
            _chunk(mix, begin, coder, weights, buffers, out, read, write)


def _chunk(
    mix: Mix,
    begin: int,
    coder: Coder,
    weights: bytes,
    buffers: Sequence[Bytes],
    out: Bytes,
    read: Reader,
    write: Writer,
) -> None:
    end = begin + len(out)
    target, parts = mix.target.cut(begin, end), [block.cut(begin, end) for block in mix.sources]
    chunks = [buffer[: part.length] for buffer, part in zip(buffers, parts, strict=True)]
    read(
        [
            Read(part.member, part.place, part.offset, chunk.data)
            for part, chunk in zip(parts, chunks, strict=True)
            if part.length
        ]
    )
    coder.combine(weights, chunks, out[: target.length])
    write(target.offset, out[: target.length].data)
