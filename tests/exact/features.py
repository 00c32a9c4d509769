"""What people do in training loops: one small function for each thing that must survive."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from harness import Trial
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import everstep
from everstep.capture import snapshot
from everstep.capture.compressor import Compressor

FEATURES: dict[str, Callable[[Trial], None]] = {}
ON_ONE_RANK: list[str] = []
ON_TWO_RANKS: list[str] = []


def feature(on_one_rank: bool = True, on_two_ranks: bool = False) -> Callable[[Any], Any]:
    def enter(function: Callable[[Trial], None]) -> Callable[[Trial], None]:
        FEATURES[function.__name__] = function
        if on_one_rank:
            ON_ONE_RANK.append(function.__name__)
        if on_two_ranks:
            ON_TWO_RANKS.append(function.__name__)
        return function

    return enter


class Numbers(Dataset[tuple[Tensor, Tensor, int]]):
    """Samples that know their own index."""

    def __init__(self, count: int = 24) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 6, generator=generator)
        self.y = torch.randn(count, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


def network(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 3))


def loader(trial: Trial, data: Numbers | None = None, **options: Any) -> DataLoader[Any]:
    """Six steps in a pass: batches of four on one rank, of two on each of two."""
    data = data or Numbers()
    if trial.world == 1:
        return DataLoader(data, **{"batch_size": 4, "shuffle": True, **options})
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, seed=3), **options)


def error(trial: Trial, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    trial.at("forward")
    return nn.functional.mse_loss(out, y)


def train(
    trial: Trial,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Any = None,
    *,
    between: Callable[[], None] = lambda: None,
    after: Callable[[Tensor], None] = lambda loss: None,
    **options: Any,
) -> None:
    """The plain loop. `between`: after backward and before the update; `after`: after the update."""
    run = trial.guard(model, optimizer, loader(trial) if data is None else data, **{"epochs": 2, **options})
    for x, y in trial.batches(run):
        loss = error(trial, model, x, y)
        loss.backward()
        trial.at("backward")
        between()
        optimizer.step()
        trial.at("step")
        after(loss)
        optimizer.zero_grad()
        trial.lost(loss)


# -- optimizers


@feature(on_two_ranks=True)
def sgd_with_momentum(trial: Trial) -> None:
    model = trial.parallel(network())
    train(trial, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@feature()
def adam(trial: Trial) -> None:
    model = network()
    train(trial, model, torch.optim.Adam(model.parameters(), lr=0.01))


@feature(on_two_ranks=True)
def adamw_with_amsgrad(trial: Trial) -> None:
    model = trial.parallel(network())
    train(trial, model, torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True))


@feature()
def fused_adam(trial: Trial) -> None:
    model = network()
    train(trial, model, torch.optim.Adam(model.parameters(), lr=0.01, fused=True))


@feature()
def adagrad_whose_state_is_there_before_the_first_step(trial: Trial) -> None:
    model = network()
    train(trial, model, torch.optim.Adagrad(model.parameters(), lr=0.1))


@feature()
def nadam_with_a_learning_rate_that_is_a_tensor(trial: Trial) -> None:
    model = network()
    optimizer = torch.optim.NAdam(model.parameters(), lr=torch.tensor(0.01), foreach=False)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(trial, model, optimizer, scheduler=scheduler, after=lambda _: scheduler.step())


@feature()
def lbfgs(trial: Trial) -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=4)
    run = trial.guard(model, optimizer, loader(trial), epochs=2)
    for x, y in trial.batches(run):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = error(trial, model, x, y)
            loss.backward()
            trial.at("backward")
            return loss

        loss = optimizer.step(closure)
        trial.at("step")
        trial.lost(loss)


class Replacing(torch.optim.Optimizer):
    """Heavy ball that makes its state anew in each step, and keeps some of it outside tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                old = self.state[parameter]
                velocity = 0.9 * old.get("velocity", 0.0) + parameter.grad
                history = [*old.get("history", []), float(parameter.grad.norm())][-3:]
                self.state[parameter] = {"velocity": velocity, "history": history}
                parameter.sub_(group["lr"] * velocity / (1 + history[0]))


