"""Whether an optimizer's step is a function of what a record holds, found out by doing one again.

In its second step, when it has state, an optimizer gets a double: clones of parameters, state and gradients. When the
real step is done the double steps too, under other random numbers, and the bits are compared; once more at the cut,
since a loop may write parameters after the step. Attributes that a step changes are seen as well: no record has them.
The program notices nothing: its random numbers, hooks and gradients are as they were.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, optim

from everstep.capture.bits import same_bits
from everstep.capture.layout import Subjects
from everstep.capture.sharded import stepping
from everstep.capture.stepped import gradients_of, local_state, placements_of, stepped_by
from everstep.capture.update import (
    Call,
    Double,
    Member,
    double_of,
    has_rows,
    is_sliceable,
    rows_of,
    state_rows,
    why_not,
    without_global_hooks,
)

SAMPLE_ELEMENTS = 1 << 20
_TRIED_STEP = 2  # the first one makes the state
_KNOWN = frozenset(("state", "param_groups", "defaults", "grad_scale", "found_inf", "_opt_called", "_step_count"))


@dataclass(slots=True)
class _Sample:
    """Some rows of a parameter, whose double is a member."""

    name: str
    parameter: Tensor
    local: Tensor  # what of it is stepped here
    first: int
    rows: int
    gradient: Tensor | None


@dataclass(slots=True)
class _Trial:
    call: Call
    double: Double
    samples: list[_Sample]
    hidden: dict[str, Any]


class Purity:
    """The self-test of all optimizers of a run."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        self._optimizers = subjects.optimizers
        self._calls = [0] * len(self._optimizers)
        self._trials: dict[int, _Trial] = {}
        self._seen: set[int] = set()  # compared at a cut
        self._reason = next(filter(None, map(_why_not, self._optimizers)), "")

    def tries_next(self, index: int) -> bool:
        """Whether the next step of an optimizer is the one that is tried, or one after it."""
        return self._calls[index] >= _TRIED_STEP - 1

    def before(self, index: int, call: Call) -> None:
        """To be called when step() is about to begin."""
        self._calls[index] += 1
        if self._calls[index] == _TRIED_STEP and not self._reason:
            self._reason = _why_not(self._optimizers[index])  # what gradients are like is seen only now
            if not self._reason:
                self._trials[index] = self._trial(index, call)

    @torch.no_grad()
    def after(self, index: int) -> None:
        """To be called when step() is done."""
        trial = self._trials.get(index)
        if trial is None or index in self._seen or self._calls[index] != _TRIED_STEP or self._reason:
            return
        optimizer = stepping(self._optimizers[index])
        kind = type(optimizer).__qualname__
        changed = _changed(trial.hidden, _hidden(optimizer))
        if changed:
            self._reason = f"{kind}.step() changes its attribute {changed}, which is in no param group and no state"
            return
        with _other_random_numbers(self._subjects), without_global_hooks():
            trial.double.step(trial.call, [sample.gradient for sample in trial.samples])
        found = self._difference(optimizer, trial)
        if found:
            self._reason = f"{kind}.step(), done again with the same gradients, gives another {found}"

    @torch.no_grad()
    def at_cut(self) -> str | None:
        """Why steps cannot be repeated; empty if they can; None if that is not known yet."""
        for index, trial in self._trials.items():
            if index not in self._seen and self._calls[index] == _TRIED_STEP and not self._reason:
                optimizer = stepping(self._optimizers[index])
                found = self._difference(optimizer, trial)
                if found:
                    kind = type(optimizer).__qualname__
                    self._reason = f"something changes {found} after {kind}.step(), between it and the next batch"
            self._seen.add(index)
        done = self._reason or len(self._seen) == len(self._optimizers)
        if done:
            self._trials.clear()
        return self._reason if done else None

    def _trial(self, index: int, call: Call) -> _Trial:
        optimizer, names = stepping(self._optimizers[index]), self._subjects.names()
        samples, members = [], []
        for g, parameter, local in stepped_by(optimizer):
            first, rows = _sampled(local, is_sliceable(optimizer, optimizer.param_groups[g], local))
            seen = gradients_of([parameter], placements_of([parameter]))
            assert not isinstance(seen, str)  # as `_why_not` has found
            gradient = torch.empty_like(rows_of(local, first, rows)) if seen[0] is not None else None
            if gradient is not None and seen[0] is not None:
                gradient.copy_(rows_of(seen[0], first, rows))
            samples.append(_Sample(names[id(parameter)], parameter, local, first, rows, gradient))
            state = state_rows(local_state(optimizer, parameter), local, first, rows)
            own = {key: _cloned(value) for key, value in state.items()}
            clone = double_of(parameter, rows_of(local, first, rows).clone())
            members.append(Member(group=g, parameter=clone, state=own))
        shared = {key: _copied(value) for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
        return _Trial(call, Double(optimizer, members, shared), samples, _hidden(optimizer))

    def _difference(self, optimizer: optim.Optimizer, trial: _Trial) -> str:
        """The first thing that is not as the double has it."""
        for sample, member in zip(trial.samples, trial.double.members, strict=True):
            if not _same(rows_of(sample.local, sample.first, sample.rows), member.parameter):
                return sample.name
            state = local_state(optimizer, sample.parameter)
            for key in {**state, **member.state}:
                real: Any = state.get(key)
                if has_rows(real, sample.local):
                    real = rows_of(real, sample.first, sample.rows)
                if not _same(real, member.state.get(key)):
                    return f"{key} of {sample.name}"
        return ""


def _why_not(optimizer: optim.Optimizer) -> str:
    """Why steps of an optimizer cannot be repeated from what is recorded on this rank; empty if that can be tried."""
    reason = why_not(stepping(optimizer))
    for _, parameter, _ in () if reason else stepped_by(optimizer):
        found = gradients_of([parameter], placements_of([parameter]))
        if isinstance(found, str):
            return f"{type(stepping(optimizer)).__qualname__}: {found}"
    return reason


def _sampled(parameter: Tensor, sliceable: bool) -> tuple[int, int]:
    """Which rows to try: where rows are to be taken apart, some of the last, so that this is tried too."""
    rows = parameter.shape[0] if parameter.dim() else 1
    if not sliceable or rows < 2:
        return 0, rows
    at_most = max(1, SAMPLE_ELEMENTS * rows // max(1, parameter.numel()))
    first = max(rows // 3, rows - at_most)
    return first, rows - first


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@contextmanager
def _other_random_numbers(subjects: Subjects) -> Iterator[None]:
    devices = {p.device.index for o in subjects.optimizers for g in o.param_groups for p in g["params"] if p.is_cuda}
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(sorted(devices)):
        try:
            torch.manual_seed(0x5EED)
            random.seed(0x5EED)
            np.random.seed(0x5EED)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


# -- what an optimizer keeps beside its state


def _hidden(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Its attributes, copied so that a change shows; not those that torch's own machinery writes."""
    return {
        key: _copied(value)
        for key, value in vars(optimizer).items()
        if key not in _KNOWN and not key.startswith("_optimizer_")
    }


def _copied(value: Any, depth: int = 4) -> Any:
    """As far as values can be compared; of other objects their attributes."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    if depth and isinstance(value, dict):
        return {key if isinstance(key, str | int) else id(key): _copied(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple):
        return [_copied(item, depth - 1) for item in value]
    if isinstance(value, set | frozenset):
        return len(value)
    if depth and hasattr(value, "__dict__") and not callable(value):
        return _copied(vars(value), depth - 1)
    return id(value)


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    return next((key for key in {**before, **after} if not _same(before.get(key), after.get(key))), "")


def _same(one: Any, other: Any) -> bool:
    """The same bits."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.shape, one.dtype) == (other.shape, other.dtype) and same_bits(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.tobytes() == other.tobytes()
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other or one != one)
