"""Bytes onto a file and off it, in whole blocks where O_DIRECT wants them so."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from everstep.image import BLOCK, CHUNK_BYTES, round_up
from everstep.mapped import Mapped

_STRAIGHT_BYTES = 256 << 10  # what is shorter is gathered: a copy costs less than a write of its own


def publish(temporary: Path, path: Path) -> None:
    """Rename without overwriting: a link refuses a name that is taken; where links are not to be had, look first."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, "a name never changes its content", str(path)) from error
        os.rename(temporary, path)


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        try:
            written = os.pwrite(descriptor, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            write_padded(descriptor, data, offset)  # memory that does not begin on a block
            return
        data, offset = data[written:], offset + written


def chunks(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for at in range(0, len(part), CHUNK_BYTES):
            yield part[at : at + CHUNK_BYTES]


def whole_blocks(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    """The same bytes, as O_DIRECT takes them: long stretches from where they lie, short ones gathered on a block."""
    room, filled = memoryview(mmap.mmap(-1, CHUNK_BYTES)), 0
    for part in parts:
        while part:
            straight = min(len(part) // BLOCK * BLOCK, CHUNK_BYTES)
            if straight >= _STRAIGHT_BYTES and filled % BLOCK == 0:
                if filled:
                    yield room[:filled]
                    filled = 0
                yield part[:straight]
                part = part[straight:]
                continue
            take = min(len(part), CHUNK_BYTES - filled)
            room[filled : filled + take] = part[:take]
            part, filled = part[take:], filled + take
            if filled == CHUNK_BYTES:
                yield room
                filled = 0
    if filled:
        yield room[:filled]


def room_for(size: int) -> memoryview:
    """Fresh memory of this process, in large pages where the system has them: small ones cost more than reading."""
    if not size:
        return memoryview(b"")  # nothing cannot be mapped
    room = Mapped(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        room.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # this kernel has none, and small ones do
    return memoryview(room)


def write_padded(descriptor: int, data: memoryview, offset: int) -> None:
    """O_DIRECT takes whole blocks from whole blocks: copy to such; the file is cut to size afterwards."""
    with mmap.mmap(-1, round_up(len(data), BLOCK)) as aligned:
        aligned[: len(data)] = data
        at = 0
        while at < len(aligned):
            with memoryview(aligned) as view, view[at:] as rest:
                at += os.pwrite(descriptor, rest, offset + at)


def read_all(descriptor: int, into: memoryview, offset: int, size: int) -> None:
    """Fill `into` from `offset`; with O_DIRECT the last read may ask for more than the file has."""
    while into and offset < size:
        count = os.preadv(descriptor, [into], offset)
        if count == 0:
            raise OSError(errno.EIO, "the file became shorter while it was read")
        into, offset = into[count:], offset + count
