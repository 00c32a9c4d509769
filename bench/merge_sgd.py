"""Many steps of SGD as one, lossy: what they amount to in real numbers, not the bits that training has.

A step of SGD, with or without momentum, is an affine map of parameter and momentum, and so are many of them: parameter
and momentum of the base, and each gradient, with a factor. Floats round after each step, and here only once. Whoever
uses it must label the result lossy. There is nothing like it for Adam, whose steps are not affine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, optim

from everstep.capture.layout import Subjects
from everstep.capture.update import Call, Consumed, rows_of
from everstep.errors import EverstepError

_SLAB_ELEMENTS = 1 << 18
_Factors = tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.float64]]]


@torch.no_grad()
def merge_sgd_lossy(subjects: Subjects, steps: Sequence[Consumed]) -> None:
    """Bring parameters and momenta to about where replaying `steps` would bring them."""
    names = subjects.names()
    for index, optimizer in enumerate(subjects.optimizers):
        if type(optimizer) is not optim.SGD:
            raise EverstepError(
                f"only SGD can be merged over steps, and {type(optimizer).__qualname__} is not; replay it"
            )
        calls = [next((call for call in one.calls if call.optimizer == index), None) for one in steps]
        if any(call is not None and call.found_inf is not None for call in calls):
            raise EverstepError("steps that unscale their gradients themselves cannot be merged; replay them")
        for g, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                name, momentum = names[id(parameter)], optimizer.state[parameter].get("momentum_buffer")
                factors = _factors(name, g, calls, momentum is not None)
                if momentum is None and factors[1].any():
                    momentum = optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                _combine(parameter, momentum, factors, name, steps)


def _factors(name: str, group: int, calls: Sequence[Call | None], has_momentum: bool) -> _Factors:
    """What parameter and momentum are made of in the end: of what they were, and of each gradient."""
    parameter, momentum = np.zeros((2, 2 + len(calls)))
    parameter[0] = momentum[1] = 1
    for i, call in enumerate(calls):
        if call is None or name in call.absent:
            continue
        values = call.groups[group]
        direction = float(values["weight_decay"]) * parameter
        direction[2 + i] += -1 if values["maximize"] else 1
        if values["momentum"]:
            damped = (1 - values["dampening"]) * direction if has_momentum else direction
            momentum = values["momentum"] * momentum * has_momentum + damped
            has_momentum = True
            direction = direction + values["momentum"] * momentum if values["nesterov"] else momentum
        parameter = parameter - float(values["lr"]) * direction
    return parameter, momentum if has_momentum else momentum * 0


def _combine(
    parameter: Tensor, momentum: Tensor | None, factors: _Factors, name: str, steps: Sequence[Consumed]
) -> None:
    rows = parameter.shape[0] if parameter.dim() else 1
    at_once = max(1, _SLAB_ELEMENTS * rows // max(1, parameter.numel()))
    if parameter.device.type != "cpu":
        at_once = max(1, rows)
    for first in range(0, rows, at_once):
        some = min(at_once, rows - first)
        mine = rows_of(parameter, first, some)
        other = rows_of(momentum, first, some) if momentum is not None else torch.zeros_like(mine)
        old = (mine.clone(), other.clone())
        for target, (a, b, *_) in zip((mine, other), factors, strict=True):
            torch.add(old[0] * a, old[1], alpha=b, out=target)
        for i, one in enumerate(steps):
            weights = [float(each[2 + i]) for each in factors]
            if any(weights):
                gradient = one.gradient(name, first, some).to(mine.device)
                for target, weight in zip((mine, other), weights, strict=True):
                    if weight:
                        target.add_(gradient, alpha=weight)
