"""The files that one rank wrote for one dataset, as the image of one slot of its arena; and back.

An image has one tensor, `files`: their bytes, one after the other. Which file lies where is in the extras, so that a
header fits every dataset of the same size.
"""

from __future__ import annotations

import os
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
from everstep.integrations.slots import Slots
from everstep.types import ImageInfo

_PIECE = "files"
_SPARE = 8  # an arena that follows another has an eighth of room to spare
_LITTLE_BYTES = 1 << 20


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


class FileSlots(Slots):
    """A dataset a slot. Where the sizes of datasets change, an arena follows the other, with room to spare."""

    def __init__(self, life: Life, left: list[Arena], settle: Callable[[], None]) -> None:
        tiers, place = life.settings.tiers, life.topology
        readers = 1 + len(tiers.deeper) + (tiers.protection is not None and place.has_many_nodes)
        super().__init__(life, left, settle, slots=1 + life.newest + readers, newest=life.newest)
        self._seals = 0

    def fill(self, step: int, name: str, flags: int, files: Sequence[Content]) -> int:
        """Copy files into a slot, which is not sealed yet."""
        listed = [[one.key, one.size] for one in files]
        tree: dict[str, Any] = {"step": step, "name": name, "flags": flags, "files": listed}
        told = extras.encode(tree, "dataset")
        layout = self._room(sum(one.size for one in files), len(told))
        slot, view = self.open(layout)
        at = len(layout.header)
        for one in files:
            one.copy_to(view[at : at + one.size])
            at += one.size
        image.put_extras(layout, view, told)
        return slot

    def seal(self, slot: int, step: int) -> None:
        """All ranks have filled theirs: the dataset exists."""
        super().seal(slot, step)
        self._seals += 1
        if self._seals >= self._life.newest:
            self.let_go()

    def _room(self, size: int, extras_bytes: int) -> ImageLayout:
        """The present layout, if this fits without wasting the half of it; else another."""
        layout = self.layout
        if layout is not None:
            room = sum(piece.length for piece in layout.pieces)
            if size <= room <= 2 * size + _LITTLE_BYTES and extras_bytes <= layout.extras_bytes - 8:
                return layout
            size += size // _SPARE
        self._seals = 0
        return self._lay_out(size, extras_bytes)

    def _lay_out(self, size: int, extras_bytes: int) -> ImageLayout:
        place = self._life.topology
        info = ImageInfo(format=FORMAT, run=self._life.run, rank=place.rank, world=place.world)
        wanted = image.Wanted(name=_PIECE, dtype="U8", shape=(size,), start=(0,), extent=(size,), private=True)
        return image.lay_out([wanted] if size else [], info, 2 * extras_bytes + (4 << 10))


def write_files(files: dict[str, memoryview], folder: Path) -> dict[str, Path]:
    """Give a dataset's files back; they need not outlive a crash. Returns where each of them is."""
    found = {}
    for number, (key, data) in enumerate(files.items()):
        path = folder / str(number) / os.path.basename(key)
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        found[key] = path
    return found
