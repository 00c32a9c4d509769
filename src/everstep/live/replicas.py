"""Models that ranks have in parts: how many of them have a whole one together, and how FSDP goes on in another group.

FSDP takes its process groups from a mesh, and notes them in many places; so do the placements of all that it has cut,
and what torch remembers of operations on them. So a mesh is not replaced but becomes another where it is, and whoever
has noted groups of it notes them anew. A replica is a row of the mesh, and keeps its length: with fewer ranks there are
fewer rows.

Knows torch's private places, as they are in the releases that have `reset_iter_state`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from everstep import topology
from everstep.capture.layout import Subjects
from everstep.capture.sharded import fsdp_groups, fsdp_modules, is_sharded, is_zero, local_of, sharded_parameters
from everstep.errors import BadConfig, Restart


def ranks_of_replica(subjects: Subjects) -> int:
    """How many ranks have the whole state together; 1: each of them has. BadConfig if it cannot move."""
    groups = _groups(subjects)
    reason = _obstacle(subjects, groups)
    if reason:
        raise BadConfig(f"on_loss cannot go on with this model, since {reason}; leave it out")
    return max((mesh.size(mesh.ndim - 1) for mesh in _meshes(groups)), default=1)


def _groups(subjects: Subjects) -> list[Any]:
    return [group for _, model in subjects.named_modules() for group in fsdp_groups(model)]


def _meshes(groups: Iterable[Any]) -> list[Any]:
    """In the same order on all ranks."""
    return list({id(group.mesh_info.mesh): group.mesh_info.mesh for group in groups}.values())


def _obstacle(subjects: Subjects, groups: list[Any]) -> str:
    if any(map(is_zero, subjects.optimizers)):
        return "ranks have taken the state of ZeroRedundancyOptimizer apart among them"
    for _, model in subjects.named_modules():
        cut = {id(holder["sharded_param"]) for holder in sharded_parameters(model).values()}
        for name, parameter in model.named_parameters():
            if is_sharded(parameter) and id(parameter) not in cut:
                return f"{name} is a DTensor that fully_shard has not made"
        if any(not hasattr(module, "reset_iter_state") for module in fsdp_modules(model)):
            return f"FSDP of torch {torch.__version__} cannot forget a broken step (it has no reset_iter_state)"
    for group in groups:
        if any(one.is_dtensor for one in group.fsdp_params):
            return "fully_shard was laid over tensor parallelism"
        if any(one.mesh_info is not group.mesh_info for one in group.fsdp_params):
            return "shard_placement_fn has placed parameters on meshes of their own"
        if group.mesh_info.shard_mesh_dim is None:
            return "FSDP was told to copy it, and not to cut it"
        if group.post_forward_mesh_info not in (None, group.mesh_info):
            return "reshard_after_forward=N has made a mesh of its own"
        if group.mesh_info.reduce_scatter_process_group is not None:
            return "set_separate_reduce_scatter_group has made groups of its own"
    for mesh in _meshes(groups):
        if mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
            return f"a mesh has ranks {mesh.mesh.tolist()}, which are not all of them in their order"
    shapes = {tuple(mesh.shape) for mesh in _meshes(groups)}
    return f"its meshes have different shapes: {sorted(shapes)}" if len(shapes) > 1 else ""


def move(subjects: Subjects) -> None:
    """To the present group. What a broken step has left is dropped, and nobody has gradients any more."""
    groups = _groups(subjects)
    how = topology.formed()
    if not groups or how is None:
        return
    _forget_step(subjects, groups)
    world, meshes = dist.get_world_size(), _meshes(groups)
    for group in groups:
        if group.gradient_divide_factor is not None and world != group.mesh_info.mesh.size():
            raise Restart("set_gradient_divide_factor was chosen for another number of ranks")
    with how.wires.noting(world):
        _become_others(meshes, world)
    for group in groups:
        group.mesh_info.__post_init__()  # which asks the mesh for its groups
        for one in group.fsdp_params:
            _take_part(one)
    for optimizer in subjects.optimizers:
        _take_parts_of_states(optimizer)


def weigh_parts(subjects: Subjects, share: float | None) -> None:
    """Let gradients be averaged by the ranks' shares of the global batch. None: all have the same."""
    for group in _groups(subjects):
        comm = group._reduce_scatter_comm
        group._reduce_scatter_comm = comm = comm.comm if isinstance(comm, _Weighed) else comm
        if share is not None and group.mesh_info.shard_mesh_size == 1:
            raise Restart("batches cannot be divided unequally where FSDP cuts nothing; use batch='shrink'")
        if share is not None:
            group._reduce_scatter_comm = _Weighed(comm, share * dist.get_world_size())


@dataclass(frozen=True, slots=True)
class _Weighed:
    """What FSDP reduces gradients with, and afterwards takes the average of all ranks."""

    comm: Any
    weight: float

    def allocate(self, *size: Any, **how: Any) -> torch.Tensor:
        made: torch.Tensor = self.comm.allocate(*size, **how)
        return made

    def __call__(self, *, input_tensor: torch.Tensor, **how: Any) -> Any:
        return self.comm(input_tensor=input_tensor.mul_(self.weight), **how)


def _forget_step(subjects: Subjects, groups: list[Any]) -> None:
    for group in groups:
        group._all_gather_result = None  # it has failed, or was never waited for
        for one in group.fsdp_params:
            one.sharded_param.grad = one.unsharded_accumulated_grad = None
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None  # which FSDP would add to
    for _, model in subjects.named_modules():
        for module in fsdp_modules(model):
            if module._get_fsdp_state()._is_root:
                module.reset_iter_state()


def _become_others(meshes: list[Any], world: int) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    made: dict[object, Any] = {}
    for mesh in meshes:
        kind = (mesh.device_type, mesh.ndim, mesh.mesh_dim_names)
        if kind not in made:
            ranks = torch.arange(world).view(-1, mesh.size(1)) if mesh.ndim == 2 else torch.arange(world)
            made[kind] = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=mesh.mesh_dim_names)
        vars(mesh).clear()
        vars(mesh).update(vars(made[kind]))
    _clear_sharding_prop_cache()  # what is remembered may hold the sizes of another place in the mesh


def _take_part(one: Any) -> None:
    """Of a parameter, the part of this rank's place in the mesh; whoever stood by had another. It is restored later."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    one._shard_mesh = one._init_shard_mesh()
    one.reset_sharded_param()  # the program may have replaced it since it was cut
    dim, info = one.fsdp_placement.dim, one.mesh_info
    whole = torch.empty(one._orig_size, device="meta")
    chunk = common._chunk_with_empty(whole, info.shard_mesh_size, dim)[info.shard_mesh_rank]
    size = common._get_dim_chunked_size(chunk, one._orig_size, dim)
    if size != one.sharded_size:
        one.sharded_size = size
        one.contiguous_sharded_stride = torch._prims_common.make_contiguous_strides_for(size)
        padded = one._sharded_param_data.view(one.padded_sharded_param_size)
        one.sharded_param._local_tensor = padded.narrow(dim, 0, size[dim])


def _take_parts_of_states(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for value in state.values() if is_sharded(parameter) else ():
            if is_sharded(value) and local_of(value).shape != local_of(parameter).shape:
                value._local_tensor = torch.zeros_like(local_of(parameter), dtype=value.dtype)