@feature(on_two_ranks=True)
def an_optimizer_that_replaces_its_state_in_each_step(trial: Trial) -> None:
    model = trial.parallel(network())
    train(trial, model, Replacing(model.parameters()))


class Shared(torch.optim.Optimizer):
    """Keeps state that belongs to no parameter, under a name of its own, and plain state for one parameter only."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        common = self.state["common"]
        common["norm"] = common.get("norm", torch.zeros(())) + sum(p.grad.norm() for p in parameters)
        for parameter in parameters:
            self.state[parameter]["age"] = self.state[parameter].get("age", torch.zeros(())) + 1
            parameter.sub_(parameter.grad * self.param_groups[0]["lr"] / (1 + common["norm"]))
        self.state[parameters[-1]]["steps"] = self.state[parameters[-1]].get("steps", 0) + 1


@feature(on_two_ranks=True)
def an_optimizer_whose_state_is_loaded_in_mid_run(trial: Trial) -> None:
    """As for a rollback of its own: other dicts with other tensors, and those from before stay as they were."""
    model = trial.parallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def load(loss: Tensor) -> None:
        if len(trial.extra["losses"]) % 3 == 0:
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))

    train(trial, model, optimizer, after=load)


@feature()
def optimizer_state_that_belongs_to_no_parameter(trial: Trial) -> None:
    model = network()
    train(trial, model, Shared(model.parameters()))


class Late(torch.optim.Optimizer):
    """Begins with a number where later a tensor will be."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["age"] = state.get("age", 0) + 1
                state["mean"] = 1 if state["age"] <= 4 else state["mean"] * 0.9 + parameter.grad
                parameter.sub_(group["lr"] * parameter.grad * state["mean"])


@feature()
def optimizer_state_that_turns_from_a_number_into_a_tensor(trial: Trial) -> None:
    model = network()
    train(trial, model, Late(model.parameters()))


@feature(on_two_ranks=True)
def parameter_groups_with_their_own_learning_rates(trial: Trial) -> None:
    model = trial.parallel(network())
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "lr": 0.01, "momentum": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    scheduler = lr_scheduler.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (1 + n)])
    train(trial, model, optimizer, scheduler=scheduler, after=lambda _: scheduler.step())


@feature()
def a_learning_rate_that_the_loop_sets_by_hand(trial: Trial) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(trial, model, optimizer, after=lambda loss: optimizer.param_groups[0].update(lr=loss.item() / 10))


