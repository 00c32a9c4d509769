"""The form of a record: where the gradients, the values and the extras of a step lie, in the ring and on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everstep.capture.arena import Arena
from everstep.capture.layout import Entry, Listing, Share, Subjects
from everstep.capture.shape import Lane, Run, Shape, group_alike, make_lane, make_runs, place_in, view_in
from everstep.image import FORMAT, ImageLayout, lay_out
from everstep.topology import Topology
from everstep.types import ImageInfo

GRADIENT, CALL, DIGEST = "grad.", "call.", "digest"  # how the pieces of a record are called; others are values

Groups = list[tuple[list[Tensor], list[Tensor]]]


@dataclass(slots=True)
class Consumer:
    """The gradients of one optimizer that this rank records, in lists of one device and dtype."""

    parameters: list[list[Tensor]]
    names: list[list[str]]
    cuts: list[dict[int, Share]]  # those of which this rank has only some rows
    targets: list[list[list[Tensor]]]  # slot -> list -> tensors; the same for every slot where they lie on a device
    members: list[int]  # the optimizer's parameters, by id
    others: list[Tensor]  # parameters that had no gradient to record when the form was made,
    frozen: list[str]  # and their names
    scalars: list[tuple[str, list[Tensor]]]  # device values of the call, and where they go, for every slot


@dataclass(slots=True)
class Form:
    """Everything that records of one shape have in common."""

    layout: ImageLayout
    ring: Arena
    flats: list[Tensor]
    consumers: list[Consumer]
    places: list[list[Tensor]]  # for every slot: where the values of `in_cut` go
    values: list[Groups]  # the same in lists of one device and dtype, with the values
    runs: dict[torch.device, list[Run]]
    lanes: dict[torch.device, Lane]
    listing: Listing
    shape: Shape  # of the bases that these records follow,
    digest: list[Tensor]  # and for every slot where the digest of such a state goes
    in_cut: list[Share]
    loose: list[Tensor]  # state that no optimizer has and no cut copies: nobody should write it
    drained: dict[torch.device, torch.cuda.Event]


def make_form(
    subjects: Subjects, shape: Shape, *, topology: Topology, run: str, ring_for: Callable[[ImageLayout], Arena]
) -> Form:
    """Of the records of a state that `shape` captures."""
    names = subjects.names()
    owner = {id(p): i for i, optimizer in enumerate(subjects.optimizers) for p in parameters_of(optimizer)}
    gradients = [
        Share(_gradient_of(s.entry), s.first, s.rows)
        for s in shape.shares
        if id(s.entry.tensor) in owner and s.entry.tensor.requires_grad
    ]
    scalars = {i: _device_scalars(subjects, i) for i in range(len(subjects.optimizers))}
    named = {
        (i, name): Share(_private(f"{CALL}{i}.{name}", value), 0, 1)
        for i, found in scalars.items()
        for name, value in found.items()
    }
    in_cut = [s for s in shape.shares if s.entry.at_cut]
    devices = [s.entry.tensor.device for s in gradients]
    summed = torch.empty(2, dtype=torch.int64, device=devices[0] if devices else "cpu")
    digest = Share(_private(DIGEST, summed), 0, 2)
    everything = [*gradients, *named.values(), *in_cut, digest]
    everything.sort(key=lambda s: str(s.entry.tensor.device))
    info = ImageInfo(
        format=FORMAT, run=run, rank=topology.rank, world=topology.world, optimizers=subjects.optimizer_infos()
    )
    layout = lay_out([s.wanted() for s in everything], info, shape.layout.extras_bytes)
    found, base = {piece.name: piece for piece in layout.pieces}, len(layout.header)
    runs = make_runs([s for s in everything if s.entry.tensor.is_cuda], found, base)
    ring = ring_for(layout)
    flats = [torch.frombuffer(slot, dtype=torch.uint8) for slot in ring.slots]

    def target(item: Share, flat: Tensor) -> Tensor:
        on_device = item.entry.tensor.is_cuda
        return place_in(runs, item, found, base) if on_device else view_in(flat, item, found, base)

    def consumer(index: int) -> Consumer:
        mine = [s for s in gradients if owner[id(s.entry.tensor)] == index]
        lists = _by_kind(mine)
        members = parameters_of(subjects.optimizers[index])
        return Consumer(
            parameters=[[s.entry.tensor for s in one] for one in lists],
            names=[[s.entry.family for s in one] for one in lists],
            cuts=[{i: s for i, s in enumerate(one) if s.bytes != s.entry.tensor.nbytes} for one in lists],
            targets=[[[target(s, flat) for s in one] for one in lists] for flat in flats],
            members=list(map(id, members)),
            others=[p for p in members if not p.requires_grad],
            frozen=[names[id(p)] for p in members if not p.requires_grad],
            scalars=[(name, [target(named[index, name], flat) for flat in flats]) for name in scalars[index]],
        )

    lanes = {device: make_lane(device) for device in runs}
    slots = [[target(s, flat) for s in in_cut] for flat in flats]
    return Form(
        layout=layout,
        ring=ring,
        flats=flats,
        runs=runs,
        lanes=lanes,
        listing=shape.listing,
        shape=shape,
        digest=[target(digest, flat) for flat in flats],
        in_cut=in_cut,
        places=slots,
        values=[group_alike(places, in_cut) for places in slots],
        consumers=[consumer(i) for i in range(len(subjects.optimizers))],
        loose=[e.tensor for e in shape.listing.entries if e.gate is None and not e.at_cut],
        drained={device: torch.cuda.Event() for device in lanes},
    )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradient_of(entry: Entry) -> Entry:
    return Entry(
        name=f"{GRADIENT}{entry.name}", tensor=entry.tensor, gate=None, at_cut=True, common=entry.common,
        family=entry.name,
    )  # fmt: skip


def _private(name: str, value: Tensor) -> Entry:
    return Entry(name=name, tensor=value, gate=None, at_cut=True, common=False, family=name)


def _device_scalars(subjects: Subjects, index: int) -> dict[str, Tensor]:
    """What an update consumes beside gradients that lies on a device: group values there, and the scaler's."""
    optimizer = subjects.optimizers[index]
    found = {
        f"group.{g}.{key}": value
        for g, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params" and on_device(value)
    }
    if subjects.scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
        device = parameters_of(optimizer)[0].device
        if device.type == "cuda":
            found |= {name: torch.zeros((), device=device) for name in ("scale", "found_inf")}
    return found


def _by_kind(shares: list[Share]) -> list[list[Share]]:
    kinds: dict[Any, list[Share]] = {}
    for item in shares:
        kinds.setdefault((item.entry.tensor.device, item.entry.tensor.dtype), []).append(item)
    return list(kinds.values())


def on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda
