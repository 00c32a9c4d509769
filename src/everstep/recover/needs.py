"""Which bytes of a checkpoint a rank needs: what overlaps its own boxes, and all that is not cut into boxes."""

from __future__ import annotations

from typing import Protocol

from everstep.capture.layout import Listing, Subjects, is_state, optimizer_name
from everstep.capture.sharded import is_zero, stepping
from everstep.image import ImageLayout
from everstep.types import ImageInfo, Piece, Place


class Some(Protocol):
    """Whoever knows which bytes of an image are wanted."""

    @property
    def is_partial(self) -> bool: ...

    def ranges(self, layout: ImageLayout, info: ImageInfo) -> list[tuple[int, int]]: ...


class Needs:
    """Of one rank, for the objects that it has; `None` as subjects: of whoever reads all."""

    def __init__(self, subjects: Subjects | None, rank: int, world: int, listing: Listing | None = None) -> None:
        """`listing`: of the subjects, where there is one already."""
        self.rank, self._world = rank, world
        self._places: dict[str, Place] = {}
        self._elsewhere: set[str] = set()  # parameters' states that other ranks have, by the beginning of their names
        self._parameters: set[str] | None = None  # those that the old ranks' optimizers had, once they are asked for
        if subjects is None:
            return
        listing = listing or subjects.listing()
        for entry in listing.entries:
            if entry.given is not None:
                self._places[entry.name] = Place(entry.shape, entry.start, tuple(entry.tensor.shape))
        for i, optimizer in enumerate(subjects.optimizers):
            if is_zero(optimizer):
                own = {id(p) for group in stepping(optimizer).param_groups for p in group["params"]}
                others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
                prefix = optimizer_name(i, len(subjects.optimizers))
                self._elsewhere |= {f"{prefix}.state.{listing.names[id(p)]}" for p in others}

    @property
    def is_partial(self) -> bool:
        """Whether there is anything that this rank does without."""
        return bool(self._places or self._elsewhere)

    def source(self, old_world: int) -> int:
        """The old rank whose own values this one takes."""
        return self.rank if self.rank < old_world else 0

    def has_other_world(self, info: ImageInfo) -> bool:
        return info.world != self._world

    def compares(self, piece: Piece, info: ImageInfo) -> bool:
        """Whether a rank's own value must be the same on all old ranks, because other ranks go on with it.

        So it is of what optimizers update: a parameter that is in no DDP, a counter beside the parts of a DTensor.
        """
        if not piece.private or not self.has_other_world(info):
            return False
        if self._parameters is None:
            self._parameters = {name for one in info.optimizers for group in one.groups for name in group}
        return piece.name in self._parameters or is_state(piece.name)

    def takes(self, piece: Piece, old_rank: int, old_world: int) -> bool:
        """Whether a piece in the image of an old rank is one of which this rank restores something."""
        if piece.private and old_rank != self.source(old_world):
            return False
        return not self.is_partial or self._rows(piece) is not None

    def _rows(self, piece: Piece) -> slice | None:
        """The rows of a piece that lie in this rank's part; all where there are no parts; None if there are none."""
        name, state = piece.name, ""
        if is_state(name):
            state = name.rpartition(".")[0]
            name = state.partition(".state.")[2]
        if state in self._elsewhere:
            return None
        place = self._places.get(name)
        if place is None or place.shape != piece.shape or not piece.extent:
            return slice(0, piece.extent[0] if piece.extent else 1)
        found = overlap(piece, place.start, place.extent)
        return found[0][0] if found is not None else None

    def ranges(self, layout: ImageLayout, info: ImageInfo) -> list[tuple[int, int]]:
        """Bytes of an old rank's image, from and to."""
        base, found = len(layout.header), []
        for piece in layout.pieces:
            begin, rows = base + piece.offset, self._rows(piece)
            if self.compares(piece, info):
                found.append((begin, begin + piece.length))
            elif rows is not None and self.takes(piece, info.rank, info.world):
                row_bytes = piece.length // max(1, piece.extent[0]) if piece.extent else piece.length
                found.append((begin + rows.start * row_bytes, begin + rows.stop * row_bytes))
        if info.rank == self.source(info.world) or self.has_other_world(info):  # for where each of them stood
            found.append((layout.extras_offset, layout.total_bytes))
        return found


def overlap(
    piece: Piece, start: tuple[int, ...], extent: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What a piece and a box have in common: as a part of the piece, and as a part of the box; None if nothing."""
    in_piece, in_box = [], []
    for a, n, b, m in zip(piece.start, piece.extent, start, extent, strict=True):
        first, end = max(a, b), min(a + n, b + m)
        if first >= end:
            return None
        in_piece.append(slice(first - a, end - a))
        in_box.append(slice(first - b, end - b))
    return tuple(in_piece), tuple(in_box)
