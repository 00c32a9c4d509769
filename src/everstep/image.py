"""The bytes of a base: one rank's share of one checkpoint, as a valid safetensors file.

    u64 header length | JSON header, padded with spaces to a multiple of 4096 | tensor data without holes

Tensors lie in order of falling element size, so that each is aligned for its dtype; the last one, EXTRAS, is a run
of bytes that holds everything that is not a tensor and fills the file up to a multiple of 4096. The header's
`__metadata__` says whose image it is and, for tensors that are only a box of a larger one, which box.

Rows are always outermost; below them a tensor may have its dimensions in another order in memory (channels last). It
lies here as it does there, under the shape that it has so, and the metadata has the order of its dimensions.

Knows nothing of torch: dtypes are safetensors' names.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec
import xxhash

from everstep.errors import Damaged, NewerFormat
from everstep.types import ImageInfo, Piece, Place, learnt

FORMAT = 1
ORDERED_FORMAT = 2  # of an image that has such tensors, and of its part manifest
STEPPED_FORMAT = 3  # of a record that says which parts of parameters its rank steps, and of its values
NEWEST_FORMAT = STEPPED_FORMAT
BLOCK = 4096
CHUNK_BYTES = 4 << 20
MAX_HEADER_BYTES = 256 << 20
_MOST_ELEMENTS = 1 << 60  # in any tensor, were none of its sides empty,
_MOST_SIDES = 64
EXTRAS = "everstep.extras"
META = "everstep"

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


class Wanted(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A piece that has no place yet."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    private: bool = False
    order: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


class _Box(msgspec.Struct, frozen=True, gc=False):
    shape: tuple[int, ...]
    start: tuple[int, ...]


@learnt
class _Meta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    info: ImageInfo
    boxes: dict[str, _Box]
    private: frozenset[str]
    orders: dict[str, tuple[int, ...]] = {}


@learnt
class _Tensor(msgspec.Struct, frozen=True, gc=False):
    """Of an entry that is none, nothing is known, and no dtype has that name."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


class _Metadata(msgspec.Struct, frozen=True):
    strings: dict[str, str] = msgspec.field(name="__metadata__")


class ImageLayout(msgspec.Struct, frozen=True):
    """Where everything lies in an image; the same for every step until the state changes its shape."""

    header: bytes  # with its length in front and its padding behind
    pieces: tuple[Piece, ...]  # without EXTRAS
    extras_offset: int  # from the start of the file
    extras_bytes: int
    total_bytes: int

    @property
    def digest(self) -> int:
        return int(xxhash.xxh3_64_intdigest(self.header))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def lay_out(wanted: Iterable[Wanted], info: ImageInfo, extras_capacity: int) -> ImageLayout:
    """Give every piece its place, and make the header that says so."""
    ordered = sorted(wanted, key=lambda w: -ITEM_BYTES[w.dtype])
    pieces: list[Piece] = []
    offset = 0
    for w in ordered:
        length = math.prod(w.extent) * ITEM_BYTES[w.dtype]
        pieces.append(
            Piece(
                name=w.name, dtype=w.dtype, shape=w.shape, start=w.start, extent=w.extent,
                offset=offset, length=length, private=w.private, order=w.order,
            )
        )  # fmt: skip
        offset += length
    orders = {p.name: p.order for p in pieces if p.order is not msgspec.UNSET}
    extras_bytes = round_up(offset + max(extras_capacity, 8), BLOCK) - offset
    least = STEPPED_FORMAT if info.stepped is not None else ORDERED_FORMAT if orders else FORMAT
    meta = _Meta(
        info=msgspec.structs.replace(info, format=max(info.format, least)),
        boxes={p.name: _Box(p.shape, p.start) for p in pieces if not p.whole},
        private=frozenset(p.name for p in pieces if p.private),
        orders=orders,
    )
    table: dict[str, object] = {"__metadata__": {META: msgspec.json.encode(meta, order="deterministic").decode()}}
    for p in pieces:
        table[p.name] = {"dtype": p.dtype, "shape": p.stored, "data_offsets": (p.offset, p.offset + p.length)}
    table[EXTRAS] = {"dtype": "U8", "shape": (extras_bytes,), "data_offsets": (offset, offset + extras_bytes)}
    body = msgspec.json.encode(table)
    padded = round_up(8 + len(body), BLOCK) - 8
    header = struct.pack("<Q", padded) + body.ljust(padded)
    return ImageLayout(
        header=header,
        pieces=tuple(pieces),
        extras_offset=len(header) + offset,
        extras_bytes=extras_bytes,
        total_bytes=len(header) + offset + extras_bytes,
    )


