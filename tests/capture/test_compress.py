"""Compressed gradients: the same bits on every rank and from the packed form, and nothing is lost for ever."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from network import free_port
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from everstep.capture.compress import Bf16, Compressor, Int8, PowerSGD, TopK, communication_hook
from everstep.errors import BadConfig, Mismatch

N = 3000  # no multiple of a block, nor of the number of ranks
MAKERS: dict[str, Callable[[], Compressor]] = {
    "topk": lambda: TopK(0.05),
    "int8": Int8,
    "bf16": Bf16,
    "powersgd": lambda: PowerSGD(rank=2, start=2),
}
every_compressor = pytest.mark.parametrize("kind", MAKERS)
without_group = pytest.mark.parametrize("kind", ["topk", "int8", "bf16"])
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")])


def ranks(world: int, play: Callable[..., None], *words: Any, start: str = "fork") -> None:
    """Let `play(*words)` run in that many processes; an assertion that fails in one of them fails here."""
    mp.start_processes(_rank, args=(world, free_port(), play, words), nprocs=world, start_method=start)


def _rank(rank: int, world: int, port: int, play: Callable[..., None], words: tuple[Any, ...]) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    play(*words)
    dist.destroy_process_group()


def everyone(tensor: Tensor) -> Tensor:
    tensor = tensor.cpu().contiguous()
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.stack(gathered)


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()


def gradient(step: int, rank: int = 0, n: int = N) -> Tensor:
    made = torch.randn(n, generator=torch.Generator().manual_seed(1000 * step + rank))
    return made * torch.logspace(-3, 1, n)  # some elements matter more, as in life


def prepared(kind: str, key: str = "0") -> tuple[Compressor, list[Tensor]]:
    """A compressor that knows the parameters of a buffer of N elements."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((40, 50), (15, 60), (99,), ())]
    assert sum(parameter.numel() for parameter in parameters) == N
    compressor = MAKERS[kind]()
    compressor.bind({id(parameter): f"model.{i}" for i, parameter in enumerate(parameters)})
    compressor.lay_out(key, parameters)
    return compressor, parameters


def residual(compressor: Compressor) -> Tensor:
    state = compressor.state()
    return torch.cat([state[name] for name in sorted(state) if name.startswith("residual.")])


# -- over ranks


