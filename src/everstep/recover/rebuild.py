"""A step without the ranks that trained it: a base, and the steps after it repeated, each old rank's part as it was.

For readers, who have no program, on the host: optimizers of torch are made anew from what the base says of them; those
of others need their program. The host may round otherwise than the device that trained, so digests decide; who reads is
told. And for a program whose ranks have other parts than those that trained had: there its own optimizers repeat them.

What one rank stepped as one tensor is stepped so again, because where a kernel cuts a tensor may decide its last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import msgspec
import torch
from torch import Tensor, nn

from everstep.capture.bits import same_bits
from everstep.capture.form import tree_of_base
from everstep.capture.layout import DTYPES, Subjects, is_state, optimizer_name
from everstep.capture.sharded import stepping
from everstep.capture.update import has_rows, over
from everstep.capture.update import rebuild as by_name
from everstep.errors import Damaged, Diverged, EverstepError
from everstep.recover.assemble import Checkpoint
from everstep.recover.chain import Chain
from everstep.recover.replay import Proof, advance, as_many_threads
from everstep.store.manifest import uncovered
from everstep.topology import Topology
from everstep.types import OptimizerInfo, Piece, Place

_ALONE = Topology(rank=0, world=1, node="")

Base = Callable[[int], Checkpoint]  # all of a base, as one of the old ranks sees it


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    checkpoint: Checkpoint
    base: int  # the step that it was repeated from
    proven: int | None  # the newest step that a digest proved
    foreign: str  # the kinds of device that trained, if that was not the host
    updated: frozenset[str]  # the tensors that were repeated


class NeedsProgram(EverstepError):
    """Steps of an optimizer that only the user's program has."""


def rebuild(base: Base, chain: Chain, rank: int) -> Rebuilt:
    """For readers: what a chain leads to, as one of the old ranks has it. Diverged if a digest says otherwise."""
    foreign = " and ".join(kind for kind in chain.last.info.devices if kind != "cpu")
    try:
        return replace(advanced(base, chain, rank), foreign=foreign)
    except Diverged as error:
        advice = f"It was trained on {foreign}, and the host rounds otherwise." if foreign else ""
        raise (Diverged(error.step, error.proven, advice) if advice else error) from None
    except (RuntimeError, ValueError, AssertionError) as error:
        if not foreign:
            raise
        raise EverstepError(f"updates on {foreign} cannot be repeated on the host: {error}") from error


def advanced(
    base: Base, chain: Chain, own: int, *, program: Subjects | None = None, compares: bool = False, proves: bool = True
) -> Rebuilt:
    """What a chain leads to, as `own` of the old ranks has it; by the program's optimizers, if there is a program.

    `compares`: find out what is each old rank's own and not alike, because another number of ranks goes on with it.
    """
    consumed = chain.consumed if proves else [replace(one, digest=None) for one in chain.consumed]
    mine, parts = base(own), _Parts(own, compares)
    proof = Proof(consumed, parts.counts)
    for rank in (own, *(one for one in chain.stepped if one != own)):
        view = mine if rank == own else base(rank)
        stepped = chain.stepped[rank]
        places = stepped if stepped is not None else everything(view)
        names = parts.begin(rank, view, places)
        if names:
            subjects = subjects_of(view, {name: places[name] for name in names}, program)
            with as_many_threads(chain.last.extras):
                advance(subjects, consumed if rank == own else chain.consumed_by(rank), _ALONE, proof)
            parts.take(subjects)
    proven = proof.verdict(_ALONE)
    found = Checkpoint(
        step=chain.last.step, world=mine.world, info=mine.info, own=mine.own, pieces=dict(mine.pieces),
        extras=tree_of_base(chain.last.extras), unlike=sorted({*mine.unlike, *parts.unlike}),
    )  # fmt: skip
    for name, pieces in chain.last.pieces.items():
        found.pieces[name] = [(piece, part.clone()) for piece, part in pieces]
    found.pieces |= parts.pieces
    missing = uncovered(tuple(piece for piece, _ in pieces) for pieces in found.pieces.values())
    if missing is not None:
        raise Damaged(f"records do not lead to a whole checkpoint: {missing}", step=found.step)
    return Rebuilt(checkpoint=found, base=mine.step, proven=proven, foreign="", updated=frozenset(parts.pieces))


