"""What cannot be kept exactly is refused when the run begins, and what cannot be shared out when it resumes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import laid_out
import pytest
import torch
import torch.distributed as dist
from acts import Act, perform
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import everstep
from everstep.capture.sharded import Box, box_of
from everstep.errors import BadConfig, Mismatch, Unstorable


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    """One process that takes itself for a rank of several."""
    rank, size = getattr(request, "param", (0, 1))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    yield
    dist.destroy_process_group()


def guarded(tmp_path: Path, weight: torch.Tensor, **options: Any) -> everstep.Run:
    model = nn.Module()
    model.weight = nn.Parameter(weight)
    options = {"keeper": "inline", **options}
    return everstep.guard(model, torch.optim.SGD(model.parameters(), lr=0.1), dir=tmp_path / "run", **options)


def test_a_sum_that_is_not_made_yet_is_refused_by_name_and_placement(world: None, tmp_path: Path) -> None:
    weight = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (1,)), [Partial()])
    with pytest.raises(BadConfig, match=r"model\.weight is placed as P.* neither a part nor a copy"):
        guarded(tmp_path, weight)


@pytest.mark.parametrize("world", [(1, 4)], indirect=True)
def test_a_mesh_that_has_only_some_of_the_ranks_is_refused(world: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = DTensor.from_local(torch.ones(2, 3), mesh["tp"], [Shard(0)], run_check=False)
    with pytest.raises(BadConfig, match="mesh of 2 ranks, and there are 4"):
        box_of("model.weight", weight)


@pytest.mark.parametrize("world", [(3, 4)], indirect=True)
def test_a_part_and_those_who_have_it_too_follow_from_the_mesh(world: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    weight = DTensor.from_local(
        torch.ones(2, 3), mesh, [Replicate(), Shard(0)], run_check=False, shape=torch.Size((5, 3)), stride=(3, 1)
    )
    found = box_of("model.weight", weight)
    assert isinstance(found, Box)
    assert (found.shape, found.start, found.sharers.index, found.sharers.count) == ((5, 3), (3, 0), 1, 2)


def test_flattened_parameters_are_refused(world: None, tmp_path: Path) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = FullyShardedDataParallel(nn.Linear(3, 3), device_id=torch.device("cpu"))
    with pytest.raises(BadConfig, match=r"use torch\.distributed\.fsdp\.fully_shard"):
        everstep.guard(model, torch.optim.SGD(model.parameters(), lr=0.1), dir=tmp_path / "run")


def test_an_update_inside_the_backward_pass_is_refused(world: None, tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(BadConfig, match="leave overlap_with_ddp out"):
        everstep.guard(model, optimizer, dir=tmp_path / "run")


def test_a_state_that_lies_otherwise_than_its_parameter_is_refused(world: None, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"mean": DTensor.from_local(torch.ones(3), mesh, [Replicate()])}
    with pytest.raises(BadConfig, match=r"optimizer\.state\.model\.weight\.mean is a DTensor of another"):
        everstep.guard(model, optimizer, dir=tmp_path / "run")


def test_a_state_that_is_no_tensor_and_on_one_rank_only_is_refused(world: None, tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    optimizer.optim.state[model.weight] = {"count": 3}
    with pytest.raises(BadConfig, match=r"optimizer\.state\.model\.weight\.count is no tensor"):
        everstep.guard(model, optimizer, dir=tmp_path / "run")


def test_a_part_among_the_extras_is_refused(world: None, tmp_path: Path) -> None:
    part = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(Unstorable, match=r"extra\.mean"):
        guarded(tmp_path, torch.ones(3), extra={"mean": part})


def test_compressed_gradients_need_a_state_that_all_have(world: None, tmp_path: Path) -> None:
    part = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(BadConfig, match=r"compress= .* model\.weight is a DTensor"):
        guarded(tmp_path, part, compress=everstep.compress.TopK(0.1))


class Own(laid_out.Pair):
    """With a parameter that no mesh knows, and that each rank trains for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.own * (1 + dist.get_rank() if dist.is_initialized() else 1)


def test_a_log_gives_way_to_bases_and_says_so_and_own_values_cannot_be_shared_out(tmp_path: Path) -> None:
    """Two promises, one start of ranks."""
    acts = [Act("tp", 2, "run", steps=3, model="Own", strategy=s) for s in ("log", "auto")]
    acts += [Act("tp", 2, "run", model="Own", wipe=True), Act("single", 1, "other", steps=1, model="Own")]
    scenes = perform(acts, tmp_path, module="test_refusals")
    assert [scene.began[0]["resumed_from"] for scene in scenes] == [None, 3, 6, None]
    told = scenes[1].began[1]["degraded"]
    words = "model.first.weight is a DTensor, of which ranks have parts"
    assert told == [("there is no log, every step is a base", words)] * 4
    values = [began["state"]["model.own"] for began in scenes[2].began]
    assert not torch.equal(*values)  # as each rank had it
    model = Own()
    with pytest.raises(Mismatch, match=r"model\.own: each of 2 ranks had its own value"):
        everstep.guard(model, torch.optim.AdamW(model.parameters()), dir=tmp_path / "run", keeper="inline")
