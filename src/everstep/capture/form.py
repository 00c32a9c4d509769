"""The form of a record: where gradients, values and extras of a step lie.

A record has the gradients of this rank's rows, dense or as a compressor packed them; what each optimizer.step() was
called with; and the values that no gradient explains. Values that are as large as the state itself (residuals of a
compressor, an average that the loop keeps) have a sheet of their own, because only the newest of them are ever needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everstep.capture.arena import Arena, ArenaKind
from everstep.capture.compressor import Compressor
from everstep.capture.digest import StateDigest
from everstep.capture.layout import COMPRESSOR, DTYPES, Entry, Listing, Subjects
from everstep.capture.life import Life
from everstep.capture.shape import Shape, group_alike
from everstep.capture.sharded import is_sharded
from everstep.capture.shares import Share
from everstep.capture.sheet import Sheet, lay_out_sheet
from everstep.capture.stepped import placements_of, places
from everstep.capture.update import Call, kinds_of_device, parameters_of
from everstep.image import FORMAT, ImageLayout
from everstep.topology import Topology
from everstep.types import Codec, ImageInfo, PackedBuffer

# How the pieces of a record are called; others are values.
GRADIENT, PACKED, CALL, DIGEST = "grad.", "packed.", "call.", "digest"

_ONLY_IN_RECORDS = ("calls", "digested", "threads", "flushes")  # what a record's tree has beside a base's

Groups = list[tuple[list[Tensor], list[Tensor]]]


@dataclass(slots=True)
class Consumer:
    """The gradients of one optimizer that this rank records, in lists of one device and dtype, DTensors apart."""

    parameters: list[list[Tensor]]
    placements: list[list[Any] | None]  # of each list of DTensors
    names: list[list[str]]
    shares: list[list[Share]]
    cuts: list[dict[int, Share]]  # those of which this rank has only some rows
    targets: list[list[list[Tensor]]]  # slot -> list -> tensors
    members: list[int]  # the optimizer's parameters, by id
    others: list[Tensor]  # parameters that had no gradient to record when the form was made,
    frozen: list[str]  # and their names
    scalars: list[tuple[str, list[Tensor]]]  # device values of the call, and where they go, for every slot


@dataclass(slots=True)
class Field:
    """This rank's part of one array of a packed buffer."""

    key: str
    name: str
    shape: tuple[int, ...]  # of the whole array
    first: int
    count: int
    targets: list[Tensor]  # for every slot


@dataclass(slots=True)
class Values:
    """State that is copied in the cut: where it goes, for every slot of a sheet."""

    shares: list[Share]
    places: list[list[Tensor]]
    groups: list[Groups]  # the same in lists of one device and dtype, with the sources

    @classmethod
    def on(cls, sheet: Sheet, shares: list[Share]) -> Values:
        places = list(map(list, zip(*map(sheet.targets, shares), strict=True))) or [[] for _ in sheet.flats]
        return cls(shares, places, [group_alike(one, shares) for one in places])

    def rebind(self, fresh: dict[str, Entry]) -> None:
        self.shares = [Share(fresh[s.entry.name], s.first, s.rows) for s in self.shares]
        self.groups = [group_alike(one, self.shares) for one in self.places]

    def take(self, slot: int) -> None:
        for targets, sources in self.groups[slot]:
            torch._foreach_copy_(targets, sources)


@dataclass(slots=True)
class Form:
    """Everything that records of one shape have in common."""

    record: Sheet
    values: Values
    heavy: tuple[Sheet, Values] | None  # the sheet of large values
    consumers: list[Consumer]
    fields: list[Field]
    buffers: dict[str, list[int]]  # of each packed buffer the parameters, by id
    shape: Shape  # of the bases that these records follow,
    digest: list[Tensor]  # and for every slot where the digest of such a state goes
    listing: Listing
    loose: list[Entry]  # state that no optimizer has and no cut copies: nobody should write it
    digested: StateDigest  # how it is made, as long as the state stays where it is

    def take_digest(self, slot: int, shares: list[Share]) -> None:
        """Of a state that a base of this shape would have."""
        if self.digested.shares is not shares:
            self.digested = StateDigest(shares)
        for target, total in zip(self.digest[slot], self.digested.take(), strict=True):
            target.copy_(total)

    def close(self) -> None:
        self.record.close()
        if self.heavy is not None:
            self.heavy[0].close()