def everything(base: Checkpoint) -> dict[str, Place]:
    """What a rank steps that has all of every parameter."""
    names = (name for info in base.info.optimizers for group in info.groups for name in group)
    shapes = {name: base.kind(name).shape for name in names}
    return {name: Place(shape, (0,) * len(shape), shape) for name, shape in shapes.items()}


@dataclass(slots=True)
class _Parts:
    """The repeated parts of old ranks, put together: each box once, and of what is a rank's own that of `own`."""

    own: int
    compares: bool
    pieces: dict[str, list[tuple[Piece, Tensor]]] = field(default_factory=dict)
    unlike: set[str] = field(default_factory=set)
    _boxes: set[tuple[str, Place]] = field(default_factory=set)  # that were repeated
    _rank: int = -1  # whose parts come now,
    _base: Checkpoint | None = None
    _places: dict[str, Place] = field(default_factory=dict)
    _fresh: set[str] = field(default_factory=set)  # and which of its parameters nobody before it had

    def begin(self, rank: int, base: Checkpoint, places: dict[str, Place]) -> list[str]:
        """The parameters of a rank that must be repeated."""
        self._rank, self._base, self._places = rank, base, places
        self._fresh = {
            name
            for name, place in places.items()
            if (name, place) not in self._boxes and (rank == self.own or not base.kind(name).private)
        }
        self._boxes |= {(name, places[name]) for name in self._fresh}
        own = {name for name in places if base.kind(name).private} if self.compares else set()
        return [name for name in places if name in self._fresh or name in own]

    def counts(self, name: str, has_place: bool) -> bool:
        """Whether a tensor of the present rank goes into the digest: each once, and what is a rank's own of `own`.

        `has_place`: it lies where its parameter does, row by row.
        """
        is_mine = self._rank == self.own or not self._is_private(name, has_place)
        return _parameter_of(name) in self._fresh and is_mine

    def _is_private(self, name: str, has_place: bool) -> bool:
        assert self._base is not None
        if name in self._base.pieces:
            return self._base.kind(name).private
        place = self._places[_parameter_of(name)]
        return not has_place and place.extent != place.shape  # made since: a counter beside a part is each rank's own

    def take(self, subjects: Subjects) -> None:
        """The present rank's parameters and their state are as of the last step."""
        parameters = {entry.name: entry.tensor for entry in subjects.listing().entries if entry.name in self._places}
        for entry in subjects.listing().entries:
            parameter, tensor = _parameter_of(entry.name), entry.tensor.detach().cpu()
            has_place = entry.name == parameter or has_rows(entry.tensor, parameters[parameter])
            piece = _piece(entry.name, tensor, self._places[parameter] if has_place else None)
            if self.counts(entry.name, has_place):
                if has_place or entry.name not in self.pieces:
                    self.pieces.setdefault(entry.name, []).append((piece, tensor))
            elif self.compares and self._is_private(entry.name, has_place):
                known = self.pieces.get(entry.name)
                if known is None or not same_bits(tensor, known[0][1]):
                    self.unlike.add(entry.name)


def _parameter_of(name: str) -> str:
    """The parameter that a name is of, or of whose state."""
    return name.partition(".state.")[2].rpartition(".")[0] if is_state(name) else name


def _piece(name: str, tensor: Tensor, place: Place | None) -> Piece:
    shape = tuple(tensor.shape)
    place = place or Place(shape, (0,) * len(shape), shape)
    return Piece(
        name=name, dtype=DTYPES[tensor.dtype], shape=place.shape, start=place.start, extent=place.extent, offset=0,
        length=tensor.nbytes,
    )  # fmt: skip


