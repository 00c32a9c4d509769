"""From images to a checkpoint: whose pieces a rank needs of which images."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from everstep.capture.collector import uncollected
from everstep.capture.extras import decode
from everstep.capture.layout import TORCH_DTYPES, shaped
from everstep.errors import Damaged
from everstep.image import ITEM_BYTES, ImageLayout, extras_of
from everstep.recover.needs import Needs, overlap
from everstep.store.manifest import uncovered
from everstep.types import ImageInfo, Piece, Place

Image = tuple[ImageLayout, ImageInfo, memoryview]
Pair = tuple[Tensor, Tensor]  # where to, and from where


@dataclass(slots=True)
class Checkpoint:
    """A verified checkpoint in memory, as one rank sees it."""

    step: int
    world: int
    info: ImageInfo
    extras: dict[str, Any]
    own: bool  # whether this rank existed when it was taken
    pieces: dict[str, list[tuple[Piece, Tensor]]] = field(default_factory=dict)
    others: dict[str, Piece] = field(default_factory=dict)  # of tensors of which this rank needs nothing, one piece
    positions: list[Any] = field(default_factory=list)  # in the data, of all old ranks, if their number was another
    unlike: list[str] = field(default_factory=list)  # what each old rank had its own value of, and cannot be shared out

    def kind(self, name: str) -> Piece:
        """A piece that tells a tensor's shape and dtype."""
        return self.pieces[name][0][0] if name in self.pieces else self.others[name]

    def kinds(self) -> dict[str, Piece]:
        """The same of all tensors, by their names."""
        return self.others | {name: pieces[0][0] for name, pieces in self.pieces.items()}

    def tensor(self, name: str) -> Tensor:
        """A whole tensor in memory of its own."""
        shape = self.pieces[name][0][0].shape
        return self.part(name, Place(shape, (0,) * len(shape), shape))

    def part(self, name: str, place: Place) -> Tensor:
        """A box of a tensor, in memory of its own."""
        pieces = self.pieces[name]
        found = torch.empty(place.extent, dtype=pieces[0][1].dtype)
        filled = 0
        for into, part in common(pieces, found, place.start):
            into.copy_(part)
            filled += part.numel()
        if filled != found.numel():
            raise Damaged(f"{name} is not there as a whole", step=self.step)
        return found

    def state_names(self, prefix: str) -> dict[str, dict[str, str]]:
        """The tensors of an optimizer's state: parameter -> key -> full name, which several may have in common."""
        found: dict[str, dict[str, str]] = {}
        start, aliases = f"{prefix}.state.", self.info.aliases
        for name in (*self.pieces, *self.others, *aliases):
            if name.startswith(start):
                kept_as = aliases.get(name, name)
                parameter, dot, key = name.removeprefix(start).rpartition(".")
                if not dot or (kept_as not in self.pieces and kept_as not in self.others):
                    raise Damaged(f"{name} is the state of no parameter, or is not there", step=self.step)
                found.setdefault(parameter, {})[key] = kept_as
        return found

    def scaler_state(self) -> dict[str, Any] | None:
        """What the GradScaler's state_dict() was; None if there was none, or it was not enabled."""
        if self.extras["scaler"] is None:
            return None
        state = dict(self.extras["scaler"])
        scale = state.pop("init_scale")
        tracked = "scaler._scale" in self.pieces
        state["scale"] = float(self.tensor("scaler._scale")) if tracked else scale
        state["_growth_tracker"] = int(self.tensor("scaler._growth_tracker")) if tracked else 0
        return state


@uncollected()
def view(images: dict[int, Image], step: int, needs: Needs) -> Checkpoint:
    """What a rank needs of the images of all old ranks."""
    missing = uncovered(layout.pieces for layout, _, _ in images.values())
    if missing is not None:
        raise Damaged(f"the images are not a whole checkpoint: {missing}", step=step)
    source = needs.source(len(images))
    layout, info, data = images[source]
    tree = decode(extras_of(layout, data))
    if not isinstance(tree, dict) or tree.get("step") != step:
        raise Damaged(f"the extras are not of step {step}", step=step, rank=source)
    checkpoint = Checkpoint(step=step, world=info.world, info=info, extras=tree, own=source == needs.rank)
    if needs.has_other_world(info):
        checkpoint.positions = [_position(images[rank], step, rank) for rank in sorted(images)]
    first: dict[str, memoryview] = {}  # the bytes that the first rank has of what all must have alike
    for old_rank, (layout, info, data) in sorted(images.items()):
        base, has_other_world = len(layout.header), needs.has_other_world(info)
        for piece, tensor in zip(layout.pieces, _tensors_in(layout, data), strict=True):
            if has_other_world and needs.compares(piece, info):  # the first is so of all, and there may be many
                there = data[base + piece.offset : base + piece.offset + piece.length]
                if first.setdefault(piece.name, there) != there:
                    checkpoint.unlike.append(piece.name)
            if needs.takes(piece, old_rank, info.world):
                checkpoint.pieces.setdefault(piece.name, []).append((piece, tensor))
            elif not piece.private or old_rank == source:
                checkpoint.others[piece.name] = piece
    return checkpoint


def whole_views(images: dict[int, Image], step: int) -> Callable[[int], Checkpoint]:
    """All of the images, as each of the old ranks sees it: with its own of what is each rank's own."""
    return lambda rank: view(images, step, Needs(None, rank, len(images)))


def _tensors_in(layout: ImageLayout, data: memoryview) -> Iterator[Tensor]:
    """All pieces of an image. Nothing lies between them, so neighbours of one dtype are cut out of it at once."""
    base = len(layout.header)
    for dtype, run in groupby(layout.pieces, key=attrgetter("dtype")):
        pieces = list(run)
        there = data[base + pieces[0].offset : base + pieces[-1].offset + pieces[-1].length]
        parts = _elements_in(there, dtype).split([piece.length // ITEM_BYTES[dtype] for piece in pieces])
        yield from map(shaped, parts, pieces)


def tensor_in(data: memoryview, piece: Piece) -> Tensor:
    """A piece's bytes as the tensor that they are."""
    return shaped(_elements_in(data, piece.dtype), piece)


def _elements_in(data: memoryview, dtype: str) -> Tensor:
    if not data:
        return torch.empty(0, dtype=TORCH_DTYPES[dtype])
    with _unwarned() if data.readonly else nullcontext():
        return torch.frombuffer(data, dtype=TORCH_DTYPES[dtype])


@contextmanager
def _unwarned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nobody here writes to it
        yield


def _position(found: Image, step: int, rank: int) -> Any:
    layout, _, data = found
    tree = decode(extras_of(layout, data))
    if not isinstance(tree, dict) or tree.get("step") != step:
        raise Damaged(f"the extras are not of step {step}", step=step, rank=rank)
    return tree.get("position")


def common(pieces: list[tuple[Piece, Tensor]], local: Tensor, start: tuple[int, ...]) -> Iterator[Pair]:
    """What pieces have for a tensor that lies somewhere in the whole one: where to, and from where."""
    for piece, part in pieces:
        if piece.extent == local.shape and piece.start == start:  # the whole, as most are: cutting it takes its time
            yield local, part
            continue
        found = overlap(piece, start, tuple(local.shape))
        if found is not None:
            in_piece, in_box = found
            yield (local[in_box], part[in_piece]) if in_box else (local, part)