ArenaFor = Callable[[ImageLayout, ArenaKind], Arena]


@dataclass(slots=True)
class _Content:
    """What records of some shape are made of."""

    gradients: list[Share]
    calls: dict[tuple[int, str], Share]
    packed: dict[tuple[str, str], Share]
    small: list[Share]
    large: list[Share]
    digest: Share

    @property
    def record(self) -> list[Share]:
        return [*self.gradients, *self.calls.values(), *self.packed.values(), *self.small, self.digest]


def _content(
    subjects: Subjects, shape: Shape, topology: Topology, packed: dict[str, tuple[list[Tensor], dict[str, Tensor]]],
    written: set[str],
) -> _Content:  # fmt: skip
    owned = {id(p) for optimizer in subjects.optimizers for p in parameters_of(optimizer)}
    covered = {id(p) for parameters, _ in packed.values() for p in parameters}
    gradients = [
        Share(_gradient_of(s.entry), s.first, s.rows)
        for s in shape.shares
        if id(s.entry.held) in owned - covered and s.entry.held.requires_grad
    ]
    arrays = {
        (key, name): _part(f"{PACKED}{key}.{name}", value, topology)
        for key, (_, fields) in packed.items()
        for name, value in fields.items()
    }
    large = [s for s in shape.shares if s.entry.name.startswith(COMPRESSOR) or s.entry.name in written]
    devices = [s.entry.tensor.device for s in (*gradients, *arrays.values())]
    sums = torch.empty(2, dtype=torch.int64, device=devices[0] if devices else "cpu")
    return _Content(
        gradients=gradients,
        calls={
            (i, name): _whole(_private(f"{CALL}{i}.{name}", value))
            for i in range(len(subjects.optimizers))
            for name, value in _device_scalars(subjects, i).items()
        },
        packed=arrays,
        small=[s for s in shape.shares if s.entry.at_cut and s not in large],
        large=large,
        digest=_whole(_private(DIGEST, sums)),
    )


def make_form(
    subjects: Subjects,
    shape: Shape,
    life: Life,
    *,
    compressor: Compressor | None,
    written: set[str],
    arena_for: ArenaFor,
) -> Form:
    """Of the records of a state that `shape` captures. `written`: what the loop is known to write by itself."""
    topology = life.topology
    owner = {id(p): i for i, optimizer in enumerate(subjects.optimizers) for p in parameters_of(optimizer)}
    names = subjects.names()
    packed = dict(compressor.packed) if compressor is not None else {}
    content = _content(subjects, shape, topology, packed, written)
    codec = None
    if compressor is not None and packed:
        codec = Codec(kind=type(compressor).__name__, buffers={k: _buffer(p, names) for k, (p, _) in packed.items()})
    info = ImageInfo(
        format=FORMAT, run=life.run, rank=topology.rank, world=topology.world,
        optimizers=subjects.optimizer_infos(names), codec=codec, has_values=bool(content.large),
        devices=tuple(kinds_of_device(subjects.optimizers)), stepped=places(subjects),
    )  # fmt: skip
    layout = lay_out_sheet(content.record, info, shape.layout.extras_bytes)
    record = Sheet.make(content.record, layout, arena_for(layout, "log"))
    heavy = None
    if content.large:
        layout = lay_out_sheet(content.large, info, 4096)
        sheet = Sheet.make(content.large, layout, arena_for(layout, "values"))
        heavy = (sheet, Values.on(sheet, content.large))

    def consumer(index: int) -> Consumer:
        lists = _by_kind([s for s in content.gradients if owner[id(s.entry.held)] == index])
        members = parameters_of(subjects.optimizers[index])
        found = [list(map(record.targets, one)) for one in lists]
        parameters = [[s.entry.held for s in one] for one in lists]
        return Consumer(
            parameters=parameters,
            placements=list(map(placements_of, parameters)),
            names=[[s.entry.family for s in one] for one in lists],
            shares=lists,
            cuts=[{i: s for i, s in enumerate(one) if s.bytes != s.entry.tensor.nbytes} for one in lists],
            targets=[[[targets[slot] for targets in one] for one in found] for slot in range(len(record.flats))],
            members=list(map(id, members)),
            others=[p for p in members if not p.requires_grad],
            frozen=[names[id(p)] for p in members if not p.requires_grad],
            scalars=[(name, record.targets(item)) for (i, name), item in content.calls.items() if i == index],
        )

    return Form(
        record=record,
        values=Values.on(record, content.small),
        heavy=heavy,
        consumers=[consumer(i) for i in range(len(subjects.optimizers))],
        fields=[
            Field(key, name, tuple(s.entry.tensor.shape), s.first, s.rows, record.targets(s))
            for (key, name), s in content.packed.items()
        ],
        buffers={key: list(map(id, parameters)) for key, (parameters, _) in packed.items()},
        digest=record.targets(content.digest),
        digested=StateDigest(shape.shares),
        shape=shape,
        listing=shape.listing,
        loose=[e for e in shape.listing.entries if e.gate is None and not e.at_cut and e.name not in written],
    )


