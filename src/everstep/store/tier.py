"""Where bytes can live.

A tier keeps named, immutable blobs. It promises: a put is all or nothing, also for a reader in another process and
after a crash at any instruction; a name never changes its content; a listed blob is complete. It does not know what
the bytes mean. `everstep.testing.check_tier` holds any implementation to this.

A blob that is appended to instead grows: what one append brought stays as it is, and a crash can only leave a torn end
behind it, so its readers check what they find. It has one writer. Not every medium can do that: traits say so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from everstep.store.blocks import room_for
from everstep.types import Room, Traits

NAME = re.compile(r"(?:[a-z][a-z0-9-]*/)?[a-z][a-z0-9-]*(?:\.[a-z0-9-]+)?")  # what a blob may be called


Passing = Callable[[int], None]  # called with the bytes of every chunk of a put, before it is written; it may wait
Arrived = Callable[[int, memoryview], None]  # called with every chunk of a get, and where it begins, once it is there


def freely(size_bytes: int) -> None:
    """As fast as the medium takes them."""


def unseen(offset: int, chunk: memoryview) -> None:
    """Nobody looks at it before all is there."""


class Tier(Protocol):
    name: str
    traits: Traits
    before: Callable[[str], None]  # called before every operation on the medium; tests kill here

    def put(self, name: str, data: memoryview, passing: Passing = freely) -> tuple[int, ...]:
        """Store a blob under a new name and return the checksums of its chunks. FileExistsError if it is there.

        What `passing` raises ends the put, of which nothing is left then.
        """

    def append(self, name: str, parts: Sequence[memoryview]) -> None:
        """Add bytes at the end of a growing blob, made if need be, and force them onto the medium; not all or nothing.

        An append that raises leaves the blob as it was, as far as the medium lets it. A tier whose traits say that it
        does not append makes a blob, all or nothing, and raises TierFailed if it is there.
        """

    def cut(self, name: str, length: int) -> None:
        """Shorten a growing blob, durably, unless it is as short. FileNotFoundError if it is not there.

        A tier that does not append raises TierFailed instead of shortening.
        """

    def get(self, name: str, *, room: Room = room_for, arrived: Arrived = unseen) -> memoryview:
        """All of a blob, in memory of its own. FileNotFoundError if it is not there.

        `room` makes that memory. `arrived` may be called by several threads at once, in any order. What it raises
        ends the get.
        """

    def read(self, name: str, offset: int, into: memoryview) -> int:
        """Bytes of a blob from an offset on; returns how many there were. FileNotFoundError if it is not there."""

    def view(self, name: str) -> memoryview:
        """All of a blob, read only, loaded where it is looked at. FileNotFoundError if it is not there."""

    def size(self, name: str) -> int:
        """Bytes of a blob. FileNotFoundError if it is not there."""

    def names(self, folder: str = "") -> list[str]:
        """The complete blobs directly in a folder ('' is the top), sorted."""

    def folders(self) -> list[str]:
        """The folders at the top, sorted."""

    def delete(self, name: str) -> None:
        """Remove a blob; nothing happens if it is not there."""

    def delete_folder(self, folder: str) -> None:
        """Remove a folder and all that is in it, complete or not."""

    def rename_folder(self, folder: str, to: str) -> None:
        """Give a folder another name: at once, or, where the medium cannot, in steps that list nothing incomplete."""

    def sweep(self, age_s: float) -> int:
        """Remove what crashed writers left behind that is older than this; returns how many."""

    def free_bytes(self) -> int:
        """Bytes that can still be written."""
