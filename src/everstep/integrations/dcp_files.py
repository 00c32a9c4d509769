"""A directory as torch.distributed.checkpoint writes it itself: its table of contents, and what that names.

The table is a pickle, which is read as data and never loaded; each entry is a torch.save of its own, loaded with
weights_only=True.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everstep.errors import Damaged
from everstep.integrations import inert
from everstep.integrations.given import Given
from everstep.integrations.inert import Named, Thing
from everstep.store.manifest import uncovered
from everstep.types import Piece

TABLE = ".metadata"
_MAX_TABLE_BYTES = 1 << 30
_MOST_ITEMS = 1 << 20  # of a list


@dataclass(frozen=True, slots=True)
class _Place:
    file: str
    offset: int
    length: int


def read(source: Path) -> dict[str, Any]:
    """Its state_dict, with tensors to be got one by one. Damaged if it is not whole."""
    path = source / TABLE
    if path.stat().st_size > _MAX_TABLE_BYTES:
        raise Damaged("a table of contents of more than a gigabyte", file=str(path))
    try:
        return _tree(source, inert.read(path.read_bytes(), file=str(path)))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"not a table of contents of DCP: {error!r}", file=str(path)) from None


def _tree(source: Path, table: Thing) -> dict[str, Any]:
    _must_be(table, "Metadata")
    contents, paths = table.fields["state_dict_metadata"], table.fields.get("planner_data") or {}
    places = dict(_places(table.fields["storage_data"]))
    tree: dict[str, Any] = {}
    for name, entry in contents.items():
        if entry.kind.name == "BytesStorageMetadata":
            value = _loaded(source, places[name, None], name)
        else:
            _must_be(entry, "TensorStorageMetadata")
            value = _tensor(source, name, entry.fields, places)
        set_at(tree, paths.get(name, (name,)), value)
    return tree


def _must_be(thing: Any, name: str) -> None:
    if not isinstance(thing, Thing) or thing.kind != Named("torch.distributed.checkpoint.metadata", name):
        found = thing.kind.name if isinstance(thing, Thing) else type(thing).__name__
        raise ValueError(f"a {found} where a {name} should be")


def _places(table: dict[Thing, Thing]) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], _Place]]:
    for index, info in table.items():
        _must_be(index, "MetadataIndex")
        where, file, fqn = info.fields, info.fields["relative_path"], index.fields["fqn"]
        if not isinstance(fqn, str):
            raise ValueError(f"a {type(fqn).__name__} where a name should be")
        if not re.fullmatch(r"[\w][\w.-]*", file):
            raise ValueError(f"{file!r} is no file of the directory")
        if where.get("transform_descriptors"):
            raise ValueError(f"{fqn} was transformed before it was written")
        offset = index.fields.get("offset")
        yield (fqn, None if offset is None else _size(offset)), _Place(file, int(where["offset"]), int(where["length"]))


def _size(thing: Thing) -> tuple[int, ...]:
    """A torch.Size: made of one tuple."""
    found = tuple(int(one) for one in thing.made_of[0])
    if any(one < 0 for one in found):
        raise ValueError(f"a size of {found}")
    return found


def _tensor(source: Path, name: str, entry: dict[str, Any], places: dict[Any, _Place]) -> Given:
    named = entry["properties"].fields[0]
    dtype, shape = getattr(torch, named.name, None), _size(entry["size"])
    if named.module != "torch" or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has dtype {named}")
    boxes = [(_size(chunk.fields["offsets"]), _size(chunk.fields["sizes"])) for chunk in entry["chunks"]]
    if any(s + e > n for start, extent in boxes for s, e, n in zip(start, extent, shape, strict=True)):
        raise ValueError(f"a part of {name} is outside of it")
    missing = uncovered([tuple(_piece(name, shape, start, extent) for start, extent in boxes)])
    if missing is not None or (not boxes and all(shape)):
        raise ValueError(missing or f"nothing of {name} is there")
    parts = [(start, extent, places[name, start]) for start, extent in boxes]

    def copy_to(target: Tensor) -> None:
        for start, extent, place in parts:
            part = _loaded(source, place, name)
            if not isinstance(part, Tensor) or part.dtype != dtype or tuple(part.shape) != extent:
                raise Damaged(f"{name} at {start} is not the tensor that the table names", file=str(source))
            target[tuple(slice(s, s + e) for s, e in zip(start, extent, strict=True))].copy_(part)

    return Given(dtype, shape, copy_to)


def _piece(name: str, shape: tuple[int, ...], start: tuple[int, ...], extent: tuple[int, ...]) -> Piece:
    return Piece(name=name, dtype="", shape=shape, start=start, extent=extent, offset=0, length=0)


def _loaded(source: Path, place: _Place, name: str) -> Any:
    path = source / place.file
    try:
        with path.open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}", file=str(path)) from None
    except Exception as error:  # pickle of any kind, or zip: torch has no word of its own for each
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise Damaged(f"{name}: torch.load(weights_only=True) refuses it: {reason}", file=str(path)) from None


def set_at(tree: dict[str, Any], path: Sequence[str | int], value: Any) -> None:
    """Put a value where DCP found it: words are keys of dicts, numbers are places in lists."""
    holder: Any = tree
    for key, following in pairwise(path):
        _make_room(holder, key, [] if isinstance(following, int) else {})
        holder = holder[key]
    _make_room(holder, path[-1], None)
    if holder[path[-1]] is not None:
        raise ValueError(f"two entries have the place {path}")
    holder[path[-1]] = value


def _make_room(holder: Any, key: str | int, empty: Any) -> None:
    if isinstance(key, str):
        holder.setdefault(key, empty)
        return
    if not 0 <= key < _MOST_ITEMS:
        raise ValueError(f"a list has no place {key}")
    holder.extend([None] * (key + 1 - len(holder)))
    holder[key] = empty if holder[key] is None else holder[key]
