"""Where bytes can live.

A tier keeps named, immutable blobs. It promises: a put is all or nothing, also for a reader in another process and
after a crash at any instruction; a name never changes its content; a listed blob is complete. It does not know what
the bytes mean. `everstep.testing.check_tier` holds any implementation to this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from everstep.types import Traits


class Tier(Protocol):
    name: str
    traits: Traits
    before: Callable[[str], None]  # called before every operation on the medium; tests kill here

    def put(self, name: str, data: memoryview) -> tuple[int, ...]:
        """Store a blob under a new name and return the checksums of its chunks. FileExistsError if it is there."""

    def get(self, name: str) -> memoryview:
        """All of a blob, in memory of its own. FileNotFoundError if it is not there."""

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
        """Give a folder another name, at once."""

    def sweep(self, age_s: float) -> int:
        """Remove what crashed writers left behind that is older than this; returns how many."""

    def free_bytes(self) -> int:
        """Bytes that can still be written."""
