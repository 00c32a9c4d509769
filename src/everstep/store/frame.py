"""One frame of a log: a prologue with checksums, a header that says whose bytes follow, and the bytes.

    prologue | header, MessagePack | zeros up to a block | payload | zeros up to a block

Nothing of a frame is believed before its checksum. Frames are whole blocks, so that a log can be written past the page
cache, and so that a good frame behind a bad one is found again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import xxhash

from everstep.errors import NewerFormat, TierFailed
from everstep.image import BLOCK, CHUNK_BYTES, FORMAT, round_up
from everstep.store.tier import Tier
from everstep.types import Frame, Gaps, learnt

MAGIC = b"EVERSLOG"
MAX_FRAME_HEADER_BYTES = 16 << 20
GAPS_FORMAT = 2  # of a frame that has gaps; any other is of the format that everything is
_PROLOGUE = struct.Struct("<8sQQQQ")  # magic, header bytes, payload bytes, synced bytes, checksum of the payload
_SUM = struct.Struct("<Q")
_PROLOGUE_BYTES = _PROLOGUE.size + _SUM.size
_THREADS = 4


class Bad(Exception):
    """Why no good frame is here. `torn`: a crash within an append may leave this."""

    def __init__(self, reason: str, *, torn: bool = False) -> None:
        super().__init__(reason)
        self.torn = torn


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A frame in a file, and where its payload lies."""

    frame: Frame
    begin: int
    offset: int  # of the payload
    length: int
    synced: int  # how much of the file was durable when this frame was written
    checksum: int  # of the payload

    @property
    def end(self) -> int:
        return round_up(self.offset + self.length, BLOCK)


@learnt
class _Format(msgspec.Struct):
    format: int


def format_of(gaps: Gaps) -> int:
    """The format that a frame names: a reader who does not know gaps is to refuse it, and not to call it damaged."""
    return GAPS_FORMAT if gaps else FORMAT


def encode_frame(frame: Frame, parts: Sequence[memoryview], *, synced: int = 0) -> list[memoryview]:
    """A frame as it is appended. `synced`: where its group commit begins in the file."""
    parts = [part.cast("B") for part in parts]
    length = sum(map(len, parts))
    if length != frame.payload_bytes:
        raise ValueError(f"{length} bytes do not fill ranges of {frame.payload_bytes}")
    payload = xxhash.xxh3_64()
    for part in parts:
        payload.update(part)
    header = msgspec.msgpack.encode(frame)
    fields = _PROLOGUE.pack(MAGIC, len(header), length, synced, payload.intdigest())
    head = fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields + header)) + header
    return [
        memoryview(head.ljust(round_up(len(head), BLOCK), b"\0")),
        *parts,
        memoryview(bytes(-length % BLOCK)),
    ]


def read_frame(tier: Tier, name: str, begin: int, size: int) -> Record:
    """The frame that begins here, its payload unchecked. NewerFormat if only a later Everstep knows it; else Bad."""
    start = _read(tier, name, begin, min(BLOCK, size - begin))
    if len(start) < _PROLOGUE_BYTES:
        raise Bad("the file ends within a frame", torn=True)
    magic, header_bytes, payload_bytes, synced, payload_sum = _PROLOGUE.unpack_from(start)
    if magic != MAGIC:
        raise Bad("no frame begins here", torn=True)
    if header_bytes > MAX_FRAME_HEADER_BYTES:
        raise Bad(f"a frame claims a header of {header_bytes} bytes", torn=True)
    head_bytes = _PROLOGUE_BYTES + header_bytes
    head = start if head_bytes <= len(start) else _read(tier, name, begin, head_bytes)
    header = head[_PROLOGUE_BYTES:head_bytes]
    (checksum,) = _SUM.unpack_from(head, _PROLOGUE.size)
    if xxhash.xxh3_64_intdigest(head[: _PROLOGUE.size] + header) != checksum:
        raise Bad("a frame's header does not match its checksum", torn=True)
    record = Record(
        frame=_decode(header, tier, name),
        begin=begin,
        offset=begin + round_up(head_bytes, BLOCK),
        length=payload_bytes,
        synced=synced,
        checksum=payload_sum,
    )
    if record.length != record.frame.payload_bytes:
        raise Bad(f"a frame has {record.length} bytes for ranges of {record.frame.payload_bytes}")
    if synced > begin:
        raise Bad("a frame is not where it was written")
    if record.end > size:
        raise Bad("the file ends within a frame", torn=True)
    return record


def _decode(header: bytes, tier: Tier, name: str) -> Frame:
    """A header whose checksum is right; somebody may have made it so."""
    try:
        version = msgspec.msgpack.decode(header, type=_Format).format
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
        version = None
    if version is None or version > GAPS_FORMAT:
        said = "no format that it says" if version is None else f"format {version}"
        newer = f"{said}, and this Everstep reads up to {GAPS_FORMAT}; upgrade it"
        raise NewerFormat(newer, tier=tier.name, file=name)
    try:
        frame = msgspec.msgpack.decode(header, type=Frame)
        canonical = msgspec.msgpack.encode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise Bad(f"a frame has an unreadable header: {error}") from None
    if canonical != header or frame.format != format_of(frame.gaps):
        raise Bad("a frame's header has fields or spellings that are none of ours")
    return frame


def check_payload(tier: Tier, name: str, record: Record) -> None:
    """Bad if a payload is not the one that was written. Goes through it in chunks: it may be larger than memory."""
    checksum = xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(CHUNK_BYTES, record.length)))
    for at in range(0, record.length, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, record.length - at)]
        if tier.read(name, record.offset + at, chunk) < len(chunk):
            raise Bad("the file ends within a frame", torn=True)
        checksum.update(chunk)
    if checksum.intdigest() != record.checksum:
        raise Bad(f"the bytes of step {record.frame.step} do not match their checksum", torn=True)


def check_payloads(tier: Tier, name: str, records: Sequence[Record]) -> tuple[int, Bad | None]:
    """How many records from the first on have good payloads, and what is wrong with the next."""

    def check(record: Record) -> Bad | None:
        try:
            check_payload(tier, name, record)
        except Bad as bad:
            return bad
        except TierFailed as error:
            return Bad(f"step {record.frame.step} cannot be read: {error}")
        return None

    with ThreadPoolExecutor(_THREADS) as pool:
        for index, bad in enumerate(pool.map(check, records)):
            if bad is not None:
                return index, bad
    return len(records), None


def followed(tier: Tier, name: str, begin: int, size: int) -> bool:
    """Whether, behind a bad frame, there is one that was written when the bad one was already durable."""
    try:
        return any(record.synced > begin for record in _frames_behind(tier, name, begin, size))
    except TierFailed:
        return True  # a crash leaves nothing that cannot be read


def _frames_behind(tier: Tier, name: str, begin: int, size: int) -> Iterator[Record]:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for at in range(begin + BLOCK, size, CHUNK_BYTES):
        got = tier.read(name, at, buffer[: min(CHUNK_BYTES, size - at)])
        for block in range(0, got, BLOCK):
            if buffer[block : block + len(MAGIC)] == MAGIC:
                try:
                    yield read_frame(tier, name, at + block, size)
                except Bad:
                    continue


def _read(tier: Tier, name: str, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    return bytes(memoryview(buffer)[: tier.read(name, offset, memoryview(buffer))])