@feature()
def an_optimizer_per_parameter_inside_backward(trial: Trial) -> None:
    model = network()
    optimizers = {p: torch.optim.Adam([p], lr=0.01, foreach=False) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    run = trial.guard(model, list(optimizers.values()), loader(trial), epochs=2)
    for x, y in trial.batches(run):
        loss = error(trial, model, x, y)
        loss.backward()
        trial.at("backward")
        trial.at("step")
        trial.lost(loss)


@feature(on_two_ranks=True)
def two_models_with_an_optimizer_each(trial: Trial) -> None:
    maker, judge = trial.parallel(network()), trial.parallel(nn.Linear(3, 1))
    slow = torch.optim.Adam(maker.parameters(), lr=0.01)
    fast = torch.optim.SGD(judge.parameters(), lr=0.05, momentum=0.5)
    run = trial.guard([maker, judge], [slow, fast], loader(trial), epochs=2)
    for x, y in trial.batches(run):
        fast.zero_grad()
        judged = judge(y).mean() - judge(maker(x).detach() + torch.randn_like(y)).mean()
        trial.at("forward")
        judged.backward()
        fast.step()
        trial.at("backward")
        slow.zero_grad()
        made = judge(maker(x)).mean()
        made.backward()
        slow.step()
        trial.at("step")
        trial.lost(judged + made)


# -- what happens around an update


@feature(on_two_ranks=True)
def accumulated_gradients(trial: Trial) -> None:
    model = trial.parallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = trial.guard(model, optimizer, loader(trial, batch_size=1) if trial.world == 1 else loader(trial), epochs=4)
    for count, (x, y) in enumerate(trial.batches(run), 1):
        loss = error(trial, model, x, y) / 2
        loss.backward()
        trial.at("backward")
        if count % 2 == 0:
            optimizer.step()
            trial.at("step")
            optimizer.zero_grad()
        trial.lost(loss)


@feature()
def batches_left_over_after_the_last_update(trial: Trial) -> None:
    leave_batches_over(trial, durable="first")


@feature(on_one_rank=False)
def batches_left_over_after_the_last_update_was_durable(trial: Trial) -> None:
    leave_batches_over(trial, durable="last")


def leave_batches_over(trial: Trial, durable: str) -> None:
    """An update every five batches, and 72 batches; the first or the last update of each life is waited for."""
    model = network(nn.BatchNorm1d(8), nn.Dropout(0.3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = trial.guard(model, optimizer, loader(trial, batch_size=2), epochs=6)
    for count, (x, y) in enumerate(trial.batches(run), 1):
        if count % 5 == 1 and run.step == ((run.resumed_from or 0) + 1 if durable == "first" else 14):
            run.wait("durable")
        if run.step == 14:  # before anybody dies, and before a life without a step ends
            run.wait("durable" if run.resumed_from == 14 else "sealed")
        loss = error(trial, model, x, y)
        loss.backward()
        trial.at("backward")
        if count % 5 == 0:
            optimizer.step()
            trial.at("step")
            optimizer.zero_grad()
        trial.lost(loss)


@feature(on_two_ranks=True)
def clipped_gradients(trial: Trial) -> None:
    model = trial.parallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(trial, model, optimizer, between=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@feature(on_two_ranks=True)
def a_gradient_scaler_that_skips_steps(trial: Trial) -> None:
    model = trial.parallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    run = trial.guard(model, optimizer, loader(trial), scaler=scaler, epochs=3)
    for x, y in trial.batches(run):
        loss = error(trial, model, x, y)
        if len(trial.extra["losses"]) % 5 in (1, 4):
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        trial.at("backward")
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        trial.at("step")
        scaler.update()
        optimizer.zero_grad()
        trial.lost(loss)


def compressed(trial: Trial, compressor: Compressor, clip: bool = False) -> None:
    model = trial.parallel(nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = trial.guard(model, optimizer, loader(trial), epochs=3, compress=compressor)
    for x, y in trial.batches(run):
        loss = error(trial, model, x, y)
        loss.backward()
        trial.at("backward")
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        trial.at("step")
        optimizer.zero_grad()
        trial.lost(loss)


@feature(on_two_ranks=True)
def gradients_of_which_the_largest_are_applied(trial: Trial) -> None:
    compressed(trial, everstep.compress.TopK(0.1))


@feature(on_two_ranks=True)
def gradients_in_eight_bits(trial: Trial) -> None:
    compressed(trial, everstep.compress.Int8())


@feature()
def gradients_in_sixteen_bits(trial: Trial) -> None:
    compressed(trial, everstep.compress.Bf16())


@feature(on_one_rank=False, on_two_ranks=True)
def gradients_of_low_rank(trial: Trial) -> None:
    compressed(trial, everstep.compress.PowerSGD(rank=1, start=4))


@feature(on_one_rank=False, on_two_ranks=True)
def gradients_that_are_clipped_after_they_were_compressed(trial: Trial) -> None:
    compressed(trial, everstep.compress.TopK(0.1), clip=True)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=12),
    "multi_step": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5, 9]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="triangular2"),
    "cosine_with_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=5),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 8)], milestones=[4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def _register_schedulers() -> None:
    for kind, make in SCHEDULERS.items():

        def scheduled(trial: Trial, make: Any = make) -> None:
            model = trial.parallel(network())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = make(optimizer)
            train(trial, model, optimizer, scheduler=scheduler, after=lambda _: scheduler.step())

        scheduled.__name__ = f"the_{kind}_schedule"
        feature(on_two_ranks=kind == "one_cycle")(scheduled)


@feature()
def a_plateau_schedule_that_steps_once_an_epoch(trial: Trial) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    run = trial.guard(model, optimizer, loader(trial), epochs=4, scheduler=scheduler, extra={"epoch": 0, "sum": 0.0})
    for x, y in trial.batches(run):
        if run.epoch != trial.extra["epoch"]:
            scheduler.step(trial.extra["sum"])
            trial.extra["epoch"], trial.extra["sum"] = run.epoch, 0.0
        loss = error(trial, model, x, y)
        loss.backward()
        trial.at("backward")
        optimizer.step()
        trial.at("step")
        optimizer.zero_grad()
        trial.extra["sum"] += loss.item()
        trial.lost(loss)


# -- models


@feature()
def frozen_parameters_that_thaw_in_mid_run(trial: Trial) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = trial.guard(model, optimizer, loader(trial), epochs=2)
    for x, y in trial.batches(run):
        model[0].requires_grad_(run.step >= 4)
        loss = error(trial, model, x, y)
        loss.backward()
        trial.at("backward")
        optimizer.step()
        trial.at("step")
        optimizer.zero_grad()
        trial.lost(loss)


class Late2(nn.Module):
    """Its second branch takes part only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(6, 3), nn.Linear(6, 3), False

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x) if self.both else self.first(x)


@feature(on_two_ranks=True)
def parameters_without_a_gradient_in_the_first_steps(trial: Trial) -> None:
    branches = Late2()
    model = trial.parallel(branches, find_unused_parameters=True) if trial.world > 1 else branches
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = trial.guard(model, optimizer, loader(trial), epochs=2)
    for x, y in trial.batches(run):
        branches.both = run.step >= 4
        loss = error(trial, model, x, y)
        loss.backward()
        trial.at("backward")
        optimizer.step()
        trial.at("step")
        optimizer.zero_grad()
        trial.lost(loss)


@feature()
def parameters_that_no_optimizer_has(trial: Trial) -> None:
    model = network()
    model[0].requires_grad_(False)
    train(trial, model, torch.optim.Adam(model[2].parameters(), lr=0.01))


class Tied(nn.Module):
    """An embedding that is its own output layer, and one block that is passed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.block, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.again = self.block
        self.out.weight = self.into.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.again(torch.tanh(self.block(self.into(x))))))[:, :3]


