"""Replay gives the very bits: every optimizer of torch, in every form of its step, whole, in slabs and over ranks."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from everstep.capture.digest import StateDigest, number
from everstep.capture.extras import decode, encode
from everstep.capture.layout import Subjects
from everstep.capture.shares import share
from everstep.capture.update import Call, Consumed, is_elementwise, is_sliceable, rebuild, why_not
from everstep.errors import Diverged, EverstepError
from everstep.recover import gather
from everstep.recover import replay as module
from everstep.recover.assemble import Checkpoint
from everstep.recover.rebuild import everything, subjects_of
from everstep.recover.replay import replay
from everstep.topology import Topology

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from lives import must_finish
from merge_sgd import merge_sgd_lossy

from everstep.types import ImageInfo, OptimizerInfo, Piece

ALONE = Topology(rank=0, world=1, node="here")
STEPS = 7
Program = Callable[[], "Training"]


class Tied(nn.Module):
    """Rows of many kinds: tied, 0-dim, channels last, bf16, and one that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(5, 7)
        self.second.weight = self.first.weight
        self.conv = nn.Conv2d(3, 9, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.brief = nn.Parameter(torch.randn(11, 3).bfloat16())
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.unused = nn.Parameter(torch.randn(3))


class Hollow(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(6, 8))
        self.b = nn.Parameter(torch.randn(9, 4))


class Training:
    """A program: a step is a function of its number."""

    def __init__(self, model: nn.Module, optimizers: Sequence[optim.Optimizer], gamma: float = 0.9) -> None:
        self.model = model
        self.subjects = Subjects(models=[model], optimizers=list(optimizers))
        plain = [o for o in optimizers if not isinstance(o.param_groups[0]["lr"], Tensor)]
        self.schedules = [optim.lr_scheduler.ExponentialLR(o, gamma) for o in plain]

    def gradients(self, step: int) -> dict[str, Tensor]:
        names = self.subjects.names()
        generator = torch.Generator().manual_seed(step)
        found = {}
        for parameter in self.model.parameters():
            name = names[id(parameter)]
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if name.endswith("unused") or (name.endswith("bias") and step % 3 == 1):
                continue
            if step == 5 and name.endswith(("scale", "a")):
                gradient.view(-1)[:1] = torch.inf
            if step == 6 and name.endswith(("brief", "weight", "b")):
                gradient.view(-1)[7::11] = torch.nan
            if step == 6 and name.endswith("conv.weight"):
                gradient.view(-1)[8::11] = -torch.inf
            found[name] = gradient
        return found

    def step(self, number_: int) -> Consumed:
        """Train one step, and say what it consumed."""
        names, gradients = self.subjects.names(), self.gradients(number_)
        for parameter in self.model.parameters():
            gradient = gradients.get(names[id(parameter)])
            parameter.grad = None if gradient is None else torch.empty_like(parameter).detach().copy_(gradient)
        calls: list[Call] = []
        for i, optimizer in enumerate(self.subjects.optimizers):
            hook = optimizer.register_step_pre_hook(lambda o, *_: calls.append(called(i, o, self.subjects)))
            optimizer.step()
            hook.remove()
            optimizer.zero_grad()
        for schedule in self.schedules:
            schedule.step()

        def rows(name: str, first: int, rows: int) -> Tensor:
            whole = gradients[name]
            return whole if whole.dim() == 0 else whole[first : first + rows]

        return Consumed(step=number_, calls=calls, gradient=rows, digest=self.digest() if number_ % 3 == 0 else None)

    def digest(self) -> tuple[int, int]:
        common, private = StateDigest(share(self.subjects.listing().entries, 0, 1)).take()
        return number(common), number(private)

    def bits(self) -> dict[str, bytes]:
        found = {e.name: bits(e.tensor) for e in self.subjects.listing().entries}
        for i, optimizer in enumerate(self.subjects.optimizers):
            for parameter, state in optimizer.state.items():
                plain = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
                found[f"{i} {self.subjects.names()[id(parameter)]}"] = repr(plain).encode()
        return found


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def called(index: int, optimizer: optim.Optimizer, subjects: Subjects) -> Call:
    names = subjects.names()
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    absent = {names[id(p)] for group in optimizer.param_groups for p in group["params"] if p.grad is None}
    scale, found_inf = (getattr(optimizer, key, None) for key in ("grad_scale", "found_inf"))
    return Call(
        optimizer=index, groups=decode(encode(groups, "groups")), absent=frozenset(absent), scale=scale,
        found_inf=found_inf,
    )  # fmt: skip


def one(kind: Any, model: type[nn.Module] = Tied, **options: Any) -> Program:
    def program() -> Training:
        made = model()
        parameters = list(made.parameters())
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": options.get("lr", 0.01) / 3}]
        if model is Matrices or isinstance(options.get("lr"), Tensor):
            groups = [{"params": parameters}]
        return Training(made, [kind(groups, **{"lr": 0.01} | options)])

    return program


class Lion(optim.Optimizer):
    """A user's own, which replaces its state and writes its gradients."""

    everstep_elementwise = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    before = self.state[p].get("m", torch.zeros_like(p))
                    p.sub_(before.lerp(p.grad, 0.1).sign_(), alpha=group["lr"])
                    self.state[p] = {"m": before.lerp(p.grad.mul_(1), 0.01), "n": self.state[p].get("n", 0) + 1}


def several() -> Training:
    """Three optimizers, of which one is not elementwise."""
    model = nn.ModuleDict({"a": Tied(), "b": Matrices(), "c": Matrices()})
    kinds = {"a": optim.AdamW, "b": optim.Muon, "c": optim.SGD}
    return Training(model, [kind(model[key].parameters(), lr=0.02) for key, kind in kinds.items()])


def sharing() -> Training:
    """Two optimizers that write the same parameters."""
    model = Matrices()
    return Training(model, [optim.Adam(model.parameters(), lr=0.02), optim.SGD([model.a], lr=0.01, momentum=0.9)])


MANY = [optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam,
        optim.RMSprop, optim.Rprop, optim.ASGD, optim.SGD]  # fmt: skip
REFUSED = {"LBFGS", "SparseAdam"}
FUSED = [optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad]


def programs() -> dict[str, Program]:
    found = {f"{kind.__name__} {way}": one(kind, **{way: True}) for kind in MANY for way in ("foreach", "maximize")}
    found |= {f"{kind.__name__} single": one(kind, foreach=False) for kind in MANY}
    found |= {f"{kind.__name__} fused": one(kind, fused=True) for kind in FUSED}
    decaying = [kind for kind in MANY if kind is not optim.Rprop]
    found |= {f"{kind.__name__} decay": one(kind, weight_decay=0.1) for kind in decaying}
    amsgrad = {"amsgrad": True, "weight_decay": 0.1}
    for kind in (optim.Adam, optim.AdamW):
        found |= {f"{kind.__name__} amsgrad {way}": one(kind, **amsgrad, **{way: True}) for way in ("foreach", "fused")}
        found[f"{kind.__name__} tensor lr"] = one(kind, lr=torch.tensor(0.02), foreach=False)
        found[f"{kind.__name__} tensor lr fused"] = one(kind, lr=torch.tensor(0.02), fused=True)
    found["SGD tensor lr"] = one(optim.SGD, lr=torch.tensor(0.02), foreach=False, momentum=0.9)
    for way in ("foreach", "fused", "maximize"):
        found[f"SGD momentum {way}"] = one(optim.SGD, Matrices, momentum=0.9, dampening=0.1, **{way: True})
        found[f"SGD nesterov {way}"] = one(optim.SGD, Matrices, momentum=0.9, nesterov=True, **{way: True})
    found["SGD momentum, late parameters"] = one(optim.SGD, momentum=0.9, weight_decay=0.01)
    found["NAdam decoupled"] = one(optim.NAdam, weight_decay=0.1, decoupled_weight_decay=True)
    found["RAdam decoupled"] = one(optim.RAdam, weight_decay=0.1, decoupled_weight_decay=True)
    found["RMSprop centered"] = one(optim.RMSprop, centered=True, momentum=0.9)
    found["ASGD averaging"] = one(optim.ASGD, t0=2.0)
    found["Adafactor foreach"] = one(optim.Adafactor, foreach=True)
    found["Adafactor single"] = one(optim.Adafactor, foreach=False, weight_decay=0.1)
    found["Muon"] = one(optim.Muon, Matrices, nesterov=False)
    found["Muon nesterov"] = one(optim.Muon, Matrices)
    found["Lion"] = one(Lion)
    found["AdamW, an empty parameter"] = one(optim.AdamW, Hollow)
    return found | {"several": several, "sharing": sharing}


PROGRAMS = programs()
every_program = pytest.mark.parametrize("name", PROGRAMS)


def trained(program: Program, base: int = 0) -> tuple[Training, list[Consumed], Training]:
    """A run to the end, what it consumed after the base, and the program at the base."""
    real, at_base = program(), program()
    for step in range(1, base + 1):
        real.step(step)
        at_base.step(step)
    return real, [real.step(step) for step in range(base + 1, STEPS + 1)], at_base


def test_every_optimizer_of_torch_is_in_these_tests_or_refused() -> None:
    shipped = {
        name for name in optim.__all__
        if isinstance(getattr(optim, name), type) and name != "Optimizer"
    }  # fmt: skip
    tried = {type(o).__name__ for program in PROGRAMS.values() for o in program().subjects.optimizers}
    assert shipped == (tried - {"Lion"}) | REFUSED


@pytest.mark.parametrize("base", [0, 2])
@every_program
def test_replay_gives_the_very_bits(name: str, base: int) -> None:
    real, steps, program = trained(PROGRAMS[name], base)
    assert all(why_not(optimizer) == "" for optimizer in program.subjects.optimizers)
    assert replay(program.subjects, steps, ALONE) == 6
    assert program.bits() == real.bits()


@pytest.mark.parametrize("slab", [1, 10, 100])
@every_program
def test_slabs_give_the_very_bits(name: str, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLAB_ELEMENTS", slab)
    real, steps, program = trained(PROGRAMS[name], base=slab % 3)
    assert replay(program.subjects, steps, ALONE) == 6
    assert program.bits() == real.bits()


@pytest.mark.parametrize("name", ["AdamW single", "SGD fused", "several"])
def test_threads_give_the_very_bits_and_are_as_many_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLAB_ELEMENTS", 10)

    def with_three() -> dict[str, Any]:
        torch.set_num_threads(3)
        real, steps, program = trained(PROGRAMS[name])
        replayed = replay(program.subjects, steps, ALONE)
        return {"found": (replayed, torch.get_num_threads(), program.bits() == real.bits())}

    # In a process of its own: threads that were started here would be missing in every process that is forked later.
    assert tuple(must_finish(with_three)["found"]) == (6, 3, True)


@every_program
def test_whole_parameters_give_the_very_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_elementwise", lambda _: False)
    real, steps, program = trained(PROGRAMS[name], 1)
    assert replay(program.subjects, steps, ALONE) == 6
    assert program.bits() == real.bits()


def test_elementwise_is_what_was_measured_to_be() -> None:
    found = {name: all(map(is_elementwise, PROGRAMS[name]().subjects.optimizers)) for name in PROGRAMS}
    whole = {name for name, elementwise in found.items() if not elementwise}
    assert whole == {"Adafactor foreach", "Adafactor single", "Muon", "Muon nesterov", "several"}

    class Mine(optim.Adam):
        pass

    assert not is_elementwise(Mine([torch.zeros(1)]))


def test_rows_are_taken_apart_only_where_they_keep_their_bits() -> None:
    def sliced(name: str) -> set[str]:
        program = PROGRAMS[name]()
        names, optimizer = program.subjects.names(), program.subjects.optimizers[0]
        return {
            names[id(p)].rpartition("model.")[2]
            for group in optimizer.param_groups
            for p in group["params"]
            if is_sliceable(optimizer, group, p)
        }

    usual = {"first.weight", "first.bias", "second.bias", "conv.weight", "conv.bias", "unused"}
    assert sliced("AdamW foreach") == sliced("AdamW tensor lr") == sliced("SGD single") == sliced("Lion") == usual
    assert not sliced("AdamW fused") | sliced("AdamW amsgrad foreach") | sliced("Adamax single") | sliced("Muon")


def test_optimizers_whose_steps_cannot_be_repeated_are_refused_by_name() -> None:
    weight = nn.Parameter(torch.zeros(3, 2))
    assert "LBFGS calls the model several times" in why_not(optim.LBFGS([weight]))
    assert "SparseAdam takes sparse gradients" in why_not(optim.SparseAdam([weight]))
    assert "differentiable" in why_not(optim.Adam([weight], differentiable=True))
    twice = optim.SGD([weight])
    twice.param_groups.append({**twice.param_groups[0]})
    assert "SGD has a parameter twice" in why_not(twice)
    weight.grad = torch.zeros(3, 2).to_sparse()
    assert "SGD has sparse gradients" in why_not(optim.SGD([weight]))


# -- what replay leaves alone


def test_hooks_gradients_schedulers_and_random_state_of_the_program_are_left_alone() -> None:
    _, steps, program = trained(one(optim.AdamW))
    optimizer = program.subjects.optimizers[0]
    seen: list[object] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append(1)),
        optimizer.register_step_post_hook(lambda *_: seen.append(2)),
        register_optimizer_step_pre_hook(lambda *_: seen.append(3)),
    ]
    program.model.scale.grad = torch.tensor(3.0)
    before = (
        torch.get_rng_state(),
        random.getstate(),
        program.schedules[0].state_dict(),
        vars(optimizer).get("_opt_called"),
    )
    hooks = dict(_global_optimizer_pre_hooks)
    replay(program.subjects, steps, ALONE)
    assert seen == []
    assert program.model.scale.grad == 3.0
    assert program.model.first.weight.grad is None
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert (program.schedules[0].state_dict(), vars(optimizer).get("_opt_called")) == before[2:]
    assert hooks == dict(_global_optimizer_pre_hooks) != {}
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", ["Rprop foreach", "Lion", "Adam fused"])
def test_recorded_gradients_are_only_read(name: str) -> None:
    _, steps, program = trained(PROGRAMS[name])
    names = [n for n in program.subjects.names().values() if not n.endswith(("unused", "bias"))]
    before = [bits(one.gradient(n, 0, 1 << 20)) for one in steps for n in names]
    replay(program.subjects, steps, ALONE)
    assert before == [bits(one.gradient(n, 0, 1 << 20)) for one in steps for n in names]


