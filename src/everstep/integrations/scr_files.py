"""The files that one rank wrote for one dataset, as the image of one slot of its arena; and back.

An image has one tensor, `files`: their bytes, one after the other. Which file lies where is in the extras, so that a
header fits every dataset of the same size. Where sizes change an arena follows the other, with room to spare.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep import image
from everstep.capture import extras
from everstep.capture.arena import Arena
from everstep.capture.life import Life
from everstep.errors import Damaged, EverstepError
from everstep.image import FORMAT, ImageLayout
from everstep.types import ImageInfo

_PIECE = "files"
_SPARE = 8  # an arena that follows another has an eighth of room to spare
_LITTLE_BYTES = 1 << 20
_SLOT_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Content:
    """One file. `key`: what it is called, as seen from the prefix. `data`: its bytes, or where they are."""

    key: str
    size: int
    data: Path | memoryview

    @classmethod
    def of(cls, key: str, path: Path) -> Content:
        return cls(key, path.stat().st_size, path)

    def copy_to(self, place: memoryview) -> None:
        if isinstance(self.data, memoryview):
            place[:] = self.data
            return
        with open(self.data, "rb", buffering=0) as file:
            at = 0
            while at < self.size:
                count = file.readinto(place[at:])
                if not count:
                    raise EverstepError(f"{self.key} has become shorter since it was completed; close files before")
                at += count


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """What a rank has of a dataset that was given back."""

    name: str
    flags: int
    files: dict[str, memoryview]


def unpack(layout: ImageLayout, data: memoryview, step: int, rank: int) -> Dataset:
    """The files of an image. Damaged if it is not one of ours."""
    tree = extras.decode(image.extras_of(layout, data))
    begin = len(layout.header)
    end = begin + sum(piece.length for piece in layout.pieces if piece.name == _PIECE)
    try:
        if tree["step"] != step:
            raise Damaged(f"the extras are not of dataset {step}", step=step, rank=rank)
        files, at = {}, begin
        for key, size in tree["files"]:
            if at + size > end:
                raise Damaged(f"{key} leaves its image", step=step, rank=rank)
            files[str(key)] = data[at : at + size]
            at += size
        return Dataset(name=str(tree["name"]), flags=int(tree["flags"]), files=files)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"not a dataset of files: {error!r}", step=step, rank=rank) from None


class Slots:
    """This rank's arena, a dataset a slot; lent to the keeper while it reads."""

    def __init__(self, life: Life, left: list[Arena], settle: Callable[[], None]) -> None:
        """`left`: by an earlier life. `settle`: wait until nobody reads the arena that is to be followed by another."""
        self._life, self._left, self._settle = life, left, settle
        self._arena: Arena | None = None
        self._layout: ImageLayout | None = None
        self._leased: set[int] = set()
        self._change = threading.Condition()
        self._seals = 0

    # -- the keeper's thread

    def lease(self, step: int) -> int | None:
        with self._change:
            slot = self._arena.slot_of(step) if self._arena is not None else None
            if slot is not None:
                self._leased.add(slot)
            return slot

    def release(self, slot: int | None) -> None:
        """Give back one slot, or all of them when the keeper is gone."""
        with self._change:
            self._leased = self._leased - {slot} if slot is not None else set()
            self._change.notify_all()

    # -- filling

    def fill(self, step: int, name: str, flags: int, files: Sequence[Content]) -> int:
        """Copy files into a slot, which is not sealed yet."""
        listed = [[one.key, one.size] for one in files]
        tree: dict[str, Any] = {"step": step, "name": name, "flags": flags, "files": listed}
        told = extras.encode(tree, "dataset")
        arena, layout = self._room(sum(one.size for one in files), len(told))
        with self._change:
            found = self._change.wait_for(lambda: self._free(arena) is not None, _SLOT_PATIENCE_S)
            slot = self._free(arena)
            if not found or slot is None:
                raise EverstepError("all slots have been read for minutes; is a tier stuck? See everstep status")
            arena.unseal(slot)
        view, at = arena.image(slot), len(layout.header)
        for one in files:
            one.copy_to(view[at : at + one.size])
            at += one.size
        struct.pack_into("<Q", view, layout.extras_offset, len(told))
        view[layout.extras_offset + 8 : layout.extras_offset + 8 + len(told)] = told
        return slot

    def _free(self, arena: Arena) -> int | None:
        return arena.free_slot(self._life.newest, self._leased)

    def seal(self, slot: int, step: int) -> None:
        """All ranks have filled theirs: the dataset exists."""
        assert self._arena is not None
        now = time.time()
        self._arena.set_live(step, now)
        self._life.seal(self._arena, slot, step=step, cut_time=now)
        self._seals += 1
        if self._seals >= self._life.newest:
            self.let_go()

    def let_go(self) -> None:
        """Give up arenas of which nothing is needed: newer datasets are sealed on all ranks."""
        while self._left:
            arena = self._left.pop()
            arena.remove()
            arena.close()

    # -- the arena

    def _room(self, size: int, extras_bytes: int) -> tuple[Arena, ImageLayout]:
        """The arena, if this fits without wasting the half of it; else another."""
        arena, layout = self._arena, self._layout
        if arena is not None and layout is not None:
            room = sum(piece.length for piece in layout.pieces)
            if size <= room <= 2 * size + _LITTLE_BYTES and extras_bytes <= layout.extras_bytes - 8:
                return arena, layout
            self._settle()
            self._left.append(arena)
            size += size // _SPARE
        self._seals, self._layout = 0, self._lay_out(size, extras_bytes)
        with self._change:
            self._arena = self._take_over(self._layout) or self._make(self._layout)
            self._leased = set()
        self._life.attach(self._arena)
        return self._arena, self._layout

    def _lay_out(self, size: int, extras_bytes: int) -> ImageLayout:
        place = self._life.topology
        info = ImageInfo(format=FORMAT, run=self._life.run, rank=place.rank, world=place.world)
        wanted = image.Wanted(name=_PIECE, dtype="U8", shape=(size,), start=(0,), extent=(size,), private=True)
        return image.lay_out([wanted] if size else [], info, 2 * extras_bytes + (4 << 10))

    def _take_over(self, layout: ImageLayout) -> Arena | None:
        """One that is there and fits; to make it anew would wipe what it holds."""
        for arena in self._left:
            if (arena.kind, arena.layout_digest, arena.slot_bytes) == ("base", layout.digest, layout.total_bytes):
                self._left.remove(arena)
                arena.adopt(layout)
                return arena
        return None

    def _make(self, layout: ImageLayout) -> Arena:
        tiers, place = self._life.settings.tiers, self._life.topology
        readers = 1 + len(tiers.deeper) + (tiers.protection is not None and place.has_many_nodes)
        return self._life.make_arena(layout, slots=1 + self._life.newest + readers)


def write_files(files: dict[str, memoryview], folder: Path) -> dict[str, Path]:
    """Give a dataset's files back; they need not outlive a crash. Returns where each of them is."""
    found = {}
    for number, (key, data) in enumerate(files.items()):
        path = folder / str(number) / os.path.basename(key)
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        found[key] = path
    return found
