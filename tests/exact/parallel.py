"""What people do with DDP: models whose gradients arrive in an order of their own, in several small buckets."""

from __future__ import annotations

import contextlib
import random
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from features import FEATURES, Numbers, train
from harness import Trial
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import everstep
from everstep.capture import reductions

PARALLEL: list[str] = []
SMALL = 0.0005  # MiB: a few parameters in a bucket


def told(function: Any) -> Any:
    FEATURES[function.__name__] = function
    return function


def parallel(function: Any) -> Any:
    PARALLEL.append(function.__name__)
    return told(function)


class Crossed(nn.Module):
    """Layers are defined in another order than they are used in, so that gradients arrive in neither."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(19, 3), nn.Linear(6, 17)
        self.norm, self.middle = nn.LayerNorm(17), nn.Linear(17, 19)
        if unused:
            self.unused = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(self.norm(torch.tanh(self.first(x))))))


def batches(trial: Trial) -> DataLoader[Any]:
    data = Numbers(48)
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, seed=3))


def fit(trial: Trial, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> None:
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    options = {"epochs": None, "steps": 8, "between": lambda: sealed(trial), **options}
    train(trial, model, optimizer, batches(trial), **options)


def sealed(trial: Trial) -> None:
    """Whoever dies in the second step resumes from the first on every rank, and so for the fourth."""
    assert trial.run is not None
    if trial.run.step in (1, 3):
        trial.run.wait("sealed")
        dist.barrier()


def zeroing(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)  # type: ignore[method-assign]
    return optimizer


@parallel
def several_buckets(trial: Trial) -> None:
    fit(trial, trial.parallel(Crossed(), bucket_cap_mb=SMALL))


@parallel
def one_bucket(trial: Trial) -> None:
    fit(trial, trial.parallel(Crossed()))


@parallel
def gradients_in_buckets(trial: Trial) -> None:
    fit(trial, trial.parallel(Crossed(), bucket_cap_mb=SMALL, gradient_as_bucket_view=True))


@parallel
def gradients_that_stay_in_buckets(trial: Trial) -> None:
    """DDP divides a gradient that lies in its bucket, and multiplies any other by the reciprocal."""
    model = trial.parallel(Crossed(), bucket_cap_mb=SMALL, gradient_as_bucket_view=True)
    fit(trial, model, zeroing(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))


@parallel
def gradients_that_stay_in_buckets_that_are_never_rebuilt(trial: Trial) -> None:
    options: Any = {"gradient_as_bucket_view": True, "find_unused_parameters": True}
    model = trial.parallel(Crossed(unused=True), bucket_cap_mb=SMALL, **options)
    fit(trial, model, zeroing(torch.optim.AdamW(model.parameters(), lr=0.01)))


@parallel
def unused_parameters(trial: Trial) -> None:
    fit(trial, trial.parallel(Crossed(unused=True), bucket_cap_mb=SMALL, find_unused_parameters=True))


@parallel
def a_static_graph(trial: Trial) -> None:
    fit(trial, trial.parallel(Crossed(unused=True), bucket_cap_mb=SMALL, static_graph=True))


@parallel
def frozen_parameters(trial: Trial) -> None:
    model = Crossed()
    model.middle.requires_grad_(False)
    fit(trial, trial.parallel(model, bucket_cap_mb=SMALL))


@parallel
def two_dtypes(trial: Trial) -> None:
    class Mixed(Crossed):
        def __init__(self) -> None:
            super().__init__()
            self.double()
            self.last.float()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.middle(self.norm(torch.tanh(self.first(x.double()))))).float())

    fit(trial, trial.parallel(Mixed(), bucket_cap_mb=SMALL))


@parallel
def accumulation_without_reductions(trial: Trial) -> None:
    model = trial.parallel(Crossed(), bucket_cap_mb=SMALL)
    assert isinstance(model, DistributedDataParallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = trial.guard(model, optimizer, batches(trial), epochs=None, steps=6)
    for i, (x, y) in enumerate(trial.batches(run)):
        is_whole = i % 2 == 1
        with contextlib.nullcontext() if is_whole else model.no_sync():
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
        if is_whole:
            trial.at("backward")
            sealed(trial)
            optimizer.step()
            trial.at("step")
            optimizer.zero_grad()
        trial.lost(loss)


@parallel
def several_models(trial: Trial) -> None:
    """One of them is trained from the third step on, and one lies inside another module."""
    inner, late = trial.parallel(Crossed(), bucket_cap_mb=SMALL), trial.parallel(Crossed(), bucket_cap_mb=SMALL)
    outer = nn.ModuleDict({"inner": inner})
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (outer, late)]
    run = trial.guard([outer, late], optimizers, batches(trial), epochs=None, steps=8)
    for x, y in trial.batches(run):
        out = inner(x) + (late(x) if run.step >= 2 else 0)
        loss = nn.functional.mse_loss(out, y)
        loss.backward()
        trial.at("backward")
        sealed(trial)
        for optimizer in optimizers[: 1 if run.step < 2 else 2]:
            optimizer.step()
            optimizer.zero_grad()
        trial.at("step")
        trial.lost(loss)


@parallel
def a_hook_for_communication(trial: Trial) -> None:
    model = trial.parallel(Crossed(), bucket_cap_mb=SMALL)
    assert isinstance(model, DistributedDataParallel)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    fit(trial, model)


@parallel
def a_built_in_hook_for_communication(trial: Trial) -> None:
    model = trial.parallel(Crossed(), bucket_cap_mb=SMALL)
    assert isinstance(model, DistributedDataParallel)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    fit(trial, model)


@parallel
def compressed_gradients(trial: Trial) -> None:
    fit(trial, trial.parallel(Crossed(), bucket_cap_mb=SMALL), compress=everstep.compress.Int8())


@parallel
def gradients_of_low_rank(trial: Trial) -> None:
    fit(trial, trial.parallel(Crossed(), bucket_cap_mb=SMALL), compress=everstep.compress.PowerSGD(rank=2, start=3))


@parallel
def compiled_around_ddp(trial: Trial) -> None:
    fit(trial, torch.compile(trial.parallel(Crossed()), backend="eager"))


@parallel
def sparse_gradients(trial: Trial) -> None:
    class Looked(Crossed):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 6, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.table((x[:, 0].abs() * 10).long() % 11))

    model = trial.parallel(Looked(), bucket_cap_mb=SMALL)
    fit(trial, model, torch.optim.SGD(model.parameters(), lr=0.1))


@parallel
def layers_in_another_order_each_time(trial: Trial) -> None:
    """Buckets are those of the first pass of the run, and no later pass tells what that was."""

    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
            self.last = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            for layer in random.sample(list(self.layers), len(self.layers)):
                x = torch.tanh(layer(x))
            return self.last(x)

    fit(trial, trial.parallel(Shuffled(), bucket_cap_mb=SMALL))


class Recalling(nn.Module):
    """Adds to its input what it has seen so far."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x + self.mean


