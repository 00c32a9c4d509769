"""Tensors that several ranks have together: where a rank's part of one lies, and who else has the same part.

`torch.distributed.tensor.DTensor` is what FSDP2, HSDP and tensor parallelism make of parameters, gradients and
optimizer states. A rank's part is a box of the whole tensor, and which one follows from placements and mesh alone, so
nobody is asked. Where a mesh replicates, ranks have the same box: they are its sharers, in the order of the mesh.

Knows torch's private places where FSDP keeps sharded parameters, because modules have whole ones while they compute.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everstep.errors import BadConfig


@dataclass(frozen=True, slots=True)
class Sharers:
    """Ranks that have the same: which of them this one is. Equal `group`s mean the same ranks on every rank."""

    group: object
    index: int
    count: int


ALONE = Sharers("alone", 0, 1)


@dataclass(frozen=True, slots=True)
class Box:
    """Where a rank's tensor lies in a larger one."""

    shape: tuple[int, ...]  # of the larger one
    start: tuple[int, ...]
    sharers: Sharers


_PLAIN = (nn.Parameter, Tensor)  # as nearly all are: to look further would take longer than all else that is asked


def is_sharded(value: object) -> bool:
    """Whether it is a DTensor."""
    return type(value) not in _PLAIN and isinstance(value, _loaded("torch.distributed.tensor", "DTensor"))


def _loaded(module: str, name: str) -> tuple[type, ...]:
    """A type of a module that takes long to load: nobody has any of it who has not loaded that."""
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in whose memory the tensor lives."""
    part: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def box_of(name: str, tensor: Any) -> Box | None:
    """Which box of a DTensor this rank has; None for a plain tensor. BadConfig if it has none that can be kept."""
    if not is_sharded(tensor):
        return None
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tuple(tensor.shape)
    how = ", ".join(map(str, placements))
    what = f"{name} is placed as {how} on a mesh of {' x '.join(map(str, mesh.shape))} ranks"
    world = torch.distributed.get_world_size()
    if mesh.size() != world:
        raise BadConfig(f"{what}, and there are {world}: which of the others have the same part cannot be known")
    sizes, coordinate = tuple(mesh.shape), mesh.get_coordinate()
    found = located(shape, sizes, coordinate, placements)
    if isinstance(found, str):
        raise BadConfig(f"{what}, which cannot be captured: {found}")
    start, extent = found
    if extent != tuple(tensor._local_tensor.shape):
        raise BadConfig(f"{what}, and has {tuple(tensor._local_tensor.shape)} here where {extent} was expected")
    return Box(shape, start, sharers_at(tuple(mesh.mesh.flatten().tolist()), sizes, coordinate, placements))


def sharers_at(
    ranks: tuple[int, ...], mesh: tuple[int, ...], coordinate: Sequence[int], placements: Sequence[Any]
) -> Sharers:
    """Who has the same box as the one at a place of a mesh of these ranks: all along the dimensions that replicate."""
    replicated = tuple(dim for dim, placement in enumerate(placements) if placement.is_replicate())
    index, count = 0, 1
    for dim in replicated:
        index, count = index * mesh[dim] + coordinate[dim], count * mesh[dim]
    return Sharers((ranks, mesh, replicated), index, count)


def located(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: Sequence[int], placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]] | str:
    """Start and extent of the box that is at a place of the mesh; or why there is none.

    Each placement cuts what the one before has left, into parts that are alike but for the last ones.
    """
    start, extent = [0] * len(shape), list(shape)
    strided: dict[int, list[int]] = {}  # dimension -> places of the mesh dimensions that cut it
    for place, placement in enumerate(placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            return f"{placement} is neither a part nor a copy of it"
        if not 0 <= placement.dim < len(shape):
            return f"{placement} cuts a dimension that it has not"
        strided.setdefault(placement.dim, []).append(place)
    for dim, places in strided.items():
        if all(type(placements[place]).__name__ == "Shard" for place in places):
            for place in places:
                most = -(-extent[dim] // mesh[place])
                first = min(extent[dim], coordinate[place] * most)
                start[dim], extent[dim] = start[dim] + first, min(most, extent[dim] - first)
            continue
        rows = _strided_rows(shape[dim], [(mesh[place], coordinate[place], placements[place]) for place in places])
        if isinstance(rows, str):
            return rows
        start[dim], extent[dim] = rows
    return tuple(start), tuple(extent)


def _strided_rows(rows: int, cuts: list[tuple[int, int, Any]]) -> tuple[int, int] | str:
    """First and number of the rows that are left of some, where FSDP has cut what tensor parallelism had cut before."""
    left = torch.arange(rows)
    for parts, mine, placement in cuts:
        times = getattr(placement, "split_factor", 1)
        if len(left) % (parts * times):
            return f"{rows} rows cannot be cut evenly, and then where strided parts lie depends on the release of torch"
        left = left.view(times, parts, -1)[:, mine].reshape(-1)
    if len(left) and int(left[-1] - left[0]) != len(left) - 1:
        return "its rows on this rank do not lie side by side"
    return (int(left[0]) if len(left) else 0), len(left)


# -- where sharded parameters are while modules compute


def check_modules(name: str, model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, _loaded("torch.distributed.fsdp", "FullyShardedDataParallel")):
            raise BadConfig(
                f"{name} is under FullyShardedDataParallel, whose parts are cuts through flattened parameters; "
                "use torch.distributed.fsdp.fully_shard"
            )


def sharded_parameters(model: nn.Module) -> dict[tuple[int, str], dict[str, Any]]:
    """Of parameters that FSDP puts whole into modules for a while: by module and key, who has the sharded one.

    The holder has it under the key SHARDED, whatever the module shows.
    """
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for one in (one for group in fsdp_groups(model) for one in group.fsdp_params):
        info = one._module_info
        found[id(info.module), info.param_name] = vars(one)
        for other, key in zip(info.shared_modules, info.shared_param_names, strict=True):
            found[id(other), key] = vars(one)
    return found


def fsdp_modules(model: nn.Module) -> list[Any]:
    kind = _loaded("torch.distributed.fsdp", "FSDPModule")
    return [module for module in model.modules() if isinstance(module, kind)] if kind else []


def fsdp_groups(model: nn.Module) -> list[Any]:
    """Parameters that FSDP gathers and reduces together."""
    found: dict[int, Any] = {}
    for module in fsdp_modules(model):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        found |= {id(group): group for group in groups if group is not None}
    return list(found.values())


SHARDED = "sharded_param"


def has_sharded(model: nn.Module) -> bool:
    """Whether any of its parameters is a DTensor, wherever that is at the moment."""
    return bool(sharded_parameters(model)) or any(map(is_sharded, model.parameters()))


# -- optimizers that have the state of some parameters only


def is_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ranks have taken the optimizer's state apart among them, each parameter whole on one of them."""
    return isinstance(optimizer, _loaded("torch.distributed.optim", "ZeroRedundancyOptimizer"))


def stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Who has the state: the optimizer itself, or the one that works for it on this rank."""
    inner: torch.optim.Optimizer = optimizer.optim if is_zero(optimizer) else optimizer  # type: ignore[attr-defined]
    return inner


def check_optimizer(optimizer: Any) -> None:
    if is_zero(optimizer) and optimizer._overlap_with_ddp:
        raise BadConfig(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps inside the backward pass, bucket by bucket, where "
            "its state cannot be gated; leave overlap_with_ddp out"
        )


def check_state(name: str, value: Any, parameter: Any) -> None:
    """A DTensor of an optimizer comes back as its parameter is placed: it must lie like that."""
    alike = is_sharded(parameter) and is_sharded(value)
    if is_sharded(value) and not (alike and (value.shape, value._spec) == (parameter.shape, parameter._spec)):
        raise BadConfig(f"{name} is a DTensor of another shape or placement than its parameter, which cannot be kept")


def check_plain_state(name: str, value: object, optimizer: torch.optim.Optimizer) -> None:
    if value is not None and is_zero(optimizer):
        raise BadConfig(f"{name} is no tensor, and ZeroRedundancyOptimizer has it on one rank only: it cannot be kept")


def box_of_state(optimizer: torch.optim.Optimizer, value: Tensor) -> Box | None:
    """Of a state that is whole, and on this rank only."""
    return Box(tuple(value.shape), (0,) * value.dim(), ALONE) if is_zero(optimizer) else None
