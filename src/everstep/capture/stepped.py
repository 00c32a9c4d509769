"""What this rank's optimizers step: of every parameter the part that lies here, with its state and its gradient.

Of a DTensor that is the rank's own box, of an optimizer that ranks have taken apart the parameters that it has here,
and otherwise all of it. An update of single elements does not know which of these it is, so it can be repeated on plain
tensors, without a mesh and without the other ranks; `why_no_log` names those that cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

from everstep.capture.layout import Subjects, own_state
from everstep.capture.sharded import box_of, is_sharded, local_of, stepping
from everstep.capture.update import is_elementwise, parameters_of
from everstep.types import Place

_grad, _layout = attrgetter("grad"), attrgetter("layout")
_local = attrgetter("_local_tensor")
_placed = attrgetter("_spec.placements")
ELSEWHERE = "a gradient is placed otherwise than its parameter, so optimizer.step() itself asks other ranks"


class Stepped(NamedTuple):
    group: int
    parameter: Tensor  # as the program has it, which is what its state is found by
    local: Tensor  # what is stepped here


def stepped_by(optimizer: optim.Optimizer) -> list[Stepped]:
    """What this rank steps for an optimizer."""
    groups = enumerate(stepping(optimizer).param_groups)
    return [Stepped(g, parameter, local_of(parameter)) for g, group in groups for parameter in group["params"]]


def local_state(optimizer: optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """A parameter's state as far as it lies here."""
    state = stepping(optimizer).state.get(parameter, {})
    return {key: local_of(value) if isinstance(value, Tensor) else value for key, value in state.items()}


def places(subjects: Subjects) -> dict[str, Place] | None:
    """Which part of which parameter is stepped here; None if every rank steps all of them."""
    if not subjects.what_is_sharded():
        return None
    names, found = subjects.names(), dict[str, Place]()
    for _, parameter, local in (one for optimizer in subjects.optimizers for one in stepped_by(optimizer)):
        name = names[id(parameter)]
        box = box_of(name, parameter)
        start = box.start if box is not None else (0,) * local.dim()
        found[name] = Place(tuple(parameter.shape), start, tuple(local.shape))
    return found


def why_no_log(subjects: Subjects) -> str:
    """Why no record can hold what the optimizers consume; empty if ranks can record what they have of it."""
    seen: set[int] = set()
    for optimizer in subjects.optimizers:
        if own_state(optimizer):
            return f"{type(optimizer).__qualname__} has a state_dict() of its own, and its step may need what is in it"
        for parameter in parameters_of(optimizer):
            if id(parameter) in seen:
                return f"{subjects.names()[id(parameter)]} is in two optimizers"
            seen.add(id(parameter))
    what = subjects.what_is_sharded()
    if not what:
        return ""
    for optimizer in subjects.optimizers:
        kind = type(stepping(optimizer)).__qualname__
        if not is_elementwise(stepping(optimizer)):
            return f"{what}, and {kind} is not known to update every element by itself"
        for parameter in parameters_of(optimizer):
            if is_sharded(parameter) and not parameter.dim():
                return f"{what}, and {subjects.names()[id(parameter)]} has no dimension that it could be cut along"
    return ""


def placements_of(parameters: Sequence[Tensor]) -> list[Any] | None:
    """How DTensors are placed; None for plain tensors."""
    return list(map(_placed, parameters)) if parameters and is_sharded(parameters[0]) else None


def gradients_of(parameters: Sequence[Tensor], placements: list[Any] | None) -> list[Tensor | None] | str:
    """What an optimizer is about to see of these on this rank; or why that cannot be recorded.

    All of `parameters` are DTensors that are placed so, or all are plain.
    """
    found: list[Tensor | None] = list(map(_grad, parameters))
    if placements is not None:
        found = _locals(found, placements)
        if not found:
            return ELSEWHERE
    there = [g for g in found if g is not None] if has_none(found) else found
    if set(map(_layout, there)) - {torch.strided}:
        return "a gradient is sparse"
    return found


def has_none(gradients: Sequence[Tensor | None]) -> bool:
    """Asked in every step, of every parameter: without a line of Python for each."""
    return any(map(is_, gradients, repeat(None)))


def _locals(gradients: list[Any], placements: list[Any]) -> list[Tensor | None]:
    """This rank's part of each; none at all if one is placed otherwise."""
    there = [g for g in gradients if g is not None]
    is_whole = len(there) == len(gradients)
    wanted = placements if is_whole else [p for p, g in zip(placements, gradients, strict=True) if g is not None]
    if list(map(_placed, there)) != wanted:
        return []
    parts = list(map(_local, there))
    if set(map(type, parts)) - {Tensor}:  # those that are still on their way, as functional collectives give them
        parts = [part.wait() if hasattr(part, "wait") else part for part in parts]
    each = iter(parts)
    return parts if is_whole else [None if g is None else next(each) for g in gradients]