# -- proofs


def test_without_digests_nothing_is_proven() -> None:
    _, steps, program = trained(one(optim.AdamW))
    assert replay(program.subjects, [replace(one, digest=None) for one in steps], ALONE) is None


@pytest.mark.parametrize("name", ["AdamW single", "Adafactor single"])
@pytest.mark.parametrize(("wrong", "found", "proven"), [(2, 3, None), (4, 6, 3)])
def test_a_step_that_consumed_something_else_is_found(name: str, wrong: int, found: int, proven: int | None) -> None:
    _, steps, program = trained(PROGRAMS[name])
    groups = [{**group, "lr": group["lr"] * (1 + 2**-20)} for group in steps[wrong - 1].calls[0].groups]
    steps[wrong - 1].calls[0] = replace(steps[wrong - 1].calls[0], groups=groups)
    with pytest.raises(Diverged, match=f"replayed to step {found}") as caught:
        replay(program.subjects, steps, ALONE)
    assert (caught.value.step, caught.value.proven) == (found, proven)


def test_a_base_with_one_flipped_bit_is_found() -> None:
    _, steps, program = trained(one(optim.AdamW))
    program.model.unused.data.view(torch.int32)[1] ^= 1
    with pytest.raises(Diverged):
        replay(program.subjects, steps, ALONE)


