"""What records say of themselves, for people: how an update was called, how large it was, whether it can be proven.

Needs no torch: values that are tensors are read as numbers, or described.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from everstep import image
from everstep.capture.arena import Arena, Seal
from everstep.errors import Damaged, EverstepError
from everstep.recover.audit import log_files
from everstep.recover.shelf import RecordImage
from everstep.recover.survey import Sources
from everstep.store.log import LogRead, read_log
from everstep.types import Source, learnt

_CALL = "call."  # as capture.form has it, which needs torch
_CODES = {
    "float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "bool": "?", "F64": "d", "F32": "f",
    "F16": "e", "I64": "q", "I32": "i", "BOOL": "?",
}  # fmt: skip


class _Call(msgspec.Struct):
    optimizer: int
    absent: list[str]
    groups: list[dict[str, Any]]


@learnt
class _Said(msgspec.Struct):
    """What is told of a record's extras."""

    calls: list[_Call]
    digested: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One record."""

    step: int
    rank: int
    world: int
    source: Source
    bytes: int
    cut_time: float
    codec: str
    groups: list[list[dict[str, Any]]]  # of each call, of each group
    absent: int  # parameters that had no gradient
    digested: bool
    checksum: str  # empty: it is still in the ring, and has none
    file: str


def entries(sources: Sources, step: int | None) -> Iterator[Entry | str]:
    """Every record, or those of one step, their bytes checked; and in words why a file has no more of them."""
    for start, rank in log_files(sources.tier):
        if step is not None and step <= start:
            continue
        try:
            log = read_log(sources.tier, start, rank, sources.run)
            yield from (entry for entry in _logged(log) if step is None or entry.step == step)
        except (EverstepError, OSError) as error:
            yield str(error)
            continue
        if log.problem and (step is None or log.last < step):
            yield log.problem
    for ring in (ring for ring in sources.rings if ring.kind == "log"):
        for slot, seal in sorted(ring.seals().items(), key=lambda item: item[1].step):
            if seal.step > ring.taken() and (step is None or seal.step == step):
                try:
                    yield _in_ring(ring, slot, seal)
                except EverstepError as error:
                    yield str(error)


def _logged(log: LogRead) -> Iterator[Entry]:
    for record in log.records:
        assert log.layout is not None and log.info is not None
        frame = record.frame
        one = RecordImage(log.layout, log.info, log.payload(record), frame.ranges, frame.gaps)
        yield _entry(
            one, step=frame.step, source="disk", bytes=record.length, cut_time=frame.cut_time,
            checksum=f"{record.checksum:016x}", file=log.name,
        )  # fmt: skip


def _in_ring(ring: Arena, slot: int, seal: Seal) -> Entry:
    data = memoryview(bytearray(ring.image(slot)))  # its owner may go on writing
    layout, info = image.parse_cached(bytes(data[: image.header_bytes(data)]), len(data), ring.place)
    one = RecordImage(layout, info, data, ((0, len(data)),))
    return _entry(
        one, step=seal.step, source="memory", bytes=seal.length, cut_time=seal.cut_time, checksum="", file=ring.place
    )


def _entry(one: RecordImage, *, step: int, **fields: Any) -> Entry:
    try:
        said = msgspec.msgpack.decode(one.extras(), type=_Said, ext_hook=_plain)
    except (msgspec.DecodeError, ValueError, TypeError, struct.error) as error:
        raise Damaged(f"unreadable extras: {error}", step=step, rank=one.info.rank) from None
    groups = [
        [{**group, **_from_device(one, f"{_CALL}{call.optimizer}.group.{g}.")} for g, group in enumerate(call.groups)]
        for call in said.calls
    ]
    return Entry(
        step=step, rank=one.info.rank, world=one.info.world, groups=groups,
        codec=one.info.codec.kind if one.info.codec else "dense",
        absent=sum(len(call.absent) for call in said.calls), digested=said.digested, **fields,
    )  # fmt: skip


def _from_device(one: RecordImage, prefix: str) -> dict[str, Any]:
    """Values of a group that lay on a device, such as a learning rate."""
    return {
        piece.name.removeprefix(prefix): _value(
            piece.dtype, piece.shape, bytes(one.bytes_at(len(one.layout.header) + piece.offset, piece.length))
        )
        for piece in one.layout.pieces
        if piece.name.startswith(prefix)
    }


def _plain(tag: int, data: memoryview) -> Any:
    """Values that capture.extras has tags for: sequences as lists, tensors and arrays as numbers, others as text."""
    value = msgspec.msgpack.decode(data, ext_hook=_plain)
    if tag in (1, 2):
        return _value(str(value[0]), tuple(value[1]), bytes(value[2]))
    return value


def _value(dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    if math.prod(shape) == 1 and dtype in _CODES:
        return struct.unpack(f"<{_CODES[dtype]}", data)[0]
    return f"{dtype}{list(shape)}"
