"""A directory in shared memory as a tier: survives the process, not the machine. No fsync, no O_DIRECT."""

from __future__ import annotations

from pathlib import Path

from everstep.capture.host import make_private
from everstep.store.disk import DiskTier
from everstep.types import Survives


class MemoryTier(DiskTier):
    direct = False
    durable = False

    def __init__(self, root: Path) -> None:
        super().__init__(root, name="memory", survives=Survives.PROCESS)

    def _new_folder(self, folder: Path) -> None:
        make_private(folder)