def subjects_of(checkpoint: Checkpoint, places: dict[str, Place], program: Subjects | None = None) -> Subjects:
    """What optimizers step of a checkpoint, as objects of a program that is not there, or is laid out otherwise.

    Without a program all is on the host; else its optimizers are there, over these tensors instead of their own.
    """
    devices = {name: parameter.device for name, parameter in _parameters(program)} if program is not None else {}
    on_host = set(checkpoint.info.on_host)
    models: dict[str, nn.Module] = {"model": nn.Module()}
    parameters: dict[str, nn.Parameter] = {}
    for name, place in places.items():
        parameters[name] = nn.Parameter(checkpoint.part(name, place).to(devices.get(name, "cpu")))
        whose, _, rest = name.partition(".")
        if whose == "extra":
            key, _, rest = rest.partition(".")
            whose = f"extra.{key}"
        if whose != "optimizer":  # its own parameters are named by their place in it
            models.setdefault(whose, nn.Module())._parameters[rest] = parameters[name]
    infos = checkpoint.info.optimizers
    optimizers: list[torch.optim.Optimizer] = []
    made: dict[tuple[str, Place | None], Tensor] = {}  # parameters may have one in common
    for i, (info, saved) in enumerate(zip(infos, checkpoint.extras["optimizers"], strict=True)):
        held = tuple(tuple(name for name in group if name in places) for group in info.groups)
        tensors = checkpoint.state_names(optimizer_name(i, len(infos)))
        state: dict[str, dict[str, object]] = {}
        for name in (name for group in held for name in group):
            state[name] = dict(saved["plain"].get(name, {}))
            for key, full in tensors.get(name, {}).items():
                rows = places[name] if _has_rows(checkpoint, full, places[name]) else None
                if (full, rows) not in made:
                    value = checkpoint.tensor(full) if rows is None else checkpoint.part(full, rows)
                    made[full, rows] = value.to("cpu" if full in on_host else devices.get(name, "cpu"))
                state[name][key] = made[full, rows]
        if program is None:
            mine = msgspec.structs.replace(info, groups=held)
            optimizers.append(_by_name(mine, parameters, saved["groups"], state))
        else:
            groups = {g: [parameters[name] for name in group] for g, group in enumerate(held)}
            known = {parameters[name]: values for name, values in state.items() if values}
            optimizers.append(over(stepping(program.optimizers[i]), groups, known))
    extras = {whose.removeprefix("extra."): model for whose, model in models.items() if whose != "model"}
    return Subjects(models=[models["model"]], optimizers=optimizers, modules=extras)


def _by_name(
    info: OptimizerInfo, parameters: dict[str, nn.Parameter], groups: list[dict[str, object]],
    state: dict[str, dict[str, object]],
) -> torch.optim.Optimizer:  # fmt: skip
    try:
        return by_name(info, parameters, groups, state)
    except EverstepError as error:
        raise NeedsProgram(str(error)) from error


def _parameters(program: Subjects) -> Iterable[tuple[str, Tensor]]:
    names = program.names()
    groups = (group for optimizer in program.optimizers for group in optimizer.param_groups)
    return ((names[id(parameter)], parameter) for group in groups for parameter in group["params"])


def _has_rows(checkpoint: Checkpoint, full: str, place: Place) -> bool:
    """Whether a state goes with those of its parameter."""
    return bool(place.shape) and checkpoint.kind(full).shape == place.shape


def differs_from(rebuilt: Rebuilt, base: Checkpoint) -> str | None:
    """The first tensor of which a base of the same step has other bits; None if there is none."""
    for name in sorted(rebuilt.updated):
        if name not in base.pieces:
            return name
        mine, other = rebuilt.checkpoint.tensor(name), base.tensor(name)
        if (mine.shape, mine.dtype) != (other.shape, other.dtype) or not same_bits(mine, other):
            return name
    return None
