"""The records between a base and a later step: fetched, checked, and read as what the optimizers consumed.

Records of one step come from every rank that was there, each with its rows of the gradients. A chain knows where a
row lies, whoever recorded it, and what stood beside the gradients at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from everstep.capture import compress
from everstep.capture.compressor import Compressor
from everstep.capture.extras import decode
from everstep.capture.form import CALL, DIGEST, GRADIENT, PACKED
from everstep.capture.layout import TORCH_DTYPES
from everstep.capture.update import Consumed, recorded_call
from everstep.errors import Damaged, EverstepError
from everstep.recover.assemble import Checkpoint
from everstep.recover.needs import overlap
from everstep.recover.shelf import RecordImage
from everstep.types import Holding, Piece, Place, Plan, Records


class Reader(Protocol):
    """Whoever has records and values: this node, or all of them."""

    def record(self, records: Records, step: int, *, copy: bool = False) -> RecordImage: ...

    def values(self, holding: Holding, *, copy: bool = False) -> RecordImage: ...


@dataclass(slots=True)
class Chain:
    """What was consumed after a base, step by step, and the values that the last step left."""

    consumed: list[Consumed]
    last: Checkpoint
    _images: dict[int, dict[int, RecordImage]]  # step -> rank

    @property
    def stepped(self) -> dict[int, dict[str, Place] | None]:
        """What the optimizers of each old rank stepped; None: everything."""
        return {rank: image.info.stepped for rank, image in sorted(self._images[self.last.step].items())}

    @property
    def had_own(self) -> bool:
        """Whether parameters were trained that are each rank's own."""
        image = next(iter(self._images[self.last.step].values()))
        return any(piece.private and piece.name.startswith(GRADIENT) for piece in image.layout.pieces)

    def consumed_by(self, rank: int) -> list[Consumed]:
        """The same as an old rank has seen it."""
        return _all_consumed(self._images, rank)


class BadRecord(Exception):
    def __init__(self, what: Records | Holding, reason: str) -> None:
        super().__init__(reason)
        self.what, self.reason = what, reason


def fetch_chain(sources: Reader, plan: Plan, rank: int, *, copy: bool = False) -> Chain | None:
    """All records of a plan, every byte of them checked; None if it has none. BadRecord at the first damaged one."""
    if not plan.records or plan.step is None or plan.base is None:
        return None
    images, values = _fetch_all(sources, plan, copy)
    last = _last(plan.step, images[plan.step], rank)
    own = rank if rank in values else 0
    for one, value in values.items():
        for piece in value.layout.pieces:
            if not piece.private or one == own:
                last.pieces.setdefault(piece.name, []).append((piece, value.tensor(piece)))
    return Chain(_all_consumed(images, rank), last, images)


def _all_consumed(images: dict[int, dict[int, RecordImage]], rank: int) -> list[Consumed]:
    maps: dict[tuple[int, ...], _Map] = {}
    consumed = []
    for step, found in sorted(images.items()):
        key = tuple(found[one].layout.digest for one in sorted(found))
        if key not in maps:
            maps[key] = _Map(found, rank)
        consumed.append(_consumed(step, found, maps[key], rank))
    return consumed


def _fetch_all(
    sources: Reader, plan: Plan, copy: bool
) -> tuple[dict[int, dict[int, RecordImage]], dict[int, RecordImage]]:
    """Records by step and rank, and values by rank. All are asked for also after one is bad: ranks fetch in step."""
    images: dict[int, dict[int, RecordImage]] = {}
    values: dict[int, RecordImage] = {}
    first_bad: BadRecord | None = None
    for records in plan.records:
        for step in range(records.first, records.last + 1):
            try:
                images.setdefault(step, {})[records.rank] = sources.record(records, step, copy=copy).make_whole()
            except (EverstepError, OSError) as error:
                bad = msgspec.structs.replace(records, first=step, last=step)
                first_bad = first_bad or BadRecord(bad, str(error))
    for holding in plan.values:
        try:
            values[holding.rank] = sources.values(holding, copy=copy)
        except (EverstepError, OSError) as error:
            first_bad = first_bad or BadRecord(holding, str(error))
    if first_bad is not None:
        raise first_bad
    return images, values


class _Map:
    """In which rank's image the parts of each gradient lie; the same for all steps of one layout."""

    def __init__(self, images: dict[int, RecordImage], rank: int) -> None:
        own = rank if rank in images else 0
        self.stepped = images[own].info.stepped
        self.pieces: dict[str, list[tuple[int, Piece]]] = {}
        for one, image in sorted(images.items()):
            for piece in image.layout.pieces:
                if piece.name.startswith(GRADIENT) and (one == own or not piece.private):
                    self.pieces.setdefault(piece.name.removeprefix(GRADIENT), []).append((one, piece))
        self.packed = _packed(images)
        self.own = {name for name, pieces in self.pieces.items() if any(one == own for one, _ in pieces)}

    def gradient(self, images: dict[int, RecordImage], name: str, first: int, rows: int) -> Tensor:
        """Some rows of what a rank steps of a parameter."""
        pieces = self.pieces[name]
        start, extent = (0,) * len(pieces[0][1].shape), pieces[0][1].shape
        if self.stepped is not None:
            start, extent = self.stepped[name].start, self.stepped[name].extent
        if not extent:
            return images[pieces[0][0]].tensor(pieces[0][1])
        start, extent = (start[0] + first, *start[1:]), (rows, *extent[1:])
        parts = []
        for one, piece in pieces:
            found = overlap(piece, start, extent)
            if found is not None:
                parts.append((images[one].tensor(piece)[found[0]], found[1]))
        if len(parts) == 1 and parts[0][0].shape == extent:
            return parts[0][0]
        box = torch.empty(extent, dtype=TORCH_DTYPES[pieces[0][1].dtype])
        filled = 0
        for part, in_box in parts:
            box[in_box] = part
            filled += part.numel()
        if filled != box.numel():
            raise Damaged(f"{filled} of {box.numel()} elements of the gradient of {name} are in the records")
        return box


