"""One rank's part of a base that is made of tensors at hand, and not captured out of a training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from everstep import image
from everstep.capture import extras
from everstep.capture.layout import DTYPES
from everstep.errors import Unstorable
from everstep.image import EXTRAS, FORMAT, Wanted
from everstep.keeper import flush
from everstep.recover.assemble import tensor_in
from everstep.store.blocks import room_for
from everstep.store.tier import Tier
from everstep.types import ImageInfo, Part

_RESERVED = (EXTRAS, "__metadata__")


def wanted(
    name: str, dtype: torch.dtype, shape: Sequence[int], start: Sequence[int] = (), extent: Sequence[int] | None = None
) -> Wanted:
    """A whole tensor, or a box of one. Unstorable if no image can hold it."""
    if dtype not in DTYPES:
        raise Unstorable(name, dtype, f"images have no {dtype}")
    if name in _RESERVED:
        raise Unstorable(name, dtype, "the name is taken by the format itself")
    whole = tuple(shape)
    return Wanted(
        name=name, dtype=DTYPES[dtype], shape=whole, start=tuple(start) or (0,) * len(whole),
        extent=whole if extent is None else tuple(extent),
    )  # fmt: skip


def blank_tree(step: int) -> dict[str, Any]:
    """What a run has beside its tensors before it has anything. `imported`: nobody expects more of it."""
    return {
        "imported": True, "step": step, "optimizers": [], "schedulers": [], "scaler": None, "compressor": None,
        "reductions": None, "extra": {}, "finished_at": None, "position": None, "random": None,
    }  # fmt: skip


class NewPart:
    def __init__(self, wanted: Sequence[Wanted], info: ImageInfo, tree: dict[str, Any]) -> None:
        """`tree`: what is no tensor; its `step` is that of the base."""
        told = extras.encode(tree, "state")
        self._layout, self._info, self._step = image.lay_out(wanted, info, 8 + len(told)), info, tree["step"]
        self._data = room_for(self._layout.total_bytes)
        self._data[: len(self._layout.header)] = self._layout.header
        image.put_extras(self._layout, self._data, told)
        self._pieces = {piece.name: piece for piece in self._layout.pieces}

    def place_of(self, name: str) -> Tensor:
        """Where the elements of a tensor go."""
        piece = self._pieces[name]
        begin = len(self._layout.header) + piece.offset
        return tensor_in(self._data[begin : begin + piece.length], piece)

    def put(self, tier: Tier, generation: str) -> Part:
        """Onto a medium, whole; a base exists when all its parts are there and a commit names them."""
        return flush.put_image(
            tier, (self._layout, self._info, self._data), step=self._step, generation=generation,
            torch_version=str(torch.__version__),
        )  # fmt: skip


def info_of(run: str, rank: int, world: int, aliases: dict[str, str] | None = None) -> ImageInfo:
    return ImageInfo(format=FORMAT, run=run, rank=rank, world=world, aliases=aliases or {})