@feature(on_two_ranks=True)
def tied_weights_and_shared_modules(trial: Trial) -> None:
    model = trial.parallel(Tied())
    train(trial, model, torch.optim.Adam(model.parameters(), lr=0.01))


@feature(on_two_ranks=True)
def batch_norm_and_dropout(trial: Trial) -> None:
    model = trial.parallel(network(nn.BatchNorm1d(8), nn.Dropout(0.5)))
    train(trial, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


class Remembering(nn.Module):
    """Buffers of every kind: replaced, written in place, not persistent, and one that appears late."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replaced", torch.zeros(6))
        self.register_buffer("volatile", torch.zeros(3), persistent=False)
        self.register_buffer("late", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x - 0.1 * self.replaced) + self.volatile
        if self.training:
            self.calls += 1
            self.replaced = 0.9 * self.replaced + x.mean(0)
            self.volatile.lerp_(out.detach().mean(0), 0.1)
            if self.calls >= 4:
                self.late = out.detach().mean(0) + (0 if self.late is None else self.late)
                out = out + 0.01 * self.late
        return out


@feature()
def buffers_replaced_volatile_and_late(trial: Trial) -> None:
    model = Remembering()
    train(trial, model, torch.optim.Adam(model.parameters(), lr=0.01))


@feature()
def complex_and_bf16_parameters(trial: Trial) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))
            self.shift = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
            self.gain = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.turn).abs() * self.gain.float() + self.shift.float()

    model = Mixed()
    train(trial, model, torch.optim.Adam(model.parameters(), lr=0.01))


@feature(on_two_ranks=True)
def a_convolution_in_channels_last(trial: Trial) -> None:
    class Picture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(2, 4, 2), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            picture = x.view(-1, 2, 3, 1).repeat(1, 1, 1, 2).to(memory_format=torch.channels_last)
            return self.head(self.conv(picture).flatten(1))

    model = trial.parallel(Picture().to(memory_format=torch.channels_last))
    train(trial, model, torch.optim.Adam(model.parameters(), lr=0.01))


@feature(on_two_ranks=True)
def a_compiled_model(trial: Trial) -> None:
    model = torch.compile(trial.parallel(network(nn.Dropout(0.2))), backend="eager")
    train(trial, model, torch.optim.Adam(model.parameters(), lr=0.01))


@feature()
def a_target_network_that_follows_after_each_step(trial: Trial) -> None:
    """Its parameters are written after the update, by nobody's optimizer."""
    model, target = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = trial.guard([model, target], optimizer, loader(trial), epochs=2)
    for x, y in trial.batches(run):
        loss = error(trial, model, x, y + target(x).detach())
        loss.backward()
        trial.at("backward")
        optimizer.step()
        trial.at("step")
        with torch.no_grad():
            for ours, theirs in zip(target.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.3)
        optimizer.zero_grad()
        trial.lost(loss)


# -- extra


class Meter:
    def __init__(self) -> None:
        self.best, self.seen = float("inf"), Counter[int]()

    def update(self, loss: float) -> None:
        self.best = min(self.best, loss)
        self.seen[round(loss)] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.seen = state["best"], state["seen"]


@feature(on_two_ranks=True)
def extra_with_an_average_a_stateful_object_and_trees(trial: Trial) -> None:
    core = network(nn.BatchNorm1d(8))
    model = trial.parallel(core)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(core, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    meter, table = Meter(), torch.zeros(3)
    tree = {"nested": [(1, 2.5), {"name": "a"}], 3: b"bytes", "none": None, "big": 2**70, "complex": 1j}
    extra = {"average": average, "meter": meter, "table": table, "tree": tree, "count": 0}

    def after(loss: Tensor) -> None:
        average.update_parameters(core)
        meter.update(loss.item())
        table.add_(loss.detach())
        tree["nested"] = [*tree["nested"], (len(tree["nested"]), loss.item())]
        trial.extra["count"] += 1

    train(trial, model, optimizer, extra=extra, after=after)


@feature()
def extra_that_outgrows_its_place(trial: Trial) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    log: list[bytes] = []
    train(trial, model, optimizer, extra={"log": log}, after=lambda _: log.append(bytes([len(log)]) * 40_000))


@feature()
def random_numbers_of_every_kind(trial: Trial) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = trial.guard(model, optimizer, loader(trial), epochs=2)
    torch.rand(3), random.random(), np.random.rand()
    for x, y in trial.batches(run):
        noise = random.gauss(0, 1) + np.random.randn() + torch.randn(())
        loss = error(trial, model, x + noise, y)
        loss.backward()
        trial.at("backward")
        optimizer.step()
        trial.at("step")
        optimizer.zero_grad()
        trial.lost(loss)


# -- loaders


class Noisy(Numbers):
    """Augments its samples at random, by every generator there is."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        x, y, index = super().__getitem__(index)
        return x + torch.rand(6) + random.random() + np.random.rand(), y, index


class Stream(IterableDataset[tuple[Tensor, Tensor, int]]):
    """Samples in an order that is drawn when the pass begins; workers take turns."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        numbers, worker = Numbers(), torch.utils.data.get_worker_info()
        order = list(range(24)) if worker is not None else torch.randperm(24).tolist()
        for index in order[worker.id :: worker.num_workers] if worker is not None else order:
            yield numbers[index]


class Shuffled:
    """A batch sampler of somebody's own, with batches of different lengths, on Python's random numbers."""

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(range(24), 24)
        for begin, end in ((0, 3), (3, 8), (8, 12), (12, 15), (15, 20), (20, 24)):
            yield order[begin:end]

    def __len__(self) -> int:
        return 6


class OwnLoader:
    """A loader of somebody's own that keeps its place."""

    def __init__(self) -> None:
        self.at, self.order = 0, list[int]()

    def __iter__(self) -> Iterator[Any]:
        numbers = Numbers()
        if not self.order:
            self.order = torch.randperm(24).tolist()
        while self.at < 24:
            picked = self.order[self.at : self.at + 4]
            self.at += 4
            yield numbers.x[picked], numbers.y[picked], torch.tensor(picked)
        self.at, self.order = 0, []

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], state["order"]


def one_by_one(sample: Any) -> Any:
    x, y, index = sample
    return x[None], y[None], torch.tensor([index])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


LOADERS: dict[str, Callable[[], Any]] = {
    "in_order": lambda: DataLoader(Numbers(), batch_size=4),
    "shuffled_with_a_generator": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, generator=seeded()),
    "shuffled_by_two_workers": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2),
    "shuffled_with_a_generator_by_two_workers": lambda: DataLoader(
        Numbers(), batch_size=4, shuffle=True, num_workers=2, generator=seeded()
    ),
    "persistent_workers": lambda: DataLoader(
        Numbers(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "batch_size_none": lambda: DataLoader(Numbers(12), batch_size=None, shuffle=True, collate_fn=one_by_one),
    "drop_last": lambda: DataLoader(Numbers(27), batch_size=4, shuffle=True, drop_last=True),
    "a_short_last_batch": lambda: DataLoader(Numbers(23), batch_size=4, shuffle=True),
    "a_batch_sampler_of_its_own": lambda: DataLoader(Numbers(), batch_sampler=Shuffled()),
    "a_batch_sampler_over_a_random_sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(range(24), generator=seeded()), 4, False)
    ),
    "samples_drawn_with_replacement": lambda: DataLoader(
        Numbers(), batch_size=8, sampler=RandomSampler(range(24), replacement=True, num_samples=72)
    ),
    "augmented_at_random": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "augmented_at_random_by_three_workers": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=3),
    "augmented_at_random_by_persistent_workers": lambda: DataLoader(
        Noisy(), batch_size=4, num_workers=2, persistent_workers=True, generator=seeded()
    ),
    "a_stream": lambda: DataLoader(Stream(), batch_size=4),
    "a_stream_of_two_workers": lambda: DataLoader(Stream(), batch_size=4, num_workers=2),
    "stateful": lambda: StatefulDataLoader(Numbers(), batch_size=4, shuffle=True),
    "stateful_with_a_generator": lambda: StatefulDataLoader(
        Numbers(), batch_size=4, shuffle=True, generator=seeded()
    ),
    "stateful_with_two_workers": lambda: StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2),
    "stateful_with_persistent_workers": lambda: StatefulDataLoader(
        Numbers(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "stateful_over_a_stream": lambda: StatefulDataLoader(Stream(), batch_size=4),
    "stateful_over_a_stream_of_two_workers": lambda: StatefulDataLoader(Stream(), batch_size=4, num_workers=2),
    "a_loader_of_its_own": OwnLoader,
    "a_list": lambda: [(*Numbers()[slice(i, i + 4)][:2], torch.arange(i, i + 4)) for i in range(0, 24, 4)],
}  # fmt: skip


def _register_loaders() -> None:
    for kind, make in LOADERS.items():

        def loaded(trial: Trial, make: Any = make) -> None:
            model = network(nn.Dropout(0.2))
            train(trial, model, torch.optim.SGD(model.parameters(), lr=0.1), make(), epochs=3)

        loaded.__name__ = f"data_{kind}"
        feature()(loaded)


_register_schedulers()
_register_loaders()


@feature(on_two_ranks=True)
def data_with_persistent_workers_on_every_rank(trial: Trial) -> None:
    model = trial.parallel(network())
    data = loader(trial, num_workers=1, persistent_workers=True)
    train(trial, model, torch.optim.SGD(model.parameters(), lr=0.1), data, epochs=3)


@feature(on_two_ranks=True)
def data_augmented_at_random_by_the_workers_of_every_rank(trial: Trial) -> None:
    model = trial.parallel(network())
    data = loader(trial, Noisy(), num_workers=2)
    train(trial, model, torch.optim.SGD(model.parameters(), lr=0.1), data, epochs=2)


@feature(on_two_ranks=True)
def data_stateful_on_every_rank(trial: Trial) -> None:
    numbers = Numbers()
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True}
    if trial.world > 1:
        options = {"batch_size": 2, "sampler": DistributedSampler(numbers, seed=3)}
    model = trial.parallel(network())
    data = StatefulDataLoader(numbers, **options)
    train(trial, model, torch.optim.SGD(model.parameters(), lr=0.1), data, epochs=3)


