"""Checkpoints of other tools, as trees of tensors and plain values: torch.save, safetensors, folders of Hugging Face.

Nothing of a file is executed: torch.load is called with weights_only=True, and in no other way. Tensors are mapped, not
read, where the format allows, and copied one by one to where they are wanted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from everstep.errors import BadConfig, Damaged, NothingToRestore
from everstep.integrations import dcp_files
from everstep.integrations.given import Given

_INDEXED = {
    "model.safetensors.index.json": "safetensors",
    "model.safetensors": "safetensors",
    "pytorch_model.bin.index.json": "torch",
    "pytorch_model.bin": "torch",
}  # in this order: those that hold nothing but tensors are preferred
_WRITTEN_BY_TORCH = (b"PK\x03\x04", b"\x80")  # a zip file, or the pickle that it wrote before
_MOST_ENTRIES = 1 << 22  # of a file: a few bytes can name each other a billion times


class _HuggingFaceIndex(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class Foreign:
    kind: str  # for people
    tree: dict[str, Any]  # of dicts, lists, values and `Given`


def read(source: Path) -> Foreign:
    """Whatever it is. NothingToRestore if it is not there, BadConfig if it is none of these."""
    if source.is_dir():
        return _folder(source)
    if not source.is_file():
        raise NothingToRestore(f"{source} is not there")
    with source.open("rb") as file:
        start = file.read(16)
    if start[8:9] == b"{":
        return Foreign("a safetensors file", _safetensors(source))
    return Foreign("a torch.save file", _torch(source))


def _folder(source: Path) -> Foreign:
    if (source / dcp_files.TABLE).is_file():
        return Foreign("a DCP directory", dcp_files.read(source))
    for name, kind in _INDEXED.items():
        if (source / name).is_file():
            one = _safetensors if kind == "safetensors" else _torch
            tree = _shards(source / name, one) if name.endswith(".json") else one(source / name)
            return Foreign(f"a model folder of Hugging Face ({kind})", tree)
    known = ", ".join((dcp_files.TABLE, *_INDEXED))
    raise BadConfig(f"{source} has none of {known}: it is neither a DCP directory nor a model folder")


def _shards(index: Path, one: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    try:
        where = msgspec.json.decode(index.read_bytes(), type=_HuggingFaceIndex).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"unreadable index: {error}", file=str(index)) from None
    tree: dict[str, Any] = {}
    for file in sorted(set(where.values())):
        if not re.fullmatch(r"[\w][\w.-]*", file):
            raise Damaged(f"the index names {file!r}, which is no file beside it", file=str(index))
        if not (index.parent / file).is_file():
            raise Damaged(f"{file} is missing, which the index names", file=str(index))
        held = one(index.parent / file)
        tree |= {name: held[name] for name in where if where[name] == file and name in held}
    missing = [name for name in where if name not in tree]
    if missing:
        raise Damaged(f"{missing[0]} is not in {where[missing[0]]}, as the index says", file=str(index))
    return tree


def _safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return {name: Given.of(tensor) for name, tensor in load_file(path).items()}
    except (SafetensorError, KeyError, ValueError) as error:
        raise Damaged(f"not a whole safetensors file: {error}", file=str(path)) from None


def _torch(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        start = file.read(4)
    if not start.startswith(_WRITTEN_BY_TORCH):
        raise Damaged("neither safetensors nor what torch.save writes; import takes no other files", file=str(path))
    try:
        loaded = load_weights(path)
    except Exception as error:  # pickle of any kind, or zip: torch has no word of its own for each
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise Damaged(f"torch.load(weights_only=True) refuses it: {reason}", file=str(path)) from None
    if not isinstance(loaded, Mapping):
        raise BadConfig(f"{path} holds a {type(loaded).__name__}, and not a state_dict or a dict of them")
    try:
        tree: dict[str, Any] = _given(loaded, count())
    except RecursionError:
        raise Damaged("it is nested too deeply, or holds itself", file=str(path)) from None
    return tree


def load_weights(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # what torch wrote before it used zip files cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True)


def _given(value: Any, counted: Iterator[int]) -> Any:
    """Tensors that are more or less than numbers in memory stay what they are; nobody takes them."""
    if next(counted) > _MOST_ENTRIES:
        raise Damaged(f"it has more than {_MOST_ENTRIES} entries: does it hold itself?")
    if isinstance(value, Tensor):
        is_plain = value.layout is torch.strided and not value.is_meta and not value.is_nested
        return Given.of(value) if is_plain else value
    if isinstance(value, Mapping):
        return {key: _given(one, counted) for key, one in value.items()}
    return [_given(one, counted) for one in value] if isinstance(value, list) else value
