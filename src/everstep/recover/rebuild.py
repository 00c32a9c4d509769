"""A step without the program that trained it: a base, and the steps after it repeated on the host.

Optimizers of torch are made anew from what the base says of them; those of others need their program. The host may
round otherwise than the device that trained, so digests decide; who reads is told.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from everstep.capture.bits import same_bits
from everstep.capture.form import tree_of_base
from everstep.capture.layout import DTYPES
from everstep.errors import Diverged, EverstepError
from everstep.recover.assemble import Checkpoint
from everstep.recover.chain import Chain
from everstep.recover.replay import replay, subjects_of
from everstep.topology import Topology
from everstep.types import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    checkpoint: Checkpoint
    proven: int | None  # the newest step that a digest proved
    foreign: str  # the kinds of device that trained, if that was not the host
    updated: frozenset[str]  # the tensors that were repeated


class NeedsProgram(EverstepError):
    """Steps of an optimizer that only the user's program has."""


def rebuild(base: Checkpoint, chain: Chain) -> Rebuilt:
    """The checkpoint that a chain leads to. Diverged if a digest says that it is another one."""
    foreign = " and ".join(kind for kind in chain.last.info.devices if kind != "cpu")
    try:
        subjects = subjects_of(base)
    except EverstepError as error:
        raise NeedsProgram(str(error)) from error
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(chain.last.extras["threads"])  # where a kernel cuts a tensor decides its last bits
        proven = replay(subjects, chain.consumed, Topology(rank=0, world=1, node=""))
    except Diverged as error:
        advice = f"It was trained on {foreign}, and the host rounds otherwise." if foreign else ""
        raise (Diverged(error.step, error.proven, advice) if advice else error) from None
    except (RuntimeError, ValueError, AssertionError) as error:
        if not foreign:
            raise
        raise EverstepError(f"updates on {foreign} cannot be repeated on the host: {error}") from error
    finally:
        torch.set_num_threads(threads)
    found = Checkpoint(
        step=chain.last.step, world=base.world, info=base.info, own=base.own, pieces=dict(base.pieces),
        extras=tree_of_base(chain.last.extras),
    )  # fmt: skip
    for name, pieces in chain.last.pieces.items():
        found.pieces[name] = [(piece, part.clone()) for piece, part in pieces]
    entries = subjects.listing().entries
    for entry in entries:
        found.pieces[entry.name] = [(_whole(entry.name, entry.tensor), entry.tensor.detach())]
    updated = frozenset(entry.name for entry in entries)
    return Rebuilt(checkpoint=found, proven=proven, foreign=foreign, updated=updated)


def _whole(name: str, tensor: torch.Tensor) -> Piece:
    shape = tuple(tensor.shape)
    return Piece(
        name=name, dtype=DTYPES[tensor.dtype], shape=shape, start=(0,) * len(shape), extent=shape, offset=0,
        length=tensor.nbytes,
    )  # fmt: skip


def differs_from(rebuilt: Rebuilt, base: Checkpoint) -> str | None:
    """The first tensor of which a base of the same step has other bits; None if there is none."""
    for name in sorted(rebuilt.updated):
        if name not in base.pieces:
            return name
        mine, other = rebuilt.checkpoint.tensor(name), base.tensor(name)
        if (mine.shape, mine.dtype) != (other.shape, other.dtype) or not same_bits(mine, other):
            return name
    return None
