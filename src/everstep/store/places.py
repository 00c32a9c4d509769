"""Where the bytes of one run lie, seen from one node: written down in its directory, so that whoever opens it knows.

`tiers.json` names the paths that guard() was given. A run without it has its directory for a disk, and nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from everstep.capture.host import arena_root
from everstep.errors import Damaged, EverstepError, NewerFormat, NothingToRestore
from everstep.image import FORMAT
from everstep.store.disk import DiskTier
from everstep.store.manifest import RUN_RECORD, encode, put_record, read_record
from everstep.store.memory import MemoryTier
from everstep.store.tier import Tier
from everstep.tiers import Tiers
from everstep.types import Source, Survives, TiersRecord

RECORD = "tiers.json"
_GUESTS = "guests"  # beside a run's arenas: what other nodes entrusted to this one


class Places(msgspec.Struct, frozen=True, kw_only=True):
    directory: str
    memory: str | None = None
    disk: str = ""  # empty: the directory itself
    shared: str = ""
    objects: str = ""

    @classmethod
    def chosen(cls, directory: Path, tiers: Tiers) -> Places:
        return cls(
            directory=str(directory), memory=tiers.memory.path,
            disk=os.path.abspath(tiers.disk.path) if tiers.disk.path else "",
            shared=os.path.abspath(tiers.shared.path) if tiers.shared is not None else "",
            objects=tiers.objects.url if tiers.objects is not None else "",
        )  # fmt: skip

    @classmethod
    def written(cls, directory: Path) -> Places:
        """What a run's directory says. Its absence is no error: older runs have none. Damaged if it cannot be read."""
        try:
            record = read_record(DiskTier(directory), RECORD, TiersRecord)
        except (FileNotFoundError, NotADirectoryError):
            return cls(directory=str(directory))
        except NewerFormat:
            raise
        except Damaged as error:
            way = "it only names other places of the run, and holds no state; start the run, which writes it anew"
            raise Damaged(f"{error.reason}: {way}", tier=error.tier, file=error.file) from None
        return cls(
            directory=str(directory), memory=record.memory, disk=record.disk, shared=record.shared,
            objects=record.objects,
        )  # fmt: skip

    def write(self) -> None:
        tier = DiskTier(Path(self.directory))
        record = TiersRecord(
            format=FORMAT, memory=self.memory, disk=self.disk, shared=self.shared, objects=self.objects
        )  # fmt: skip
        try:
            if read_record(tier, RECORD, TiersRecord) == msgspec.json.decode(encode(record), type=TiersRecord):
                return
        except (EverstepError, OSError):
            pass  # there is none, or none that can be read
        tier.delete(RECORD)
        put_record(tier, RECORD, record)

    def disk_tier(self) -> DiskTier:
        return DiskTier(Path(self.disk or self.directory))

    def deeper_tiers(self) -> dict[Source, Tier]:
        """From the nearest to the deepest."""
        found: dict[Source, Tier] = {}
        if self.shared:
            found["shared"] = DiskTier(Path(self.shared), name="shared", survives=Survives.NODE)
        if self.objects:
            from everstep.store.objects import ObjectTier  # needs a package that other tiers do not

            found["objects"] = ObjectTier(self.objects)
        return found


def not_a_run(directory: Path) -> NothingToRestore:
    why = f"it has no {RUN_RECORD}" if directory.exists() else "it is not there"
    return NothingToRestore(f"{directory} is not a run's directory: {why}; give what was dir= of guard()")


def guest_tier(run: str, memory_path: str | None) -> MemoryTier:
    """What other nodes entrusted to this one, in memory."""
    return guests_in(arena_root(memory_path) / run)


def guests_in(folder: Path) -> MemoryTier:
    """The same, in a run's folder there."""
    return MemoryTier(folder / _GUESTS)
