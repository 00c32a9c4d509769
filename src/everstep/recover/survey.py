"""What is left: every part of every step that this node can still read, in memory and on disk, and what it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import xxhash

from everstep import image
from everstep.capture.arena import Arena, arena_root, find_arenas
from everstep.errors import Damaged, EverstepError
from everstep.image import CHUNK_BYTES
from everstep.keeper.client import inherited
from everstep.store.disk import DiskTier
from everstep.store.manifest import check_chunks, committed_steps, read_commit, read_data, read_part, read_record
from everstep.topology import node_name
from everstep.types import Attempt, Holding, ImageInfo, Rejection, Survey

ATTEMPTS = "attempt.json"


class Sources:
    """Everything this node can read of one run."""

    def __init__(self, directory: Path, run: str, *, memory_path: str | None = None) -> None:
        self.tier, self.run, self.node = DiskTier(directory), run, node_name()
        self._broken: list[str] = []
        self.arenas = list(find_arenas(arena_root(memory_path), run, self._broken))
        if memory_path is not None:
            self.arenas += find_arenas(arena_root(None), run, self._broken)
        self.arenas += inherited(run)

    def survey(self) -> Survey:
        holdings = [holding for arena in self.arenas for holding in self._in_memory(arena)]
        rejections = [Rejection(step=0, source="memory", reason=reason) for reason in self._broken]
        rejections += [rejection for arena in self.arenas for rejection in _torn(arena)]
        for step in committed_steps(self.tier):
            holdings += self._on_disk(step, rejections)
        return Survey(holdings=tuple(holdings), rejections=tuple(rejections), attempts=self.attempts())

    def _in_memory(self, arena: Arena) -> list[Holding]:
        return [
            Holding(
                source="memory", node=self.node, step=seal.step, rank=arena.rank, world=arena.world,
                generation=seal.generation, bytes=seal.length, cut_time=seal.cut_time,
                checked=arena.checks(slot) is not None,
            )
            for slot, seal in arena.seals().items()
        ]  # fmt: skip

    def _on_disk(self, step: int, rejections: list[Rejection]) -> list[Holding]:
        found = []
        try:
            commit = read_commit(self.tier, step, self.run)
        except (EverstepError, OSError) as error:
            rejections.append(Rejection(step=step, source="disk", reason=str(error)))
            return []
        for ref in commit.parts:
            try:
                part = read_part(self.tier, commit, ref.rank)
            except (EverstepError, OSError) as error:
                rejections.append(Rejection(step=step, source="disk", reason=str(error)))
                continue
            found.append(
                Holding(
                    source="disk", node=self.node, step=step, rank=part.rank, world=part.world,
                    generation=part.generation, bytes=part.bytes, cut_time=part.cut_time,
                )
            )  # fmt: skip
        return found

    def attempts(self) -> tuple[Attempt, ...]:
        try:
            return (read_record(self.tier, ATTEMPTS, Attempt),)
        except (OSError, EverstepError):
            return ()  # it only says what to offer last, and is written again by whoever loads

    def fetch(self, holding: Holding, *, copy: bool = False) -> tuple[image.ImageLayout, ImageInfo, memoryview]:
        """One part's image, every byte of it checked. `copy`: the owner may be alive and may overwrite it."""
        if holding.source == "memory":
            data, file = self._from_memory(holding, copy), f"arena of rank {holding.rank}"
        else:
            commit = read_commit(self.tier, holding.step, self.run)
            data, file = read_data(self.tier, read_part(self.tier, commit, holding.rank)), f"rank {holding.rank}"
        layout, info = image.parse(data, len(data), file=file)
        if (info.run, info.rank, info.world) != (self.run, holding.rank, holding.world):
            raise Damaged("the image belongs to another run or rank", step=holding.step, rank=holding.rank, file=file)
        return layout, info, data

    def _from_memory(self, holding: Holding, copy: bool) -> memoryview:
        def bad(reason: str, chunk: int | None = None) -> Damaged:
            return Damaged(reason, tier="memory", step=holding.step, rank=holding.rank, chunk=chunk)

        for arena in self.arenas:
            slot = arena.slot_of(holding.step) if arena.rank == holding.rank else None
            if slot is None or arena.seals()[slot].generation != holding.generation:
                continue
            seal, checks = arena.seals()[slot], arena.checks(slot)
            data = memoryview(bytearray(arena.image(slot))) if copy else arena.image(slot)
            if xxhash.xxh3_64_intdigest(data[: image.header_bytes(data)]) != seal.layout_digest:
                raise bad("the header is not the one that was sealed")
            if checks is not None:
                check_chunks(data, checks, CHUNK_BYTES, bad)
            if arena.seals().get(slot) != seal:
                raise bad("it was overwritten while it was read")
            return data
        raise bad("it is no longer there")

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _torn(arena: Arena) -> list[Rejection]:
    reason = f"arena of rank {arena.rank}: the seal of slot {{}} does not match its checksum"
    step = arena.live().step
    return [Rejection(step=step, source="memory", reason=reason.format(slot), certain=False) for slot in arena.torn()]