class Walker(IterableDataset[tuple[Tensor, Tensor, int]]):
    """A stream that says where it stands."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        numbers = Numbers()
        while self.at < 24:
            self.at += 1
            yield numbers[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@feature()
def data_stateful_over_a_stream_that_keeps_its_place(trial: Trial) -> None:
    model = network()
    data = StatefulDataLoader(Walker(), batch_size=4)
    train(trial, model, torch.optim.SGD(model.parameters(), lr=0.1), data, epochs=3)


# -- where a run ends


@feature(on_two_ranks=True)
def a_limit_of_steps_in_the_middle_of_an_epoch(trial: Trial) -> None:
    model = trial.parallel(network(nn.Dropout(0.2)))
    train(trial, model, torch.optim.Adam(model.parameters(), lr=0.01), epochs=None, steps=10)


@feature()
def a_loop_without_a_loader(trial: Trial) -> None:
    model, numbers = network(nn.Dropout(0.2)), Numbers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = trial.guard(model, optimizer, steps=12)
    while run.step < 12:
        trial.at("asked")
        picked = torch.randint(24, (4,))
        trial.given += 1
        trial.seen(picked.tolist())
        trial.at("given")
        loss = error(trial, model, numbers.x[picked], numbers.y[picked])
        loss.backward()
        trial.at("backward")
        optimizer.step()
        trial.at("step")
        optimizer.zero_grad()
        trial.lost(loss)
        run.done()
    run.close()


# -- ranks that come and go


@feature(on_one_rank=False)
def any_number_of_ranks(trial: Trial) -> None:
    """Always a DistributedSampler, over a number of samples that few numbers of ranks divide."""
    numbers = Numbers(50)
    model = trial.parallel(network())
    sampler = DistributedSampler(numbers, num_replicas=trial.world, rank=trial.rank, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = DataLoader(numbers, batch_size=2, sampler=sampler)
    train(trial, model, optimizer, data, epochs=2, after=lambda _: trial.note_state())


@feature(on_one_rank=False)
def any_number_of_ranks_with_a_stateful_loader(trial: Trial) -> None:
    numbers = Numbers(50)
    model = trial.parallel(network())
    sampler = DistributedSampler(numbers, num_replicas=trial.world, rank=trial.rank, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = StatefulDataLoader(numbers, batch_size=2, sampler=sampler)
    train(trial, model, optimizer, data, epochs=2, after=lambda _: trial.note_state())


def _numbers() -> Iterator[dict[str, Any]]:
    numbers = Numbers(50)
    for index in range(len(numbers)):
        yield {"x": numbers.x[index].tolist(), "y": numbers.y[index].tolist(), "index": index}


def _columns(rows: list[dict[str, Any]]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([row[name] for row in rows]) for name in ("x", "y", "index"))


@feature(on_one_rank=False)
def any_number_of_ranks_over_a_stream(trial: Trial) -> None:
    """Of Hugging Face, divided by node."""
    import datasets  # by whoever needs it: it takes a second
    from datasets.distributed import split_dataset_by_node

    stream = datasets.IterableDataset.from_generator(_numbers).shuffle(seed=3, buffer_size=10)
    model = trial.parallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    part = split_dataset_by_node(stream, rank=trial.rank, world_size=trial.world)
    data: DataLoader[Any] = DataLoader(part, batch_size=2, collate_fn=_columns)
    train(trial, model, optimizer, data, epochs=2, after=lambda _: trial.note_state())


@feature(on_one_rank=False)
def a_rank_that_is_slow_to_seal_when_the_state_outgrows_its_place(trial: Trial) -> None:
    model = trial.parallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    log: list[bytes] = []
    seal = snapshot.Capture._copy_and_seal

    sealed = replace(trial.life, rank=0).file("sealed")

    def late(capture: Any, job: Any) -> None:
        if trial.rank == 1 and job.step == 5 and trial.life.kill:
            time.sleep(3600)  # it dies first
        seal(capture, job)

    snapshot.Capture._copy_and_seal = late  # type: ignore[method-assign]
    run = trial.guard(model, optimizer, loader(trial), epochs=2, extra={"log": log})
    for x, y in trial.batches(run):
        if run.step == 5 and trial.rank == 0:
            run.wait("sealed")
            sealed.touch()
        while run.step == 5 and trial.life.kill and not sealed.exists():
            time.sleep(0.01)  # nobody dies before the other rank has its base
        loss = error(trial, model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trial.lost(loss)
        log.append(bytes({4: 1 << 20, 11: 1 << 22}.get(run.step, 1)))


# -- what is not kept yet


@feature(on_one_rank=False)
def gradients_accumulated_for_one_optimizer_across_steps_of_another(trial: Trial) -> None:
    quick, slow = nn.Linear(6, 3), nn.Linear(6, 3)
    fast, lazy = torch.optim.SGD(quick.parameters(), lr=0.1), torch.optim.SGD(slow.parameters(), lr=0.1)
    run = trial.guard([quick, slow], [fast, lazy], loader(trial), epochs=2)
    for x, y in trial.batches(run):
        loss = nn.functional.mse_loss(quick(x) + slow(x), y)
        trial.at("forward")
        loss.backward()
        trial.at("backward")
        fast.step()
        fast.zero_grad()
        if run.step % 4 == 3:
            lazy.step()
            lazy.zero_grad()
        trial.at("step")
        trial.lost(loss)


@feature(on_one_rank=False)
def a_parameter_group_added_in_mid_run(trial: Trial) -> None:
    model = network()
    optimizer = torch.optim.Adam(model[0].parameters(), lr=0.01)
    run = trial.guard(model, optimizer, loader(trial), epochs=2)
    for x, y in trial.batches(run):
        if run.step == 4 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
        loss = error(trial, model, x, y)
        loss.backward()
        trial.at("backward")
        optimizer.step()
        trial.at("step")
        optimizer.zero_grad()
        trial.lost(loss)


@feature(on_one_rank=False)
def a_persistent_buffer_that_is_none_at_first(trial: Trial) -> None:
    model = Remembering()
    model._non_persistent_buffers_set.clear()
    train(trial, model, torch.optim.Adam(model.parameters(), lr=0.01))
