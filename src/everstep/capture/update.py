"""One optimizer step as a function: parameters, their state, gradients and group values in, parameters and state out.

`Call` is what one optimizer.step() consumed beside gradients, `Consumed` all that one step of training did. A `Double`
repeats calls: it is the user's optimizer over other tensors (clones, rows, whole parameters), without hooks, schedulers
and the gradients of the real one. `why_not` and `is_elementwise` say for which optimizers that can be, and how.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from everstep.errors import EverstepError
from everstep.types import OptimizerInfo

_HALF = 0.5
_OF_DTENSORS = ("_local_tensor", "_spec")  # which a double is none of
ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.NAdam,
    optim.RAdam, optim.Adamax, optim.ASGD,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One optimizer.step()."""

    optimizer: int
    groups: list[dict[str, Any]]  # what each group held, without "params"; tensors where the group holds tensors
    absent: frozenset[str]  # full names of parameters without a gradient
    scale: Tensor | None = None  # set by GradScaler on optimizers that unscale themselves (fused)
    found_inf: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class Consumed:
    """What one step consumed."""

    step: int
    calls: list[Call]  # in the order in which they were made; each optimizer at most once
    gradient: Callable[[str, int, int], Tensor]  # (parameter, first row, rows) -> host memory, only to be read
    digest: tuple[int, int] | None = None  # of the state after it: common over all ranks, private of this one


def recorded_call(saved: Mapping[str, Any], scalars: Mapping[str, Tensor], absent: Iterable[str]) -> Call:
    """A call as its record has it. `scalars`: what lay on a device."""
    groups = [dict(group) for group in saved["groups"]]
    for name, value in scalars.items():
        if name.startswith("group."):
            _, g, key = name.split(".", 2)
            groups[int(g)][key] = value
    return Call(
        optimizer=saved["optimizer"], groups=groups, absent=frozenset(absent),
        scale=scalars.get("scale") if saved["scaled"] else None,
        found_inf=scalars.get("found_inf") if saved["scaled"] else None,
    )  # fmt: skip