def agree_and_lose_nothing(kind: str, dtype: torch.dtype, device: str = "cpu") -> None:
    compressor, _ = prepared(kind)
    rank, world = dist.get_rank(), dist.get_world_size()
    given, applied = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    for step in range(6):
        flat = gradient(step, rank).to(device, dtype)
        given += flat.cpu()
        packed = compressor.reduce(flat, "0", dist.group.WORLD)
        again = torch.full_like(flat, 7.0)
        compressor.unpack(packed, again)
        assert bits(again) == bits(flat), "the packed form gives other bits"
        applied += flat.cpu()
        for tensor in (flat, *packed.values()):
            assert len({bits(other) for other in everyone(tensor)}) == 1, "ranks disagree"
    whole, kept = everyone(given).sum(0), everyone(residual(compressor).double()).sum(0)
    rounding = 1e-5 if dtype is torch.float32 and kind != "bf16" else 2e-2  # what the sum in bf16 rounds off is gone
    assert torch.allclose(whole, world * applied + kept, rtol=rounding, atol=rounding * whole.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", [2, 3])
@every_compressor
def test_ranks_agree_the_packed_form_is_exact_and_nothing_is_lost(kind: str, world: int, dtype: torch.dtype) -> None:
    ranks(world, agree_and_lose_nothing, kind, dtype)


def keep_the_largest() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    k = math.ceil(0.05 * N)
    flat = gradient(1, rank)
    mine = flat.clone()
    packed = TopK(0.05).reduce(flat, "0", dist.group.WORLD)
    sent = torch.zeros(N)
    largest = mine.abs().topk(k).indices
    sent[largest] = mine[largest]
    merged = sum(everyone(sent), torch.zeros(N))
    assert packed["indices"].dtype == torch.int32
    assert packed["indices"].tolist() == sorted(merged.abs().topk(k).indices.tolist())
    assert torch.equal(packed["values"], merged[packed["indices"].long()] / world)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_as_many_elements_are_kept_as_one_rank_would_keep_and_they_are_the_largest(world: int) -> None:
    ranks(world, keep_the_largest)


def settle_ties() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    compressor = TopK(0.25)
    flat = torch.zeros(8)
    flat[[5, 1] if rank == 0 else [2, 7]] = 1.0  # four equal sums, and two may stay
    packed = compressor.reduce(flat, "0", dist.group.WORLD)
    assert packed["indices"].tolist() == [1, 2]
    assert flat.tolist() == [0, 1 / world, 1 / world, 0, 0, 0, 0, 0]
    back = [0.0] * 8
    back[5 if rank == 0 else 7] = 1.0  # sent in vain
    assert compressor.state()["residual.0"].tolist() == back


def test_of_equals_the_lowest_index_stays_and_the_sender_takes_the_other_back() -> None:
    ranks(2, settle_ties)


def cancel_out() -> None:
    flat = torch.zeros(8)
    flat[3], flat[7] = 1.0, 0.5 if dist.get_rank() == 0 else -0.5
    packed = TopK(0.25).reduce(flat, "0", dist.group.WORLD)
    assert packed["indices"].tolist() == [3, 7]
    assert packed["values"].tolist() == [1.0, 0.0]


def test_an_index_is_kept_once_however_many_ranks_sent_it() -> None:
    ranks(2, cancel_out)


def meet_bad_numbers(kind: str, bad: float) -> None:
    compressor, _ = prepared(kind)
    rank = dist.get_rank()
    for step in range(4):
        compressor.reduce(gradient(step, rank), "0", dist.group.WORLD)
    before = {name: bits(tensor) for name, tensor in compressor.state().items() if name[0] in "rq"}
    flat = gradient(4, rank)
    if rank == 1:
        flat[[17, 2500]] = bad
    packed = compressor.reduce(flat, "0", dist.group.WORLD)
    assert not flat.isfinite().all(), "whoever looks for NaN must find it"
    again = torch.zeros(N)
    compressor.unpack(packed, again)
    assert bits(again) == bits(flat)
    assert {name: bits(tensor) for name, tensor in compressor.state().items() if name in before} == before
    flat = gradient(5, rank)
    compressor.reduce(flat, "0", dist.group.WORLD)
    assert flat.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_compressor
def test_a_bad_number_on_one_rank_is_seen_by_all_and_leaves_no_trace(kind: str, bad: float) -> None:
    ranks(2, meet_bad_numbers, kind, bad)


def continue_from_state(kind: str) -> None:
    rank = dist.get_rank()
    whole, _ = prepared(kind)
    for step in range(4):
        whole.reduce(gradient(step, rank), "0", dist.group.WORLD)
    resumed, parameters = prepared(kind)
    resumed.load({name: tensor.clone() for name, tensor in whole.state().items()})
    resumed.lay_out("0", parameters)
    for step in range(4, 7):
        one, other = gradient(step, rank), gradient(step, rank)
        whole.reduce(one, "0", dist.group.WORLD)
        resumed.reduce(other, "0", dist.group.WORLD)
        assert bits(one) == bits(other)
    ends = [{name: bits(tensor) for name, tensor in one.state().items()} for one in (whole, resumed)]
    assert ends[0] == ends[1]


@every_compressor
def test_a_loaded_state_continues_bit_for_bit(kind: str) -> None:
    ranks(2, continue_from_state, kind)


def idle_for_a_step() -> None:
    compressor, _ = prepared("powersgd")
    for step in range(2):
        compressor.reduce(gradient(step), "0", dist.group.WORLD)
    flat = torch.zeros(N)
    compressor.reduce(flat, "0", dist.group.WORLD)
    assert flat.count_nonzero() == 0
    flat = gradient(3)
    compressor.reduce(flat, "0", dist.group.WORLD)
    assert flat.isfinite().all()
    assert flat[:2000].count_nonzero() > 1000, "a matrix of zeros was remembered for ever"


def test_a_step_without_gradient_does_not_stop_powersgd() -> None:
    ranks(1, idle_for_a_step)


# -- under DDP


class Crossed(nn.Module):
    """Used in another order than it is registered in, so that DDP's second buckets differ from its first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first, self.middle = nn.Linear(32, 1), nn.Linear(8, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Job:
    """One life of a training that compresses."""

    def __init__(self, kind: str | None, device: str = "cpu") -> None:
        self.device = device
        self.model = Crossed().to(device)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.003)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.buckets: list[dict[str, list[str]]] = []
        self.compressor = MAKERS[kind]() if kind else None
        self.names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        if self.compressor:
            self.compressor.bind(self.names)
            self.ddp.register_comm_hook(None, communication_hook(self.compressor))

    def train(self, steps: range) -> float:
        for step in steps:
            made = torch.Generator().manual_seed(10 * step + dist.get_rank())
            x = torch.randn(64, 8, generator=made).to(self.device)
            loss = nn.functional.mse_loss(self.ddp(x), x[:, :3].sum(1, keepdim=True).tanh() + x[:, 3:4].abs())
            if self.compressor:
                self.compressor.begin_step()
            self.optimizer.zero_grad()
            loss.backward()
            self.check_packed()
            self.optimizer.step()
        return loss.item()

    def check_packed(self) -> None:
        if not self.compressor:
            return
        for parameters, packed in self.compressor.packed.values():
            flat = torch.empty(sum(parameter.numel() for parameter in parameters), device=self.device)
            self.compressor.unpack(packed, flat)
            assert bits(flat) == bits(torch.cat([parameter.grad.flatten() for parameter in parameters]))
        self.buckets.append(
            {key: [self.names[id(p)] for p in parameters] for key, (parameters, _) in self.compressor.packed.items()}
        )

    def state(self) -> dict[str, Any]:
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "compressor": {name: tensor.clone() for name, tensor in self.compressor.state().items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.compressor.load(state["compressor"])


def converge(kind: str) -> None:
    job, dense = Job(kind), Job(None)
    begin = dense.train(range(1))
    end = dense.train(range(1, 200))
    reached = job.train(range(200))
    assert end < 0.05 * begin
    assert reached < 0.1 * begin, f"{kind} reached {reached}, dense {end}, from {begin}"


@every_compressor
def test_training_with_compressed_gradients_converges_about_as_well(kind: str) -> None:
    ranks(2, converge, kind)


def die_and_resume(kind: str, after: int, device: str = "cpu") -> None:
    whole = Job(kind, device)
    whole.train(range(after))
    saved = whole.state()
    whole.train(range(after, 6))
    resumed = Job(kind, device)
    resumed.load(saved)
    resumed.train(range(after, 6))
    assert whole.buckets[0] == whole.buckets[1] != whole.buckets[2] == whole.buckets[5], "DDP keeps its first buckets"
    assert resumed.buckets == whole.buckets[after:]
    for name, tensor in whole.model.state_dict().items():
        assert bits(tensor) == bits(resumed.model.state_dict()[name]), name
    assert {n: bits(t) for n, t in whole.compressor.state().items()} == {
        n: bits(t) for n, t in resumed.compressor.state().items()
    }


@pytest.mark.parametrize("after", [1, 2])
@every_compressor
def test_a_resumed_run_goes_on_with_the_buckets_it_had_and_the_same_bits(kind: str, after: int) -> None:
    ranks(2, die_and_resume, kind, after)


def all_of_it_on(device: str) -> None:
    for kind in MAKERS:
        agree_and_lose_nothing(kind, torch.float32, device)
        die_and_resume(kind, 2, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_two_ranks_that_share_a_device_agree_and_resume_there() -> None:
    ranks(2, all_of_it_on, "cuda", start="spawn")


def load_into_another_model() -> None:
    job = Job("topk")
    job.train(range(3))
    frozen = Job("topk")
    frozen.model.first.bias.requires_grad = False
    frozen.ddp = DistributedDataParallel(frozen.model, bucket_cap_mb=0.003)
    frozen.ddp.register_comm_hook(None, communication_hook(frozen.compressor))
    frozen.compressor.load(job.compressor.state())
    with pytest.raises(Mismatch, match="other parameters"):
        frozen.train(range(1))


def test_a_state_of_other_parameters_is_refused() -> None:
    ranks(1, load_into_another_model)


# -- in one process


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@without_group
def test_one_process_trains_on_what_the_packed_form_holds(kind: str, dtype: torch.dtype, device: str) -> None:
    compressor, _ = prepared(kind)
    given, applied = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    for step in range(6):
        flat = gradient(step).to(device, dtype)
        given += flat.cpu()
        packed = compressor.reduce(flat, "0", None)
        again = torch.full_like(flat, 7.0)
        compressor.unpack(packed, again)
        assert bits(again) == bits(flat)
        applied += flat.cpu()
        if kind == "topk":
            assert len(packed["values"]) == len(packed["indices"]) == flat.count_nonzero() == 0.05 * N
    assert torch.allclose(given, applied + residual(compressor).cpu(), atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@without_group
def test_the_host_never_waits_for_the_device(kind: str) -> None:
    compressor = MAKERS[kind]()
    flats = [gradient(step).cuda() for step in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for flat in flats:
            compressor.reduce(flat, "0", None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_residuals_follow_their_parameters_into_other_buffers() -> None:
    compressor = TopK(0.01)
    one, two, three = (nn.Parameter(torch.zeros(100)) for _ in range(3))
    compressor.bind({id(one): "one", id(two): "two", id(three): "three"})
    compressor.lay_out("0", [one, two])
    compressor.lay_out("1", [three])
    compressor.reduce(torch.cat([torch.full((100,), 1.0), torch.full((100,), 2.0)]), "0", None)
    compressor.reduce(torch.full((100,), 3.0), "1", None)
    before = {name: tensor.clone() for name, tensor in compressor.state().items()}
    sums = {name: tensor.sum().item() for name, tensor in before.items() if name.startswith("residual")}
    assert sums == {"residual.one": 100, "residual.two": 196, "residual.three": 297}
    compressor.lay_out("0", [three, one])
    assert {n: bits(t) for n, t in compressor.state().items() if n != "buckets"} == {
        n: bits(t) for n, t in before.items() if n != "buckets"
    }, "between two layouts"
    compressor.reduce(torch.zeros(200), "0", None)  # applies two elements of `three`
    compressor.lay_out("1", [two])
    compressor.reduce(torch.zeros(100), "1", None)
    after = {name: tensor.sum().item() for name, tensor in compressor.state().items() if name.startswith("residual")}
    assert after == {"residual.one": 100, "residual.two": 194, "residual.three": 291}


def test_what_cannot_work_is_refused_with_a_sentence() -> None:
    with pytest.raises(BadConfig, match="ratio"):
        TopK(0)
    with pytest.raises(BadConfig, match="start >= 2"):
        PowerSGD(start=1)
    with pytest.raises(BadConfig, match="process group"):
        prepared("powersgd")[0].reduce(gradient(0), "0", None)
    compressor, parameters = prepared("topk")
    with pytest.raises(BadConfig, match="elements"):
        compressor.reduce(torch.ones(N + 1), "0", None)
    nameless = TopK()
    nameless.lay_out("0", parameters)
    nameless.reduce(gradient(0), "0", None)
    with pytest.raises(BadConfig, match="bind"):
        nameless.state()


def test_compressors_are_reached_through_the_package_which_loads_no_torch() -> None:
    words = "import sys, everstep; assert 'torch' not in sys.modules; everstep.compress.TopK(ratio=0.01)"
    subprocess.run([sys.executable, "-c", words], check=True, timeout=60, env=os.environ)
