"""On a CUDA device: killed in the middle and resumed, every feature ends with the bits of an undisturbed run."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import nn

import everstep
from everstep.capture import gradients
from everstep.errors import Misuse
from everstep.events import Degraded, Replayed, read_events

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import digest, forget_memory, live, must_finish, run_directory
from network import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(200),
]
STEPS = 8
STRATEGY: ContextVar[str] = ContextVar("strategy", default="snapshot")
Loop = Callable[[Path, int], dict[str, Any]]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(32 * 36, 10)
    ).cuda()  # fmt: skip


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 3, 8, 8, generator=generator).cuda(), torch.randint(0, 10, (16,), generator=generator).cuda()


def loop(
    directory: Path,
    die_at: int,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    *,
    step_by_hooks: bool = False,
    scaler: Any = None,
    scheduler: Any = None,
    channels_last: bool = False,
    **options: Any,
) -> dict[str, Any]:
    losses: list[float] = []
    options = {"strategy": STRATEGY.get(), **options}
    run = everstep.guard(
        model, optimizers, dir=directory, scaler=scaler, scheduler=scheduler, extra={"losses": losses}, **options
    )
    began, count = run.resumed_from, len(losses)
    while count < STEPS:
        x, y = batch(count)
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        loss = nn.functional.cross_entropy(model(x), y)
        if scaler is not None and count == 3:
            loss = loss * float("inf")
        (scaler.scale(loss) if scaler is not None else loss).backward()
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        for optimizer in [] if step_by_hooks else optimizers:
            scaler.step(optimizer) if scaler is not None else optimizer.step()
            optimizer.zero_grad()
        if scaler is not None:
            scaler.update()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
        count += 1
        run.done()
    run.close()
    states = [optimizer.state_dict() for optimizer in optimizers]
    scale = scaler.state_dict() if scaler is not None else None
    result = digest(model.state_dict(), states, losses, scale, torch.cuda.get_rng_state())
    return {"resumed_from": began, "digest": result}


def adam(directory: Path, die_at: int, **options: Any) -> dict[str, Any]:
    model = network()
    return loop(directory, die_at, model, [torch.optim.AdamW(model.parameters(), lr=1e-2)], **options)


def fused(directory: Path, die_at: int) -> dict[str, Any]:
    model = network()
    return loop(directory, die_at, model, [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)])


def capturable_with_tensor_rate(directory: Path, die_at: int) -> dict[str, Any]:
    model = network()
    rate = torch.tensor(1e-2, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return loop(directory, die_at, model, [optimizer], scheduler=scheduler)


def scaled(directory: Path, die_at: int) -> dict[str, Any]:
    return adam(directory, die_at, scaler=torch.amp.GradScaler("cuda", init_scale=1024.0))


def fused_into_backward(directory: Path, die_at: int) -> dict[str, Any]:
    model = network()
    optimizers = {p: torch.optim.SGD([p], lr=1e-2, momentum=0.9) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return loop(directory, die_at, model, list(optimizers.values()), step_by_hooks=True)


def channels_last(directory: Path, die_at: int) -> dict[str, Any]:
    model = network().to(memory_format=torch.channels_last)
    return loop(directory, die_at, model, [torch.optim.Adam(model.parameters())], channels_last=True)


def compiled(directory: Path, die_at: int) -> dict[str, Any]:
    # Else no two processes need make the same bits, with Everstep or without it: bench/results/compiled.txt.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch._inductor.config.deterministic = True
    model = torch.compile(network())
    return loop(directory, die_at, model, [torch.optim.Adam(model.parameters())])


def nccl_with_one_rank(directory: Path, die_at: int) -> dict[str, Any]:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    everstep.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(network())
    return loop(directory, die_at, model, [torch.optim.Adam(model.parameters())])


def fsdp_with_one_rank(directory: Path, die_at: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    everstep.init_process_group("nccl")
    model = fully_shard(network())
    return loop(directory, die_at, model, [torch.optim.Adam(model.parameters())])


def graphed_but_for_the_step(directory: Path, die_at: int) -> dict[str, Any]:
    """Forward and backward are repeated by a CUDA graph; the optimizer steps as always."""
    model = network()
    whole = torch.cuda.make_graphed_callables(model, (batch(0)[0],))
    return loop(directory, die_at, whole, [torch.optim.AdamW(model.parameters(), lr=1e-2)])


def fused_and_scaled(directory: Path, die_at: int) -> dict[str, Any]:
    model = network()
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    return loop(directory, die_at, model, [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)], scaler=scaler)


def largest_gradients(directory: Path, die_at: int) -> dict[str, Any]:
    return adam(directory, die_at, compress=everstep.compress.TopK(0.05))


def eight_bits(directory: Path, die_at: int) -> dict[str, Any]:
    return adam(directory, die_at, compress=everstep.compress.Int8())


def nccl_and_largest_gradients(directory: Path, die_at: int) -> dict[str, Any]:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    everstep.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(network())
    return loop(directory, die_at, model, [torch.optim.Adam(model.parameters())], compress=everstep.compress.TopK(0.05))


def spare_device_memory(directory: Path, die_at: int) -> dict[str, Any]:
    return adam(directory, die_at, mode="device")


def every_capture_on_disk(directory: Path, die_at: int) -> dict[str, Any]:
    return adam(directory, die_at, mode="disk")


FEATURES: list[Loop] = [
    adam, fused, capturable_with_tensor_rate, scaled, fused_into_backward, channels_last, compiled,
    nccl_with_one_rank, fsdp_with_one_rank, graphed_but_for_the_step, spare_device_memory, every_capture_on_disk,
]  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_killed_and_resumed_it_ends_with_the_same_bits(feature: Loop) -> None:
    with run_directory() as one, run_directory() as two:
        whole = must_finish(lambda: feature(one, -1))
        assert live(lambda: feature(two, 5), timeout=120).killed
        resumed = must_finish(lambda: feature(two, -1))
    assert resumed["resumed_from"] is not None
    assert resumed["digest"] == whole["digest"]


LOGGED: list[Loop] = [
    adam, fused, capturable_with_tensor_rate, scaled, fused_and_scaled, channels_last, compiled, nccl_with_one_rank,
    fsdp_with_one_rank, graphed_but_for_the_step, largest_gradients, eight_bits, nccl_and_largest_gradients,
]  # fmt: skip


@pytest.mark.parametrize("reboot", [False, True], ids=["killed", "rebooted"])
@pytest.mark.parametrize("feature", LOGGED, ids=lambda feature: feature.__name__)
def test_by_its_log_it_ends_with_the_same_bits(feature: Loop, reboot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_DIGEST_EVERY", 2)
    with run_directory() as one, run_directory() as two:
        whole = must_finish(lambda: feature(one, -1))
        STRATEGY.set("log")
        assert live(lambda: feature(two, 5), timeout=120).killed
        if reboot:
            time.sleep(1.0)  # the keeper writes what is in the ring
            forget_memory(two)
        resumed = must_finish(lambda: feature(two, -1))
        replayed = [event for event in read_events(two) if isinstance(event, Replayed)]
    assert resumed["digest"] == whole["digest"]
    assert resumed["resumed_from"] is not None
    assert reboot or resumed["resumed_from"] >= 4
    assert replayed or reboot


@pytest.mark.parametrize("guarded", ["before", "after"])
def test_a_graph_with_the_update_in_it_is_refused(guarded: str) -> None:
    def life(directory: Path) -> dict[str, Any]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2, device="cuda"), capturable=True)
        x, y = batch(0)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            step()
        torch.cuda.current_stream().wait_stream(beside)
        graph, said = torch.cuda.CUDAGraph(), ""
        run = everstep.guard(model, optimizer, dir=directory) if guarded == "before" else None
        try:
            with torch.cuda.graph(graph):
                step()
            run = run or everstep.guard(model, optimizer, dir=directory)
            for _ in range(2):
                graph.replay()
                run.done()
        except Misuse as error:
            said = str(error)
        return {"said": said, "kept": run.step if run else 0}

    with run_directory() as directory:
        found = must_finish(lambda: life(directory))
    assert found["kept"] == 0
    assert ("being recorded" if guarded == "before" else "no optimizer was seen") in found["said"]
    assert "leave optimizer.step() out of the graph" in found["said"]


def test_a_replica_of_a_device_is_close_and_says_that_it_is_no_more() -> None:
    """It is advanced by the host's arithmetic; the run goes on from the newest step, and nobody is deceived."""

    def followed(directory: Path, die_at: int) -> dict[str, Any]:
        STRATEGY.set("replica")
        model = network()
        found = loop(directory, die_at, model, [torch.optim.AdamW(model.parameters(), lr=1e-3)])
        return found | {"weights": [float(p.detach().double().norm()) for p in model.parameters()]}

    with run_directory() as one, run_directory() as two:
        whole = must_finish(lambda: followed(one, -1))
        assert live(lambda: followed(two, 6), timeout=120).killed
        time.sleep(2.0)  # it is at the newest record before long
        resumed = must_finish(lambda: followed(two, -1))
        said = [event.what for event in read_events(two) if isinstance(event, Degraded)]
    assert resumed["resumed_from"] >= 5
    assert resumed["weights"] == pytest.approx(whole["weights"], rel=1e-3)
    exact = resumed["digest"] == whole["digest"]
    assert exact or any("replica" in what and "not bit for bit" in what for what in said)


def test_two_ranks_of_one_device_over_gloo_end_with_the_same_bits() -> None:
    def life(directory: Path, die_at: int) -> dict[str, Any]:
        """Rank 0, which forks rank 1; both on one device, as DDP over gloo does it."""
        port = free_port()
        other = os.fork()
        rank = 0 if other else 1
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        everstep.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(network())
        found = loop(directory, die_at, model, [torch.optim.AdamW(model.parameters(), lr=1e-2)])
        if rank == 1:
            os._exit(0)
        return found

    for strategy in ("snapshot", "log"):
        STRATEGY.set(strategy)
        with run_directory() as one, run_directory() as two:
            whole = must_finish(lambda directory=one: life(directory, -1))
            assert live(lambda directory=two: life(directory, 5), timeout=120).killed
            resumed = must_finish(lambda directory=two: life(directory, -1))
        assert resumed["resumed_from"] is not None
        assert resumed["digest"] == whole["digest"]