# -- over ranks


def as_rank(rank: int, folder: Path, name: str) -> None:
    torch.set_num_threads(1)
    gather.PACK_BYTES = 100  # many messages
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    asked: set[tuple[str, int, int]] = set()

    def ddp() -> Training:
        training = PROGRAMS[name]()
        training.subjects.models = [nn.parallel.DistributedDataParallel(training.model)]
        return training

    real, steps, program = trained(ddp, base=1)

    def recorded(one: Consumed) -> Consumed:
        def rows(parameter: str, first: int, rows: int) -> Tensor:
            asked.add((parameter, first, rows))
            return one.gradient(parameter, first, rows)

        return replace(one, gradient=rows)

    proven = replay(program.subjects, list(map(recorded, steps)), Topology(rank=rank, world=2, node="here"))
    read = sum(rows for parameter, _, rows in asked if parameter.endswith("conv.weight"))
    damaged = ddp()
    if rank == 1:
        damaged.model.get_parameter("unused").data += 1
    try:
        replay(damaged.subjects, steps, Topology(rank=rank, world=2, node="here"))
        found = None
    except Diverged as error:
        found = error.step
    (folder / f"{rank}.json").write_text(json.dumps([proven, program.bits() == real.bits(), read, found]))
    dist.barrier()
    os._exit(0)  # taking a process group apart under DDP can hang


