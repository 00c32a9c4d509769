"""The records between a base and a later step: fetched, checked, and read as what the optimizers consumed.

Records of one step come from every rank that was there, each with its rows of the gradients. A chain knows where a
row lies, whoever recorded it, and what stood beside the gradients at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everstep.capture.extras import decode
from everstep.capture.form import CALL, DIGEST, GRADIENT
from everstep.capture.update import Consumed, call_of
from everstep.errors import Damaged, EverstepError
from everstep.recover.assemble import Checkpoint
from everstep.recover.survey import RecordImage, Sources
from everstep.types import Piece, Plan, Records


@dataclass(slots=True)
class Chain:
    """What was consumed after a base, step by step, and the values that the last step left."""

    consumed: list[Consumed]
    last: Checkpoint


class BadRecord(Exception):
    def __init__(self, records: Records, reason: str) -> None:
        super().__init__(reason)
        self.records, self.reason = records, reason


def fetch_chain(sources: Sources, plan: Plan, rank: int, *, copy: bool = False) -> Chain | None:
    """All records of a plan, every byte of them checked; None if it has none. BadRecord at the first damaged one."""
    if not plan.records or plan.step is None or plan.base is None:
        return None
    images: dict[int, dict[int, RecordImage]] = {}
    for records in plan.records:
        for step in range(records.first, records.last + 1):
            try:
                images.setdefault(step, {})[records.rank] = sources.record(records, step, copy=copy)
            except (EverstepError, OSError) as error:
                bad = Records(**{**_fields(records), "first": step, "last": step})
                raise BadRecord(bad, str(error)) from error
    maps: dict[tuple[int, ...], _Map] = {}
    consumed = []
    for step in range(plan.base + 1, plan.step + 1):
        found = images[step]
        key = tuple(found[one].layout.digest for one in sorted(found))
        if key not in maps:
            maps[key] = _Map(found, rank)
        consumed.append(_consumed(step, found, maps[key], rank))
    return Chain(consumed, _last(plan.step, images[plan.step], rank))


def _fields(records: Records) -> dict[str, Any]:
    return {name: getattr(records, name) for name in records.__struct_fields__}


class _Map:
    """In which rank's image the rows of each gradient lie; the same for all steps of one layout."""

    def __init__(self, images: dict[int, RecordImage], rank: int) -> None:
        own = rank if rank in images else 0
        self.pieces: dict[str, list[tuple[int, Piece]]] = {}
        for one, image in sorted(images.items()):
            for piece in image.layout.pieces:
                if piece.name.startswith(GRADIENT) and (one == own or not piece.private):
                    self.pieces.setdefault(piece.name.removeprefix(GRADIENT), []).append((one, piece))


def _consumed(step: int, images: dict[int, RecordImage], map: _Map, rank: int) -> Consumed:
    own = rank if rank in images else 0
    trees = {one: _tree(image, step) for one, image in images.items()}

    def gradient(name: str, first: int, rows: int) -> Tensor:
        parts = []
        for one, piece in map.pieces[name]:
            tensor = images[one].tensor(piece)
            if not piece.start:
                return tensor
            begin, end = max(first, piece.start[0]), min(first + rows, piece.start[0] + piece.extent[0])
            if begin < end or rows == 0:
                parts.append(tensor.narrow(0, begin - piece.start[0], end - begin))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    calls = []
    for call in trees[own]["calls"]:
        index = call["optimizer"]
        absent = {
            name for tree in trees.values() for c in tree["calls"] if c["optimizer"] == index for name in c["absent"]
        }
        calls.append(call_of(call, images[own].named(f"{CALL}{index}."), absent))
    return Consumed(step=step, calls=calls, gradient=gradient, digest=_digest(images, trees, own))


def _digest(
    images: dict[int, RecordImage], trees: dict[int, dict[str, Any]], own: int
) -> tuple[int, int] | None:  # fmt: skip
    """What is common adds up over the ranks; what is private is this rank's own."""
    if not all(tree["digested"] for tree in trees.values()):
        return None
    pairs = {one: image.named(DIGEST)[""].tolist() for one, image in images.items()}
    return sum(common for common, _ in pairs.values()) % 2**64, pairs[own][1] % 2**64


def _tree(image: RecordImage, step: int) -> dict[str, Any]:
    tree = decode(image.extras())
    if not isinstance(tree, dict) or tree.get("step") != step:
        raise Damaged(f"the extras are not of step {step}", step=step, rank=image.info.rank)
    return tree


def _last(step: int, images: dict[int, RecordImage], rank: int) -> Checkpoint:
    own = rank if rank in images else 0
    image = images[own]
    found = Checkpoint(
        step=step, world=image.info.world, info=image.info, extras=_tree(image, step), own=rank in images
    )
    for piece in image.layout.pieces:
        if not piece.name.startswith((GRADIENT, CALL, DIGEST)):
            found.pieces[piece.name] = [(piece, image.tensor(piece))]
    return found