def why_not(optimizer: optim.Optimizer) -> str:
    """Why steps of this optimizer cannot be repeated from what they consumed; empty if that can be tried."""
    name = type(optimizer).__qualname__
    if isinstance(optimizer, optim.LBFGS):
        return f"{name} calls the model several times in one step"
    if hasattr(optimizer, "skip_synchronize"):
        return f"{name} averages gradients of all ranks within step(), as Horovod does: one of them cannot repeat it"
    if isinstance(optimizer, optim.SparseAdam):
        return f"{name} takes sparse gradients"
    parameters = parameters_of(optimizer)
    if len(set(map(id, parameters))) < len(parameters):
        return f"{name} has a parameter twice"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} is differentiable, so that its steps are part of a graph"
    if any(parameter.grad is not None and parameter.grad.layout is not torch.strided for parameter in parameters):
        return f"{name} has sparse gradients"
    return ""


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Whether every element is updated by itself: a parameter does not know its neighbours, nor a row the other rows.

    Classes that are not torch's own say so by an attribute of their own, `everstep_elementwise = True`.
    """
    return type(optimizer) in ELEMENTWISE or bool(vars(type(optimizer)).get("everstep_elementwise"))


def is_sliceable(optimizer: optim.Optimizer, group: Mapping[str, Any], parameter: Tensor) -> bool:
    """Whether some rows, stepped by themselves, have the bits that they have in the whole parameter.

    On a host the last elements, those that fill no vector, go another way. It rounds otherwise where something is kept
    in a wider type in between (fused kernels, bfloat16), and maximum() makes another NaN there. Rows must lie one
    after another.
    """
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    in_rows = parameter.dim() > 0 and (
        parameter.is_contiguous()
        or (parameter.dim() in formats and parameter.is_contiguous(memory_format=formats[parameter.dim()]))
    )
    if not is_elementwise(optimizer) or parameter.device.type != "cpu":
        return in_rows and is_elementwise(optimizer)
    with_tails = group.get("fused") or parameter.dtype not in (torch.float32, torch.float64)
    return in_rows and not (with_tails or group.get("amsgrad") or type(optimizer) is optim.Adamax)


def why_no_replica(optimizer: optim.Optimizer) -> str:
    """Why a host image cannot follow this optimizer by the rows that a rank has; empty if it can.

    It is rebuilt by its name, so it must be torch's own. What a device computes a host cannot repeat to the bit, but
    what a host computes it must.
    """
    name = type(optimizer).__qualname__
    if type(optimizer) not in ELEMENTWISE:
        return f"{name} is none of torch's optimizers that update every element by itself"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            rows = parameter.detach() if parameter.dim() else parameter.detach().view(1)
            if parameter.device.type == "cpu" and not is_sliceable(optimizer, group, rows):
                return f"{name}, as it is set, gives rows of {parameter.dtype} other bits than the whole parameter"
    return ""


def flushes_denormals() -> bool:
    """Whether this thread computes as torch.set_flush_denormal(True) makes it; torch does not tell."""
    return sys.float_info.min * _HALF == 0.0


def kinds_of_device(optimizers: Iterable[optim.Optimizer]) -> list[str]:
    return sorted({parameter.device.type for one in optimizers for parameter in parameters_of(one)})


def parameters_of(optimizer: optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def over(
    optimizer: optim.Optimizer, groups: Mapping[int, Sequence[Tensor]], state: Mapping[Any, Any]
) -> optim.Optimizer:
    """The class and attributes of an optimizer over other tensors, in some of its groups, and none of its hooks."""
    double = object.__new__(type(optimizer))  # copy.copy would forget the attributes
    hooks: dict[str, Any] = {
        key: OrderedDict() for key in vars(optimizer) if key.startswith("_optimizer_") and "hooks" in key
    }
    vars(double).update({**vars(optimizer), **hooks})
    vars(double).pop("step", None)  # a scheduler's
    double.state = defaultdict(dict, state)
    double.param_groups = [{**optimizer.param_groups[g], "params": list(params)} for g, params in groups.items()]
    return double


@dataclass(slots=True, kw_only=True)
class Member:
    """One parameter of a double."""

    group: int
    parameter: nn.Parameter
    state: dict[str, Any]


class Double:
    """An optimizer over other tensors: the class and attributes of the real one, none of its hooks."""

    def __init__(self, optimizer: optim.Optimizer, members: Sequence[Member], shared: dict[Any, Any]) -> None:
        self.members = members
        self._real = optimizer
        self.shared = shared  # state that belongs to no parameter
        self._groups = sorted({member.group for member in members})
        groups = {g: [m.parameter for m in members if m.group == g] for g in self._groups}
        state = {member.parameter: member.state for member in members if member.state}
        self._double = over(optimizer, groups, {**shared, **state})

    @torch.no_grad()
    def step(self, call: Call, gradients: Sequence[Tensor | None]) -> None:
        """What optimizer.step() did when it was called so. Gradients are the double's own: it may write them.

        Hooks of all optimizers are kept away by `without_global_hooks`, which is not for several threads.
        """
        device = self.members[0].parameter.device if self.members else torch.device("cpu")
        for key, value in (("grad_scale", call.scale), ("found_inf", call.found_inf)):
            vars(self._double).pop(key, None)
            if value is not None:
                setattr(self._double, key, value.to(device, copy=True))
        for g, group in zip(self._groups, self._double.param_groups, strict=True):
            real = self._real.param_groups[g]
            group.update({key: _like_real(value, real.get(key)) for key, value in call.groups[g].items()})
        for member, gradient in zip(self.members, gradients, strict=True):
            member.parameter.grad = gradient
        type(self._double).step(self._double)
        for member in self.members:
            member.parameter.grad = None
            member.state = self._double.state.get(member.parameter, member.state)
        self.shared.update({key: value for key, value in self._double.state.items() if not isinstance(key, Tensor)})


def _like_real(value: Any, real: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(real.device if isinstance(real, Tensor) else value.device, copy=True)
    return value


@contextmanager
def without_global_hooks() -> Iterator[None]:
    """While doubles step."""
    hooks: tuple[Any, Any] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    kept = [dict(some) for some in hooks]
    for some in hooks:
        some.clear()
    try:
        yield
    finally:
        for some, before in zip(hooks, kept, strict=True):
            some.update(before)


def double_of(parameter: Tensor, data: Tensor) -> nn.Parameter:
    """A parameter over other memory, with the attributes that optimizers look at."""
    double = nn.Parameter(data, requires_grad=parameter.requires_grad)
    vars(double).update({key: value for key, value in vars(parameter).items() if key not in _OF_DTENSORS})
    return double


def rows_of(tensor: Tensor, first: int, rows: int) -> Tensor:
    """A view of some rows; of all of a tensor without dimensions."""
    return tensor.detach().narrow(0, first, rows) if tensor.dim() else tensor.detach()


def has_rows(value: Any, parameter: Tensor) -> bool:
    """Whether this state goes with the parameter's rows, rather than with the parameter."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def state_rows(state: Mapping[str, Any], parameter: Tensor, first: int, rows: int) -> dict[str, Any]:
    """The state of some rows: views of what has rows, a copy of what has none, since every part advances it itself."""
    return {
        key: rows_of(value, first, rows)
        if has_rows(value, parameter)
        else value.detach().clone()
        if isinstance(value, Tensor)
        else copy.deepcopy(value)
        for key, value in state.items()
    }


def like_parameter(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in memory of its own, on the device and in the memory format that backward gives it."""
    own = torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False)
    return own.copy_(gradient.view(own.shape), non_blocking=True)


def rebuild(
    info: OptimizerInfo,
    tensors: Mapping[str, nn.Parameter],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[str, Mapping[str, Any]],
) -> optim.Optimizer:
    """An optimizer of torch without the program that had it, over these parameters, with this state."""
    module, _, name = info.type.rpartition(".")
    kind = getattr(optim, name, None) if module.split(".")[:2] == ["torch", "optim"] else None
    if not (isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer):
        raise EverstepError(
            f"{info.type} is not one of torch.optim, so its steps can only be repeated by the program that has it. "
            "Start that program to restore this step, or choose a step that has a base."
        )
    make: Callable[..., optim.Optimizer] = kind
    rebuilt = make([{"params": [tensors[name] for name in group]} for group in info.groups])
    for group, saved, names in zip(rebuilt.param_groups, groups, info.groups, strict=True):
        group.update(saved)
        for name in names:
            if state.get(name):
                rebuilt.state[tensors[name]] = dict(state[name])
    return rebuilt