@pytest.mark.parametrize(
    "name", ["AdamW single", "ASGD averaging", "SGD momentum, late parameters", "Adafactor single"]
)
def test_two_ranks_replay_a_part_each_and_both_have_the_whole(name: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=as_rank, args=(rank, tmp_path, name)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
        rank.kill()
    ended = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [(proven, same) for proven, same, _, _ in ended] == [(6, True)] * 2
    assert sum(read for _, _, read, _ in ended) == (18 if name == "Adafactor single" else 9)
    assert [found for *_, found in ended] == [3, 3]


# -- without the program


def held(training: Training, groups: list[Any], aliases: dict[str, str]) -> Checkpoint:
    """A program's state as a checkpoint in memory."""
    info = ImageInfo(
        format=1,
        run="r",
        rank=0,
        world=1,
        aliases=aliases,
        optimizers=training.subjects.optimizer_infos(training.subjects.names()),
    )
    held = Checkpoint(step=0, world=1, info=info, extras={"optimizers": groups}, own=True)
    for entry in training.subjects.listing().entries:
        shape = tuple(entry.tensor.shape)
        piece = Piece(
            name=entry.name, dtype="F32", shape=shape, start=(0,) * len(shape), extent=shape, offset=0, length=0
        )
        held.pieces[entry.name] = [(piece, entry.tensor.detach().clone())]
    return held


@pytest.mark.parametrize("name", ["AdamW single", "Adagrad fused", "Muon", "several"])
def test_steps_can_be_replayed_without_the_program(name: str) -> None:
    real, steps, program = trained(PROGRAMS[name], base=1)
    saved = [
        {"groups": [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups], "plain": {}}
        for o in program.subjects.optimizers
    ]
    base = held(program, saved, program.subjects.listing().aliases)
    subjects = subjects_of(base, everything(base))
    assert replay(subjects, steps, ALONE) == 6
    read = {entry.name: bits(entry.tensor) for entry in subjects.listing().entries}
    assert read == {entry.name: bits(entry.tensor) for entry in real.subjects.listing().entries}


@pytest.mark.parametrize("kind", ["mine.Lion", "torch.optim.Optimizer", "torch.optim.lr_scheduler", "os.system"])
def test_optimizers_that_are_not_torch_s_own_are_not_rebuilt(kind: str) -> None:
    with pytest.raises(EverstepError, match=r"is not one of torch\.optim"):
        rebuild(OptimizerInfo(type=kind, groups=()), {}, [], {})


# -- on a device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *itertools.product(MANY, [{}, {"foreach": False}]),
        *itertools.product([kind for kind in FUSED if kind is not optim.Adagrad], [{"fused": True}]),
    ]
    + [(kind, {"capturable": True}) for kind in MANY if kind not in (optim.SGD, optim.Adagrad)]
    + [(optim.Adam, {"capturable": True, "lr": torch.tensor(0.01)}), (optim.Adafactor, {})],
)
def test_a_device_gives_the_very_bits(kind: Any, options: dict[str, Any]) -> None:
    def program() -> Training:
        model = Tied().cuda()
        lr = {"lr": options["lr"].cuda()} if "lr" in options else {}
        return Training(model, [kind(model.parameters(), **options | lr)])

    real, steps, program_ = trained(program, 1)
    assert replay(program_.subjects, steps, ALONE) == 6
    assert program_.bits() == real.bits()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_steps_that_unscale_and_skip_themselves_are_replayed_from_scaled_gradients() -> None:
    def program() -> tuple[nn.Module, optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = nn.Linear(33, 17).cuda()
        return model, optim.AdamW(model.parameters(), lr=0.01, fused=True), torch.amp.GradScaler("cuda", 1024.0)

    model, optimizer, scaler = program()
    subjects = Subjects(models=[model], optimizers=[optimizer], scaler=scaler)
    steps: list[Consumed] = []

    def record(o: Any, *_: Any) -> None:
        names = subjects.names()
        gradients = {names[id(p)]: p.grad.cpu() for p in model.parameters()}
        call = called(0, o, subjects)
        call = replace(call, scale=call.scale.cpu(), found_inf=call.found_inf.cpu())

        def rows(name: str, first: int, rows: int) -> Tensor:
            return gradients[name][first : first + rows]

        steps.append(Consumed(step=len(steps) + 1, calls=[call], gradient=rows))

    optimizer.register_step_pre_hook(record)
    for step in range(STEPS):
        x = torch.randn(8, 33, generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(x).square().mean() * (torch.inf if step == 3 else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert len(steps) == STEPS and sum(bool(one.calls[0].found_inf) for one in steps) == 1
    other, other_optimizer, _ = program()
    copied = Subjects(models=[other], optimizers=[other_optimizer])
    replay(copied, steps, ALONE)
    wanted = {e.name: bits(e.tensor) for e in subjects.listing().entries if e.gate is not None}
    assert {e.name: bits(e.tensor) for e in copied.listing().entries} == wanted


# -- not exact, and called so


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01},
     {"momentum": 0.9, "nesterov": True, "maximize": True}],
)  # fmt: skip
@pytest.mark.parametrize("base", [0, 2])
def test_merged_steps_of_sgd_come_close(options: dict[str, Any], base: int) -> None:
    real, steps, program = trained(lambda: calm(optim.SGD, **options), base)
    merge_sgd_lossy(program.subjects, steps)
    wanted = {e.name: e.tensor for e in real.subjects.listing().entries}
    found = {e.name: e.tensor for e in program.subjects.listing().entries}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def calm(kind: Any, **options: Any) -> Training:
    """No infinite gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 3), nn.Linear(3, 5))
    training = Training(model, [kind(model.parameters(), lr=0.02, **options)])
    gradients = training.gradients

    def finite(step: int) -> dict[str, Tensor]:
        return {name: gradient.nan_to_num(0.5, 0.5, 0.5) for name, gradient in gradients(step).items()}

    training.gradients = finite  # type: ignore[method-assign]
    return training


def test_adam_is_never_merged() -> None:
    _, steps, program = trained(lambda: calm(optim.Adam))
    before = program.bits()
    with pytest.raises(EverstepError, match="only SGD can be merged over steps, and Adam is not"):
        merge_sgd_lossy(program.subjects, steps)
    assert program.bits() == before
