"""What DCP must know of a checkpoint to load it, kept without pickle: in the manifests, and in a note in each image.

The manifests name every box of every tensor. The note has the rest: where in the state_dict each name stands, and what
DCP believes of its tensors. Values that are no tensors lie beside it, as plain data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem

from everstep import image
from everstep.capture import extras
from everstep.capture.layout import TORCH_DTYPES
from everstep.errors import Damaged, Unstorable
from everstep.image import ImageLayout
from everstep.types import Piece, learnt

NOTE, VALUES = "dcp", "values"  # keys of an image's extras
Path = tuple[str | int, ...]


@learnt
class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank's part."""

    paths: dict[str, Path] | None  # None: the state_dict was not flattened
    requires_grad: tuple[str, ...]
    pinned: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where something lies: in which rank's part, and which piece of it, or the value itself."""

    rank: int
    piece: Piece | None
    value: Any = None


@dataclass(frozen=True, slots=True)
class Contents:
    """What one rank's part holds: boxes of tensors, and values by their names."""

    rank: int
    pieces: tuple[Piece, ...]
    note: Note
    values: dict[str, Any]


def note_of(items: Sequence[WriteItem], paths: object) -> Note:
    """What goes into the extras. Unstorable if there is something that could not be given back, by its name."""
    tensors = {item.index.fqn: item.tensor_data.properties for item in items if item.tensor_data is not None}
    for name, properties in tensors.items():
        if properties.layout is not torch.strided:
            raise Unstorable(name, properties.layout, f"its layout is {properties.layout}")
        if properties.memory_format is not torch.contiguous_format:
            raise Unstorable(name, properties.memory_format, f"its memory format is {properties.memory_format}")
    note = {
        "paths": paths,
        "requires_grad": [name for name, properties in tensors.items() if properties.requires_grad],
        "pinned": [name for name, properties in tensors.items() if properties.pin_memory],
    }
    try:
        return msgspec.convert(note, Note)
    except (msgspec.ValidationError, TypeError) as error:
        raise Unstorable("the planner's data", paths, str(error)) from None


def contents_of(layout: ImageLayout, data: memoryview, step: int, rank: int) -> Contents:
    """What an image holds. Damaged if that cannot be told; so it is of a base that is none of DCP's."""
    try:
        tree = extras.decode(image.extras_of(layout, data))
    except Damaged as error:  # whoever strikes out a part must know whose it is
        raise Damaged(error.reason, step=step, rank=rank) from None
    if not isinstance(tree, dict) or NOTE not in tree:
        raise Damaged("it was not written through torch.distributed.checkpoint", step=step, rank=rank)
    try:
        return Contents(rank, layout.pieces, msgspec.convert(tree[NOTE], Note), dict(tree[VALUES]))
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise Damaged(f"its note for DCP is not readable: {error!r}", step=step, rank=rank) from None


def described(parts: Iterable[Contents]) -> Metadata:
    """The same as DCP has it. Its storage_data says where everything is."""
    contents: dict[str, Any] = {}
    places: dict[MetadataIndex, Place] = {}
    paths: dict[str, Path] = {}
    is_flattened = False
    for part in parts:
        is_flattened |= part.note.paths is not None
        paths |= part.note.paths or {}
        for piece in part.pieces:
            entry = contents.setdefault(piece.name, _entry(piece, part.note))
            entry.chunks.append(ChunkStorageMetadata(torch.Size(piece.start), torch.Size(piece.extent)))
            places[MetadataIndex(piece.name, piece.start)] = Place(part.rank, piece)
        for name, value in part.values.items():
            contents[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = Place(part.rank, None, value)
    planner_data = paths if is_flattened else None
    return Metadata(state_dict_metadata=contents, planner_data=planner_data, storage_data=places)


def _entry(piece: Piece, note: Note) -> TensorStorageMetadata:
    properties = TensorProperties(
        dtype=TORCH_DTYPES[piece.dtype], requires_grad=piece.name in note.requires_grad,
        pin_memory=piece.name in note.pinned,
    )  # fmt: skip
    return TensorStorageMetadata(properties, torch.Size(piece.shape), [])


def difference(kept: Metadata, wanted: Metadata) -> str | None:
    """The name of something that would not come back as DCP has it; None if all of it would."""
    for name in kept.state_dict_metadata.keys() | wanted.state_dict_metadata.keys():
        if _comparable(kept.state_dict_metadata.get(name)) != _comparable(wanted.state_dict_metadata.get(name)):
            return name
    return None if kept.planner_data == wanted.planner_data else "the planner's data"


def _comparable(entry: Any) -> object:
    if not isinstance(entry, TensorStorageMetadata):
        return type(entry)
    boxes = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
    return entry.properties.dtype, tuple(entry.size), boxes
