"""What cannot be kept exactly is refused when the run begins, and what cannot be shared out when it resumes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import laid_out
import pytest
import torch
import torch.distributed as dist
from acts import Act, Scene, differing, perform
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import everstep
from everstep.capture.sharded import Box, box_of
from everstep.capture.stepped import ELSEWHERE
from everstep.errors import BadConfig, Mismatch, Unstorable
from everstep.events import Degraded, read_events


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


def told(scene: Scene) -> set[tuple[str, str]]:
    return {one for began in scene.began for one in began["degraded"]}


NO_LOG, NO_REPLICA = "there is no log, every step is a base", "there is no replica, the run is kept by its log"
SHARDED = "model.first.weight is a DTensor, of which ranks have parts"
ZERO = "ranks have taken the state of ZeroRedundancyOptimizer apart among them"


def test_optimizers_that_look_at_whole_tensors_get_bases_and_a_replica_gives_way_to_a_log(tmp_path: Path) -> None:
    how = {"steps": 2, "model": "Pair"}
    acts = [
        Act("tp", 2, "unknown", strategy="log", optimizer="Unknown", **how),
        Act("zero", 2, "adafactor", strategy="auto", optimizer="Adafactor", **how),
        Act("fsdp", 2, "replica", strategy="replica", breaks=True, **how),
        Act("fsdp", 2, "replica", model="Pair"),
    ]
    unknown, adafactor, replica, again = perform(acts, tmp_path)
    unlike = "is not known to update every element by itself"
    assert told(unknown) == {(NO_LOG, f"{SHARDED}, and Unknown {unlike}")}
    assert told(adafactor) == {(NO_LOG, f"{ZERO}, and Adafactor {unlike}")}
    assert told(replica) == {(NO_REPLICA, SHARDED)}
    assert [began["replayed"] for began in again.began] == [[(1, 1)]] * 2


def test_gradients_that_are_summed_up_inside_the_update_get_bases(world: None, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    run = guarded(tmp_path, DTensor.from_local(torch.ones(3), mesh, [Replicate()]), strategy="log")
    weight = run._state.subjects.optimizers[0].param_groups[0]["params"][0]
    for _ in range(3):
        weight.grad = DTensor.from_local(torch.ones(3), mesh, [Partial()])
        run._state.subjects.optimizers[0].step()
        run.done()
    run.close()
    reason = f"SGD: {ELSEWHERE}"
    assert [e.reason for e in read_events(tmp_path / "run") if isinstance(e, Degraded)] == [reason]
    kept = everstep.open(tmp_path / "run").kept()
    assert kept[-1].step == 3 and all(one.base == one.step for one in kept)


class Late(Own):
    """Ranks are alike until the base, and not after it."""

    steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return super().forward(x) if self.steps > 1 else laid_out.Pair.forward(self, x) + self.own


@pytest.mark.soak
def test_own_values_cannot_be_shared_out_whether_a_base_or_records_have_them(tmp_path: Path) -> None:
    """And come back where they were, to as many ranks as before."""
    kinds = (("tp", "snapshot", "Own"), ("tp", "log", "Late"), ("alone", "log", "Late"))
    acts = []
    for kind, strategy, model in kinds:
        how = {"world": 2, "run": f"{kind}-{strategy}", "model": model}
        acts += [Act(kind, steps=3, strategy=strategy, breaks=strategy == "log", **how), Act(kind, wipe=True, **how)]
    scenes = perform(acts, tmp_path, module="test_refusals")
    for (kind, strategy, _), trained, again in zip(kinds, scenes[::2], scenes[1::2], strict=True):
        for ended, began in zip(trained.ended, again.began, strict=True):
            others = [name for name in differing(ended["state"], began["state"]) if "model.own" in name]
            assert (began["resumed_from"], others) == (3, [])
        assert "model.own" in differing(trained.ended[0]["state"], trained.ended[1]["state"])
        model = Own()
        with pytest.raises(Mismatch, match=r"model\.own: each of 2 ranks had its own value"):
            everstep.guard(
                model, torch.optim.AdamW(model.parameters()), dir=tmp_path / f"{kind}-{strategy}", keeper="inline"
            )
