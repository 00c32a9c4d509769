"""A disk that refuses, for tests that want one."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import everstep
from everstep.errors import EverstepError


class Refusal:
    """Makes a directory refuse in this process, as a full or read-only disk does; the events file included."""

    def __init__(self, directory: Path, number: int, after_bytes: int = 0) -> None:
        self.directory, self.number, self.left = os.fspath(directory), number, after_bytes
        self.on = False
        self._open, self._pwrite, self._write = os.open, os.pwrite, os.write
        os.open, os.pwrite, os.write = self.open, self.pwrite, self.write  # type: ignore[assignment]

    def refuse(self, path: str, size: int) -> None:
        if self.on and path.startswith(self.directory):
            self.left -= size
            if self.left < 0:
                raise OSError(self.number, os.strerror(self.number))

    def open(self, path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT and self.number == errno.EROFS:
            self.refuse(os.fspath(path), 1)
        return self._open(path, flags, *rest, **more)

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        self.refuse(os.readlink(f"/proc/self/fd/{descriptor}"), len(data))
        return self._pwrite(descriptor, data, offset)

    def write(self, descriptor: int, data: Any) -> int:
        self.refuse(os.readlink(f"/proc/self/fd/{descriptor}"), len(data))
        return self._write(descriptor, data)


def wait_through(run: everstep.Run, seconds: float = 60.0) -> None:
    """Wait until the disk, which no longer refuses, has the step. What it refused before may still be complained of."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            assert run.wait("durable", timeout=seconds)
            return
        except EverstepError:
            assert time.monotonic() < deadline, "it is refused for ever"
