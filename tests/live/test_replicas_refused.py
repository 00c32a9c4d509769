"""Which models cannot go on in another group is said when a run begins; and that replicas are counted right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor

import everstep
from everstep.capture.layout import Subjects
from everstep.errors import BadConfig, Restart
from everstep.live.replicas import move, ranks_of_replica, weigh_parts


@pytest.fixture(autouse=True)
def spare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that takes itself for the first of four ranks."""
    monkeypatch.setenv("EVERSTEP_SPARE", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    everstep.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def replicas() -> nn.Module:
    return fully_shard(nn.Linear(4, 4), mesh=mesh_of(2, 2))


def tensor_parallel() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight, mesh_of(4), [Shard(0)]))
    return model


def over_tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight, mesh["tp"], [Shard(1)]))
    return fully_shard(model, mesh=mesh["shard"])


def out_of_order() -> nn.Module:
    mesh = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("replicate", "shard"))
    return fully_shard(nn.Linear(4, 4), mesh=mesh)


def of_two_shapes() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh_of(2, 2))
    return fully_shard(model, mesh=mesh_of(1, 4))


def resharded() -> nn.Module:
    return fully_shard(nn.Linear(4, 4), mesh=mesh_of(4), reshard_after_forward=2)


@pytest.mark.parametrize(
    ("make", "ranks"),
    [(lambda: nn.Linear(4, 4), 1), (replicas, 2), (lambda: fully_shard(nn.Linear(4, 4)), 4)],
    ids=["whole", "replicas", "one"],
)  # fmt: skip
def test_a_replica_has_as_many_ranks_as_have_the_state_together(make: Callable[[], nn.Module], ranks: int) -> None:
    model = make()
    assert ranks_of_replica(Subjects(models=[model], optimizers=[torch.optim.SGD(model.parameters())])) == ranks


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (tensor_parallel, "weight is a DTensor that fully_shard has not made"),
        (out_of_order, r"a mesh has ranks \[\[0, 2\], \[1, 3\]\], which are not all of them in their order"),
        (of_two_shapes, r"its meshes have different shapes: \[\(1, 4\), \(2, 2\)\]"),
        (over_tensor_parallel, "fully_shard was laid over tensor parallelism"),
        (resharded, "reshard_after_forward=N has made a mesh of its own"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_move_to_another_group_is_refused(
    tmp_path: Path, make: Callable[[], nn.Module], reason: str
) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(BadConfig, match=f"on_loss cannot go on with this model, since {reason}; leave it out"):
        everstep.guard(model, optimizer, [1], dir=tmp_path / "run", on_loss=["spare", "rollback"])


def become_one_of(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.destroy_process_group()
    monkeypatch.setenv("WORLD_SIZE", str(world))
    everstep.init_process_group("gloo")


def test_a_factor_that_was_chosen_for_another_number_of_ranks_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replicas()
    model.set_gradient_divide_factor(4.0)
    subjects = Subjects(models=[model], optimizers=[torch.optim.SGD(model.parameters())])
    become_one_of(4, monkeypatch)
    move(subjects)
    become_one_of(2, monkeypatch)
    with pytest.raises(Restart, match="chosen for another number of ranks"):
        move(subjects)


def test_unequal_shares_are_refused_where_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP does not ask for the reduction in which they are weighed."""
    model = fully_shard(nn.Linear(4, 4), mesh=mesh_of(4, 1))
    subjects = Subjects(models=[model], optimizers=[torch.optim.SGD(model.parameters())])
    weigh_parts(subjects, None)
    with pytest.raises(Restart, match="batch='shrink'"):
        weigh_parts(subjects, 0.4)


def test_an_optimizer_whose_state_ranks_have_taken_apart_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(BadConfig, match="since ranks have taken the state of ZeroRedundancyOptimizer apart"):
        everstep.guard(model, optimizer, [1], dir=tmp_path / "run", on_loss=["spare"])


def test_a_step_of_replicas_cannot_be_finished_without_the_lost(tmp_path: Path) -> None:
    model = replicas()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(BadConfig, match="on_loss='forward' needs a model under DistributedDataParallel"):
        everstep.guard(model, optimizer, [1], dir=tmp_path / "run", on_loss=["forward", "rollback"])
