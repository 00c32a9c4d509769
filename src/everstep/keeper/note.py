"""A note beside the keeper's socket, private to this user: who the other nodes are, and how to ask them."""

from __future__ import annotations

import os

import msgspec

from everstep.keeper.protocol import Member, find_runtime_folder, runtime_folder

_NOTE = "fleet"


class FleetNote(msgspec.Struct, frozen=True, kw_only=True):
    """For readers on this node."""

    members: tuple[Member, ...]
    secret: bytes
    encrypt: bool


def write_note(run: str, note: FleetNote) -> None:
    path = runtime_folder(run) / _NOTE
    temporary = path.with_name(f".{_NOTE}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.msgpack.encode(note))
    os.replace(temporary, path)


def read_note(run: str) -> FleetNote | None:
    """None if there is no keeper here that knows others."""
    try:
        return msgspec.msgpack.decode((find_runtime_folder(run) / _NOTE).read_bytes(), type=FleetNote)
    except (OSError, msgspec.DecodeError):
        return None


def forget_note(run: str) -> None:
    (find_runtime_folder(run) / _NOTE).unlink(missing_ok=True)
