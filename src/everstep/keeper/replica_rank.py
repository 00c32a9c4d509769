"""One rank, followed: the trainer's arena and records, and the replica's own arena with an image in it.

A replica has two slots: WORKING is advanced, and has no seal while that is done; HELD is a still copy that the keeper
may take its time to write. Whoever changes them holds the arena's lock.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import Tensor

from everstep import image
from everstep.capture.arena import MEMFD, Arena, Seal
from everstep.capture.host import free_memory
from everstep.errors import NotEnoughMemory
from everstep.image import ImageLayout
from everstep.keeper.protocol import Hello
from everstep.keeper.replica_image import Image, Record, View, labelled, rowless
from everstep.keeper.replica_records import Records
from everstep.store.tier import Tier
from everstep.types import ImageInfo

WORKING, HELD = 0, 1
_SLOTS = 2

Key = tuple[int, str]  # step, generation


class Rank:
    def __init__(self, tier: Tier, hello: Hello) -> None:
        self.hello = hello
        self.records = Records(tier, hello)
        self.base: Arena | None = None  # the trainer's
        self.replica: Arena | None = None
        self._left: list[Arena] = []  # replicas that are there: to be taken over, or needed until ours is as new
        self._image: Image | None = None
        self._seal: Seal | None = None  # of WORKING

    def add_base(self, arena: Arena) -> bool:
        """The arena that the trainer takes bases into; whether the state has another shape than before."""
        changed = self.base is not None and self.base.layout_digest != arena.layout_digest
        if self.base is not None:
            self.base.close()
        self.base = arena
        if arena.place != MEMFD:
            known = {one.place for one in self.arenas()}
            for folder in Path(arena.place).parent.glob(f"rank-{arena.rank:05d}-replica-*"):
                if str(folder) not in known:
                    self._open(folder)
        return changed

    def _open(self, folder: Path) -> None:
        try:
            self.add_replica(Arena.open(folder))
        except (OSError, ValueError):
            shutil.rmtree(folder, ignore_errors=True)  # somebody died who was making it

    def add_replica(self, arena: Arena) -> None:
        self._left.append(arena)

    def arenas(self) -> list[Arena]:
        """Those whose lock is needed."""
        return [*self._left, *([self.replica] if self.replica is not None else [])]

    # -- beginning

    def shape(self) -> tuple[ImageLayout, ImageInfo]:
        """Of the replica."""
        assert self.base is not None
        header = bytes(self.base.image(0)[: image.header_bytes(self.base.image(0))])
        layout, info = image.parse_cached(header, self.base.slot_bytes, self.base.place)
        return labelled(layout, info, self.hello.replica)

    def bases(self) -> set[Key]:
        assert self.base is not None
        return {(seal.step, seal.generation) for seal in self.base.seals().values()}

    def left(self) -> set[Key]:
        """What an earlier process of this kind has left that could be gone on with."""
        digest = self.shape()[0].digest
        found: set[Key] = set()
        for arena in self._left:
            for slot, seal in arena.seals().items():
                after = self.hello.resumed_from is None or seal.step > self.hello.resumed_from
                if after and seal.generation != self.hello.generation:
                    arena.unseal(slot)  # the run has gone on from an earlier step
                elif arena.layout_digest == digest:
                    found.add((seal.step, seal.generation))
        return found

    def take_over(self, key: Key) -> None:
        """Have WORKING hold a step that was left."""
        self._make_room()
        assert self.replica is not None
        slots = {slot: seal for slot, seal in self.replica.seals().items() if (seal.step, seal.generation) == key}
        if WORKING not in slots:
            self.replica.unseal(WORKING)
            self.replica.image(WORKING)[:] = self.replica.image(HELD)
            self._seal_as(WORKING, slots[HELD])

    def copy_base(self, key: Key) -> bool:
        """Have WORKING hold a true base; False if the trainer has overwritten it."""
        assert self.base is not None
        self._make_room()
        assert self.replica is not None
        slot = self.base.slot_of(key[0])
        seal = self.base.seals().get(slot) if slot is not None else None
        if slot is None or seal is None or (seal.step, seal.generation) != key:
            return False
        self.replica.unseal(WORKING)
        source, target = self.base.image(slot), self.replica.image(WORKING)
        target[image.header_bytes(target) :] = source[image.header_bytes(source) :]
        if self.base.seals().get(slot) != seal:
            return False
        self._seal_as(WORKING, seal)
        return True

    def _make_room(self) -> None:
        layout, _ = self.shape()
        if self.replica is not None and self.replica.layout_digest == layout.digest:
            return
        if self.replica is not None:
            self._left.append(self.replica)
        self._image = None
        fitting = [one for one in self._left if one.layout_digest == layout.digest and len(one.slots) == _SLOTS]
        if fitting:
            self._left.remove(fitting[0])
            fitting[0].adopt(layout)
            self.replica = fitting[0]
            return
        assert self.base is not None
        root = None if self.base.place == MEMFD else Path(self.base.place).parents[1]
        needed = _SLOTS * layout.total_bytes
        if free_memory(root) < needed:
            raise NotEnoughMemory(str(root or "memory"), needed, free_memory(root), "for a replica")
        self.replica = Arena.create(
            root, kind="replica", run=self.hello.run, rank=self.hello.rank, world=self.hello.world, layout=layout,
            slots=_SLOTS,
        )  # fmt: skip
        self.replica.lock(shared=False)

    def rowless(self) -> dict[str, Tensor]:
        layout, info = self.shape()
        assert self.replica is not None
        return rowless(View(self.replica.image(WORKING), layout), info)

    def begin(self, step: int, rowless: dict[str, Tensor]) -> None:
        """Be ready to advance. `rowless`: of all local ranks."""
        layout, info = self.shape()
        assert self.replica is not None
        self._image = Image(View(self.replica.image(WORKING), layout), info, step, rowless)
        self._seal = self.replica.seals()[WORKING]

    # -- going on

    @property
    def is_mine(self) -> bool:
        """Whether WORKING is as this process left it."""
        return self.replica is not None and self.replica.seals().get(WORKING) == self._seal

    def advance(self, record: Record) -> None:
        """Bring WORKING to the next step; it has no seal when this returns."""
        assert self.replica is not None and self._image is not None
        self.replica.unseal(WORKING)
        self._image.advance(record)

    def seal(self, record: Record) -> None:
        assert self.replica is not None
        self.replica.seal(WORKING, step=record.step, cut_time=record.cut_time, generation=record.generation)
        self._seal = self.replica.seals()[WORKING]
        self._let_go(record.step)

    def hold(self) -> None:
        """Copy WORKING to HELD."""
        assert self.replica is not None and self._seal is not None
        self.replica.unseal(HELD)
        self.replica.image(HELD)[:] = self.replica.image(WORKING)
        self._seal_as(HELD, self._seal)

    def drift(self, step: int) -> tuple[int, float] | None:
        """Against the true base of a step; None if it was overwritten."""
        assert self.base is not None and self._image is not None
        slot = self.base.slot_of(step)
        seal = self.base.seals().get(slot) if slot is not None else None
        if slot is None or seal is None:
            return None
        header = bytes(self.base.image(slot)[: image.header_bytes(self.base.image(slot))])
        layout, _ = image.parse_cached(header, self.base.slot_bytes, self.base.place)
        found = self._image.drift(View(self.base.image(slot), layout))
        return found if self.base.seals().get(slot) == seal else None

    def _seal_as(self, slot: int, seal: Seal) -> None:
        assert self.replica is not None
        self.replica.seal(slot, step=seal.step, cut_time=seal.cut_time, generation=seal.generation)

    def _let_go(self, step: int) -> None:
        """What was left is of no use once the replica is as new."""
        for arena in list(self._left):
            if all(seal.step <= step for seal in arena.seals().values()):
                self._left.remove(arena)
                arena.remove()
                arena.close()