def parse(data: memoryview | bytes, total_bytes: int, *, file: str = "") -> tuple[ImageLayout, ImageInfo]:
    """Read a header that anybody may have written. `data` must hold at least the header."""

    def bad(reason: str) -> Damaged:
        return Damaged(f"not an image of ours: {reason}", file=file)

    if len(data) < 8:
        raise bad("shorter than its own header length")
    (size,) = struct.unpack_from("<Q", data)
    if size > min(MAX_HEADER_BYTES, total_bytes - 8):
        raise bad(f"the header claims {size} bytes")
    if len(data) < 8 + size:
        raise bad("the header is cut off")
    try:
        header = bytes(data[8 : 8 + size])
        meta = msgspec.json.decode(msgspec.json.decode(header, type=_Metadata).strings[META], type=_Meta)
        table = msgspec.json.decode(header, type=dict[str, _Tensor])
        del table["__metadata__"]
    except (msgspec.DecodeError, KeyError, RecursionError, UnicodeDecodeError) as error:
        raise bad(f"unreadable header, {error}") from None
    if meta.info.format > NEWEST_FORMAT:
        newer = f"format {meta.info.format}, and this Everstep reads up to {NEWEST_FORMAT}; upgrade it"
        raise NewerFormat(newer, file=file)
    for name, part in (meta.info.stepped or {}).items():
        if not _lies_inside(part):
            raise bad(f"what it steps is no box of {name}")
    pieces: list[Piece] = []
    place, data_bytes = 0, total_bytes - 8 - size
    for name, tensor in sorted(table.items(), key=lambda item: item[1].data_offsets):
        begin, end = tensor.data_offsets
        item = ITEM_BYTES.get(tensor.dtype)
        if item is None:
            raise bad(f"{name} has unknown dtype {tensor.dtype}")
        extent, order = tensor.shape, meta.orders.get(name, msgspec.UNSET)
        if begin != place or (end - begin) % item or not _has(extent, (end - begin) // item):
            raise bad(f"{name} claims bytes {begin} to {end} for shape {extent}")
        place = end
        if order is not msgspec.UNSET:
            if order[:1] != (0,) or sorted(order) != list(range(len(extent))):
                raise bad(f"{name} has its dimensions in the order {order}")
            extent = tuple(extent[order.index(one)] for one in range(len(extent)))
        shape = extent
        box = meta.boxes.get(name)
        if box is None:
            start = (0,) * len(extent)
        else:
            shape, start = box.shape, box.start
            if len(shape) != len(extent) or len(start) != len(extent):
                raise bad(f"{name} is a box of another rank than its tensor")
            if not _is_bounded(shape) or any(s < 0 or s + e > n for s, e, n in zip(start, extent, shape, strict=True)):
                raise bad(f"{name} is a box that leaves its tensor")
        pieces.append(
            Piece(
                name=name, dtype=tensor.dtype, shape=shape, start=start, extent=extent,
                offset=begin, length=end - begin, private=name in meta.private, order=order,
            )
        )  # fmt: skip
    if place != data_bytes:
        raise bad(f"its tensors fill {place} of {data_bytes} bytes")
    extras = pieces.pop() if pieces else None
    if extras is None or extras.name != EXTRAS or extras.length < 8:
        raise bad("it does not end with its extras")
    layout = ImageLayout(
        header=bytes(data[: 8 + size]),
        pieces=tuple(pieces),
        extras_offset=8 + size + extras.offset,
        extras_bytes=extras.length,
        total_bytes=total_bytes,
    )
    return layout, meta.info


def _has(extent: tuple[int, ...], elements: int) -> bool:
    """Whether a tensor can have these sides, and has so many elements."""
    if len(extent) > _MOST_SIDES or math.prod(extent) != elements:
        return False
    return min(extent, default=0) >= 0 and (elements > 0 or _is_bounded(extent))


def _is_bounded(shape: tuple[int, ...]) -> bool:
    return len(shape) <= _MOST_SIDES and math.prod(max(1, side) for side in shape) <= _MOST_ELEMENTS


def _lies_inside(part: Place) -> bool:
    sides = list(zip(part.start, part.extent, part.shape, strict=False))
    is_box = len(sides) == len(part.start) == len(part.extent) == len(part.shape)
    return is_box and all(s >= 0 and e >= 0 and s + e <= n for s, e, n in sides)


def header_bytes(data: memoryview) -> int:
    """How long the header claims to be, with its length in front; whether that is true is for `parse` to say."""
    (size,) = struct.unpack_from("<Q", data)
    return int(min(8 + size, 8 + MAX_HEADER_BYTES, len(data)))


@lru_cache(maxsize=16)
def parse_cached(header: bytes, total_bytes: int, file: str) -> tuple[ImageLayout, ImageInfo]:
    """Many tensors take long to read, and their header is the same at every step."""
    return parse(header, total_bytes, file=file)


def extras_of(layout: ImageLayout, image: memoryview) -> bytes:
    """The payload of EXTRAS: a length, then that many bytes."""
    (length,) = struct.unpack_from("<Q", image, layout.extras_offset)
    if length > layout.extras_bytes - 8:
        raise Damaged(f"extras claim {length} of {layout.extras_bytes - 8} bytes")
    begin = layout.extras_offset + 8
    return bytes(image[begin : begin + length])


def put_extras(layout: ImageLayout, image: memoryview, told: bytes) -> None:
    """Where `extras_of` finds it; there must be room."""
    struct.pack_into("<Q", image, layout.extras_offset, len(told))
    begin = layout.extras_offset + 8
    image[begin : begin + len(told)] = told
