"""Which datasets there are, by name, and which of them are not offered any more: a small file for each, made once.

Each node has them beside its cache, and the prefix has them all. They are a convenience: a checkpoint that lost its
note is restored all the same, because its image says its name too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from everstep.errors import EverstepError
from everstep.events import Degraded, Sink
from everstep.image import FORMAT
from everstep.keeper.flush import remove_checkpoint
from everstep.recover.survey import Sources
from everstep.store.disk import DiskTier
from everstep.store.manifest import parity_folder, put_record, read_record
from everstep.topology import Topology, exchange
from everstep.types import DatasetRecord

_NOTE = re.compile(r"(dataset|dropped)-(\d{10})\.json")


class Index:
    def __init__(self, directory: Path, prefix: Path, place: Topology, emit: Sink) -> None:
        self._node, self._prefix = DiskTier(directory), DiskTier(prefix, name="prefix")
        self._place, self._emit = place, emit
        self.names: dict[int, str] = {}
        self.dropped: set[int] = set()

    def read(self) -> None:
        """All that anybody still has. All ranks must ask."""
        mine: list[tuple[str, int, str]] = []
        if self._place.is_leader:
            mine += self._notes(self._node)
        if self._place.rank == 0:
            mine += self._notes(self._prefix)
        for answer in exchange(msgspec.msgpack.encode(mine), self._place):
            for kind, step, name in msgspec.msgpack.decode(answer, type=list[tuple[str, int, str]]):
                self.names[step] = name
                if kind == "dropped":
                    self.dropped.add(step)

    def _notes(self, tier: DiskTier) -> Iterable[tuple[str, int, str]]:
        for file in tier.names():
            if found := _NOTE.fullmatch(file):
                try:
                    yield found[1], int(found[2]), read_record(tier, file, DatasetRecord).name
                except (EverstepError, OSError) as error:
                    self._emit(Degraded(what=f"a dataset has lost its name: {file}", reason=str(error)))

    def steps_named(self, name: str) -> list[int]:
        """Those of that name that are still offered, oldest first: a dataset that was put back has two."""
        return sorted(step for step, known in self.names.items() if known == name and step not in self.dropped)

    def note(self, step: int, name: str, flags: int) -> None:
        """A dataset is there: on this node at once."""
        self.names[step] = name
        if self._place.is_leader:
            self._put(self._node, f"dataset-{step:010d}.json", step, name, flags)

    def note_on_prefix(self, step: int, name: str, flags: int) -> None:
        """And on the prefix, by one of them."""
        self._put(self._prefix, f"dataset-{step:010d}.json", step, name, flags)

    def drop(self, step: int) -> None:
        """It is not offered any more, wherever its bytes still lie."""
        self.dropped.add(step)
        tiers = [self._node] if self._place.is_leader else []
        for tier in (*tiers, *([self._prefix] if self._place.rank == 0 else [])):
            self._put(tier, f"dropped-{step:010d}.json", step, self.names.get(step, ""), 0)

    def _put(self, tier: DiskTier, file: str, step: int, name: str, flags: int) -> None:
        record = DatasetRecord(format=FORMAT, dataset=step, name=name, flags=flags)
        try:
            put_record(tier, file, record)
        except FileExistsError:
            pass  # several nodes see this directory
        except (EverstepError, OSError) as error:
            self._emit(Degraded(what=f"{file} is not written down on {tier.root}", reason=str(error)))


def forget(sources: Sources, steps: Iterable[int], *, on_prefix: bool) -> None:
    """Remove datasets from this node's memory and disk, and what it holds for others; and from the prefix, if asked."""
    for step in steps:
        for arena in sources.arenas:
            slot = arena.slot_of(step)
            if slot is not None:
                arena.unseal(slot)  # whoever reads it finds the seal gone, and drops what it wrote
        for source, shelf in sources.shelves.items():
            if source in ("disk", "partner") or on_prefix:
                remove_checkpoint(shelf.tier, step)
        sources.shelves["partner"].tier.delete_folder(parity_folder(step))