def _buffer(parameters: Sequence[Tensor], names: dict[int, str]) -> PackedBuffer:
    return PackedBuffer(
        dtype=DTYPES[parameters[0].dtype],
        device=parameters[0].device.type,
        members=tuple((names[id(p)], tuple(p.shape)) for p in parameters),
    )


def tree_of_base(tree: dict[str, Any]) -> dict[str, Any]:
    """A record's tree as a base of its step would have it."""
    return {key: value for key, value in tree.items() if key not in _ONLY_IN_RECORDS}


def _gradient_of(entry: Entry) -> Entry:
    return Entry(
        name=f"{GRADIENT}{entry.name}", tensor=entry.tensor, gate=None, at_cut=True, common=entry.common,
        family=entry.name, box=entry.box, given=entry.given,
    )  # fmt: skip


def _private(name: str, value: Tensor, *, common: bool = False) -> Entry:
    return Entry(name=name, tensor=value, gate=None, at_cut=True, common=common, family=name)


def _whole(entry: Entry) -> Share:
    return Share(entry, 0, entry.tensor.shape[0] if entry.tensor.dim() else 1)


def _part(name: str, value: Tensor, topology: Topology) -> Share:
    """All ranks have the same packed form: each keeps a part of it."""
    rows = value.shape[0] if value.dim() else 1
    first, last = (rows * rank // topology.world for rank in (topology.rank, topology.rank + 1))
    return Share(_private(name, value, common=True), first, last - first)


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


def _by_kind(shares: Sequence[Share]) -> list[list[Share]]:
    kinds: dict[Any, list[Share]] = {}
    for item in shares:
        tensor = item.entry.tensor
        kinds.setdefault((tensor.device, tensor.dtype, is_sharded(item.entry.held)), []).append(item)
    return list(kinds.values())


def on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def call_of(optimizer: Any, index: int) -> Call:
    """The same as it is recorded, for the self-test."""
    groups = [{k: as_it_is(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return Call(
        optimizer=index, groups=groups, absent=frozenset(), scale=as_it_is(getattr(optimizer, "grad_scale", None)),
        found_inf=as_it_is(getattr(optimizer, "found_inf", None)),
    )  # fmt: skip


def members_of(optimizer: torch.optim.Optimizer) -> list[int]:
    return list(map(id, parameters_of(optimizer)))


def scalar_of(optimizer: Any, name: str) -> Tensor | None:
    if name.startswith("group."):
        _, group, key = name.split(".", 2)
        value: Tensor = optimizer.param_groups[int(group)][key]
        return value
    found: Tensor | None = getattr(optimizer, {"scale": "grad_scale"}.get(name, name), None)
    return found


def fits(found: Entry, wanted: Entry) -> bool:
    a, b = found.tensor, wanted.tensor
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def as_it_is(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
