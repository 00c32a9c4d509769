"""The wish to end a run, as a record in its directory. Unlike a blob it is replaced: the last word counts."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from everstep.store.disk import DiskTier
from everstep.store.manifest import encode, read_record
from everstep.types import HaltRecord

RECORD = "halt.json"


def read(directory: Path) -> HaltRecord | None:
    """What was asked for, if anything. Damaged if it cannot be read."""
    try:
        return read_record(DiskTier(directory), RECORD, HaltRecord)
    except FileNotFoundError:
        return None


def write(directory: Path, halt: HaltRecord) -> None:
    """All or nothing: a reader finds the old record or the new one."""
    temporary = directory / f".tmp-{uuid.uuid4().hex[:12]}-{RECORD}"
    try:
        with open(temporary, "xb") as file:
            file.write(encode(halt))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / RECORD)
    finally:
        temporary.unlink(missing_ok=True)


def clear(directory: Path) -> None:
    (directory / RECORD).unlink(missing_ok=True)


def version(directory: Path) -> tuple[int, ...] | None:
    """Another value whenever the record is another; None if there is none."""
    try:
        seen = (directory / RECORD).stat()
    except OSError:
        return None  # also a file system that does not answer: the next look will tell
    return seen.st_ino, seen.st_mtime_ns, seen.st_size