@parallel
def buffers_after_an_evaluation(trial: Trial) -> None:
    """After a forward without gradients DDP leaves out one broadcast of buffers."""
    model = trial.parallel(nn.Sequential(Recalling(), Crossed()), bucket_cap_mb=SMALL)

    def evaluate(_: Tensor) -> None:
        with torch.no_grad():
            trial.extra["losses"].append(model(Numbers().x[trial.rank :: trial.world]).sum().item())

    fit(trial, model, after=evaluate)


# -- where it cannot be


@told
def buckets_of_another_size_in_each_life(trial: Trial) -> None:
    fit(trial, trial.parallel(Crossed(), bucket_cap_mb=SMALL if trial.life.number == 1 else 1))


@told
def a_torch_without_what_is_needed(trial: Trial) -> None:
    reductions._OF_REDUCER = ("_of_another_time",)  # type: ignore[assignment]
    fit(trial, trial.parallel(Crossed(), bucket_cap_mb=SMALL))


@told
def another_part_frozen_in_each_life(trial: Trial) -> None:
    model = Crossed()
    (model.middle if trial.life.number == 1 else model.last).requires_grad_(False)
    fit(trial, trial.parallel(model, bucket_cap_mb=SMALL), torch.optim.SGD(model.parameters(), lr=0.1))


@told
def a_hook_under_a_static_graph(trial: Trial) -> None:
    model = trial.parallel(Crossed(), bucket_cap_mb=SMALL, static_graph=True)
    assert isinstance(model, DistributedDataParallel)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    fit(trial, model)