@dataclass(slots=True)
class _Buffer:
    """Gradients that a compressor packed as one. On a device all of them are unpacked at once, when the first is."""

    fields: dict[str, list[tuple[int, Piece]]]  # name -> parts, by rank
    kind: type[Compressor]
    like: Tensor  # to unpack into
    unpacked: dict[int, RecordImage] | None = None  # what lies there

    def elements(self, images: dict[int, RecordImage], first: int, count: int) -> Tensor:
        if not self.like.is_cuda:
            return self.kind.unpack_rows(self._packed(images), first, count, self.like)
        if self.unpacked is not images:
            packed = self._packed(images)
            self.kind.unpack({name: part.to(self.like.device) for name, part in packed.items()}, self.like)
            self.unpacked = images
        return self.like[first : first + count].clone()  # another thread may unpack another step there meanwhile

    def _packed(self, images: dict[int, RecordImage]) -> dict[str, Tensor]:
        return {
            name: torch.cat([images[one].tensor(piece) for one, piece in parts])
            if len(parts) > 1
            else images[parts[0][0]].tensor(parts[0][1])
            for name, parts in self.fields.items()
        }


@dataclass(frozen=True, slots=True)
class _Packed:
    """Where a parameter's gradient lies in such a buffer."""

    buffer: _Buffer
    offset: int
    shape: tuple[int, ...]

    def rows(self, images: dict[int, RecordImage], first: int, rows: int) -> Tensor:
        row = math.prod(self.shape[1:])
        found = self.buffer.elements(images, self.offset + first * row, rows * row)
        return found.view(rows, *self.shape[1:]) if self.shape else found.view(())


def _packed(images: dict[int, RecordImage]) -> dict[str, _Packed]:
    codec = images[0].info.codec
    if codec is None:
        return {}
    kind = getattr(compress, codec.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, compress.Compressor)):
        raise Damaged(f"gradients are packed by {codec.kind!r}, which this Everstep does not know")
    found: dict[str, _Packed] = {}
    for key, buffer in codec.buffers.items():
        fields: dict[str, list[tuple[int, Piece]]] = {}
        prefix = f"{PACKED}{key}."
        for one, image in sorted(images.items()):
            for piece in image.layout.pieces:
                if piece.name.startswith(prefix):
                    fields.setdefault(piece.name.removeprefix(prefix), []).append((one, piece))
        # A tool that only reads does without a device; but what PowerSGD multiplied there has the bits of a device.
        on_device = torch.cuda.is_initialized() or (kind is compress.PowerSGD and torch.cuda.is_available())
        device = "cuda" if buffer.device == "cuda" and on_device else "cpu"
        size = sum(math.prod(shape) for _, shape in buffer.members)
        whole = _Buffer(fields, kind, torch.empty(size, dtype=TORCH_DTYPES[buffer.dtype], device=device))
        offset = 0
        for name, shape in buffer.members:
            found[name] = _Packed(whole, offset, shape)
            offset += math.prod(shape)
    return found


def _consumed(step: int, images: dict[int, RecordImage], map: _Map, rank: int) -> Consumed:
    own = rank if rank in images else 0
    trees = {one: _tree(image, step) for one, image in images.items()}

    def gradient(name: str, first: int, rows: int) -> Tensor:
        if name in map.packed:
            return map.packed[name].rows(images, first, rows)
        return map.gradient(images, name, first, rows)

    calls = []
    for call in trees[own]["calls"]:
        index = call["optimizer"]
        others = {
            name for tree in trees.values() for c in tree["calls"] if c["optimizer"] == index for name in c["absent"]
        }
        absent = {*call["absent"], *(others - map.own)}  # what a rank has recorded itself was there, or it says so
        calls.append(recorded_call(call, images[own].named(f"{CALL}{index}."), absent))
    return Consumed(step=step, calls=calls, gradient=gradient, digest=_digest(images, trees, own))


def _digest(
    images: dict[int, RecordImage], trees: dict[int, dict[str, Any]], own: int
) -> tuple[int, int] | None:  # fmt: skip
    """What is common adds up over the ranks; what is private is this rank's own."""
    if not all(tree["digested"] for tree in trees.values()):
        return None
    pairs = {one: image.named(DIGEST)[""].tolist() for one, image in images.items()}
    return sum(common for common, _ in pairs.values()) % 2**64, pairs[own][1] % 2**64


def _tree(image: RecordImage, step: int) -> dict[str, Any]:
    tree = decode(image.extras())
    if not isinstance(tree, dict) or tree.get("step") != step:
        raise Damaged(f"the extras are not of step {step}", step=step, rank=image.info.rank)
    return tree


def _last(step: int, images: dict[int, RecordImage], rank: int) -> Checkpoint:
    own = rank if rank in images else 0
    image = images[own]
    found = Checkpoint(
        step=step, world=image.info.world, info=image.info, extras=_tree(image, step), own=rank in images
    )
    found.positions = [_tree(images[one], step).get("position") for one in sorted(images)]
    for one, image in sorted(images.items()):
        for piece in image.layout.pieces:
            is_value = not piece.name.startswith((GRADIENT, PACKED, CALL, DIGEST))
            if is_value and (one == own or not piece.private):
                found.pieces.setdefault(piece.name, []).append((piece, image.tensor(piece)))
    return found
