"""Notes that are private to this user: who the other nodes are, and how to ask them.

One lies beside the keeper's socket, for readers on this node. Another lies in the directory of a live run, for whoever
stands by on a node that the run is not on.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from everstep.keeper.protocol import Charter, Member, find_runtime_folder, runtime_folder

_NOTE = "fleet"
_CHARTER = "council"


class FleetNote(msgspec.Struct, frozen=True, kw_only=True):
    """For readers on this node."""

    members: tuple[Member, ...]
    secret: bytes
    encrypt: bool


def write_note(run: str, note: FleetNote) -> None:
    _write(runtime_folder(run) / _NOTE, msgspec.msgpack.encode(note))


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    os.replace(temporary, path)


def read_note(run: str) -> FleetNote | None:
    """None if there is no keeper here that knows others."""
    try:
        return msgspec.msgpack.decode((find_runtime_folder(run) / _NOTE).read_bytes(), type=FleetNote)
    except (OSError, msgspec.DecodeError):
        return None


def forget_note(run: str) -> None:
    (find_runtime_folder(run) / _NOTE).unlink(missing_ok=True)


def write_charter(directory: Path, charter: Charter) -> None:
    """By the keeper that has the chair, whenever the council changes."""
    _write(directory / _CHARTER, msgspec.msgpack.encode(charter))


def read_charter(directory: Path) -> Charter | None:
    """None if the run in this directory is not a live one of several nodes."""
    try:
        return msgspec.msgpack.decode((directory / _CHARTER).read_bytes(), type=Charter)
    except (OSError, msgspec.DecodeError):
        return None


def forget_charter(directory: Path) -> None:
    (directory / _CHARTER).unlink(missing_ok=True)
