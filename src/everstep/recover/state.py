"""All that a checkpoint holds, apart from the data position: how it is taken, and how it is put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from everstep.capture import extras as trees
from everstep.capture.collector import uncollected
from everstep.capture.compressor import Compressor
from everstep.capture.form import on_device
from everstep.capture.layout import COMPRESSOR, Listing, Subjects, optimizer_name, own_state, plain_name, type_name
from everstep.capture.reductions import Reductions
from everstep.capture.sharded import check_modules, check_optimizer, stepping
from everstep.errors import BadConfig, Mismatch, Unstorable
from everstep.events import Degraded, Sink
from everstep.recover.assemble import Checkpoint
from everstep.recover.restore import apply_rest, restore


class State:
    """The objects that were given to guard(), as one tree of values beside the listed tensors."""

    def __init__(
        self,
        *,
        models: list[nn.Module],
        optimizers: list[torch.optim.Optimizer],
        schedulers: list[Any],
        scaler: Any,
        extra: Any,
        compressor: Compressor | None,
    ) -> None:
        if extra is not None and not isinstance(extra, Mapping):
            raise BadConfig(f"extra must be a dict of names to objects or values, not {type(extra).__name__}")
        if torch.is_inference_mode_enabled():
            raise BadConfig(
                "guard() is called inside torch.inference_mode(), where nothing can be trained: call it before"
            )
        for optimizer in optimizers:
            check_optimizer(optimizer)
        for model in models:
            check_modules("the model", model)
        self.schedulers, self.scaler = schedulers, scaler
        self.extra: Any = extra if extra is not None else {}
        modules = {key: value for key, value in self.extra.items() if isinstance(value, nn.Module)}
        self.subjects = Subjects(
            models=models, optimizers=optimizers, scaler=scaler, compressor=compressor, modules=modules
        )
        self.reductions = Reductions(self.subjects)
        self._with_extra_state: list[tuple[str, nn.Module]] = []
        self._unkept: list[str] = []  # of those that have one, whose cannot be stored
        for name, module in _with_extra_state(self.subjects):
            try:
                trees.encode(module.get_extra_state(), f"get_extra_state() of {name}")
                self._with_extra_state.append((name, module))
            except Unstorable as error:
                self._unkept.append(str(error))
        self._given = [[_settings(group) for group in one.param_groups] for one in optimizers]
        self._odd: dict[int, tuple[int | None, dict[str, torch.Tensor], list[Any]]] = {}
        if compressor is not None:
            if self.subjects.what_is_sharded():
                raise BadConfig(f"compress= is for gradients that every rank has: {self.subjects.what_is_sharded()}")
            compressor.bind(self.subjects.names())
        with uncollected():
            self.subjects.listing()  # whatever cannot be stored is refused here and not at the first cut
        trees.encode(self.tree(), "state")

    def tree(self) -> dict[str, Any]:
        return {
            "optimizers": [
                {
                    "groups": [
                        {k: v for k, v in group.items() if k != "params" and not on_device(v)}
                        for group in optimizer.param_groups
                    ],
                    "given": self._given[index],
                    "own": own_state(optimizer),
                    **self._odd_state(index),
                }
                for index, optimizer in enumerate(self.subjects.optimizers)
            ],
            "modules": {name: module.get_extra_state() for name, module in self._with_extra_state},
            "schedulers": [one.state_dict() for one in self.schedulers],
            "scaler": self._scaler_scalars(),
            "compressor": self.subjects.compressor.small() if self.subjects.compressor is not None else None,
            "reductions": self.reductions.tree(),
            "extra": {
                key: {"state": value.state_dict()} if is_stateful(value) else {"value": value}
                for key, value in self.extra.items()
                if not isinstance(value, nn.Module)
            },
        }

    def unused_settings(self, latest: Checkpoint) -> list[str]:
        """What this program gives its optimizers otherwise than the one before did: what was saved has taken its place.

        Not what has changed in the loop, as a learning rate does: programs are compared by what they began with.
        """
        found, imported = [], latest.extras.get("imported")
        for index, saved in enumerate(latest.extras["optimizers"][: len(self._given)]):
            name = optimizer_name(index, len(self._given))
            before = saved.get("given") or ([_settings(group) for group in saved["groups"]] if imported else [])
            for g, (was, now, kept) in enumerate(zip(before, self._given[index], saved["groups"], strict=False)):
                found += [
                    f"{key} of {name}, group {g}, was {was[key]} and is {value} in this program; {kept[key]} is used"
                    for key, value in now.items()
                    if key in was and key in kept and value not in (was[key], kept[key])
                ]
        return found

    def tell_loose_ends(self, emit: Sink) -> None:
        """What a resumed run does not have: state that cannot be stored, a scheduler of which guard() was not told."""
        for reason in self._unkept:
            emit(Degraded(what="the extra state of a module is not kept", reason=reason))
        told = bool(self.schedulers) or any(map(is_stateful, self.extra.values()))
        groups = (group for one in self.subjects.optimizers for group in one.param_groups)
        if not told and any("initial_lr" in group for group in groups):
            what = "a learning rate scheduler was not given to guard()"
            emit(Degraded(what=what, reason="a resumed run begins it anew; say guard(..., scheduler=...)"))

    def _odd_state(self, index: int) -> dict[str, Any]:
        """An optimizer's state that is not a tensor of a parameter. Who has any is asked again only if state grew."""
        state = stepping(self.subjects.optimizers[index]).state
        try:
            size = sum(map(len, state.values()), len(state))
        except TypeError:
            size = -1  # something under a name of its own that has no length
        known, plain, shared = self._odd.get(index, (None, {}, []))
        if size != known or size < 0:
            of_parameters = [key for key in state if isinstance(key, torch.Tensor)]
            shared = [key for key in state if not isinstance(key, torch.Tensor)]
            odd = [key for key in of_parameters if not all(map(torch.is_tensor, state[key].values()))]
            names = self.subjects.names() if odd else {}
            plain = {names[id(key)]: key for key in odd}
            self._odd[index] = (size, plain, shared)
        return {
            "plain": {
                name: {key: value for key, value in state[parameter].items() if not torch.is_tensor(value)}
                for name, parameter in plain.items()
            },
            "shared": {key: state[key] for key in shared},
        }

    def _scaler_scalars(self) -> dict[str, float] | None:
        """A GradScaler's constants; its scale and growth counter are tensors and travel with the others."""
        if self.scaler is None or not self.scaler.is_enabled():
            return None
        return {
            "growth_factor": self.scaler.get_growth_factor(),
            "backoff_factor": self.scaler.get_backoff_factor(),
            "growth_interval": self.scaler.get_growth_interval(),
            "init_scale": self.scaler._init_scale,
        }

    def forget_gradients(self) -> None:
        """Those of a step that broke off: the next one would add its own to them."""
        for parameter in (p for model in self.subjects.models for p in model.parameters()):
            parameter.grad = None

    def restore(self, base: Checkpoint, *, strict: bool, listing: Listing | None = None) -> list[str]:
        """Put back what optimizers update, and every other tensor; how the program differs from what was saved."""
        return restore(base, self.subjects, strict=strict, listing=listing)

    def restore_rest(self, latest: Checkpoint, *, is_record: bool, strict: bool) -> None:
        """Put back what is beside it: values, groups, schedulers, scaler and extras, of a base or of a record."""
        tree = latest.extras
        strict = strict and not tree.get("imported")  # which has nothing but weights, and maybe an optimizer's state
        if strict and len(tree["schedulers"]) != len(self.schedulers):
            raise Mismatch(f"{len(tree['schedulers'])} schedulers were saved and there are {len(self.schedulers)}")
        if is_record:
            apply_rest(latest, self.subjects)
        self._restore_compressor(latest, strict)
        self._restore_own(latest, strict)
        for one, saved in zip(self.schedulers, tree["schedulers"], strict=False):
            one.load_state_dict(saved)
        scaler = latest.scaler_state()
        if self.scaler is not None and scaler is not None:
            self.scaler.load_state_dict(scaler)
        filled: set[int] = set()
        for key, saved in tree["extra"].items():
            if key not in self.extra:
                if strict:
                    raise Mismatch(f"extra[{key!r}] was saved and is not given now")
                continue
            if "state" in saved:
                self.extra[key].load_state_dict(saved["state"])
            else:
                given = self.extra[key]
                value = _put_back(given, saved["value"], filled)
                if value is not given:
                    self.extra[key] = value

    def _restore_own(self, latest: Checkpoint, strict: bool) -> None:
        """What classes of optimizers and modules say themselves that it is to be kept."""
        of_optimizers = zip(self.subjects.optimizers, latest.info.optimizers, latest.extras["optimizers"], strict=False)
        for optimizer, before, saved in of_optimizers:
            if saved.get("own") and before.type == type_name(optimizer):
                optimizer.load_state_dict({**optimizer.state_dict(), **saved["own"]})
        saved, now = latest.extras.get("modules", {}), dict(self._with_extra_state)
        if strict and saved.keys() - now.keys():
            raise Mismatch(
                f"these had an extra state, and have none now: {', '.join(sorted(saved.keys() - now.keys()))}"
            )
        for name in saved.keys() & now.keys():
            now[name].set_extra_state(saved[name])

    def _restore_compressor(self, latest: Checkpoint, strict: bool) -> None:
        compressor, saved = self.subjects.compressor, latest.extras["compressor"]
        if strict and (compressor is None) != (saved is None):
            raise Mismatch("compress= was given then and is not now, or the reverse; what it held back would be lost")
        if compressor is not None and saved is not None:
            compressor.bind(self.subjects.names())
            large = {name.removeprefix(COMPRESSOR): name for name in latest.pieces if name.startswith(COMPRESSOR)}
            compressor.load({**saved, **{name: latest.tensor(full) for name, full in large.items()}})


def _with_extra_state(subjects: Subjects) -> Iterator[tuple[str, nn.Module]]:
    """Modules that have more to keep than tensors, by the names that they have without wrappers."""
    for prefix, model in subjects.named_modules():
        for path, module in model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield f"{prefix}.{plain_name(path + '.')}".rstrip("."), module


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """What an optimizer does to a group, but for what lies in tensors."""
    plain = (bool, int, float, str)
    return {
        key: value
        for key, value in group.items()
        if isinstance(value, plain) or (isinstance(value, tuple) and all(isinstance(one, plain) for one in value))
    }


@torch.no_grad()
def _put_back(old: Any, value: Any, filled: set[int]) -> Any:
    """A plain value as it was saved, in the object that the program has if that can hold it: others may know it.

    So are containers that a dict has under a key. What lies deeper is not filled: tensors may be those of the model,
    and what lists have nobody can tell apart. `filled`: what has its value, which two places may have had in common.
    """
    if id(old) in filled:
        return value
    if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor):
        if (old.shape, old.dtype) != (value.shape, value.dtype) or torch._debug_has_internal_overlap(old) != 0:
            return value
        old.copy_(value)
    elif isinstance(old, np.ndarray) and isinstance(value, np.ndarray):
        if (old.shape, old.dtype) != (value.shape, value.dtype) or not old.flags.writeable:
            return value
        np.copyto(old, value)
    elif isinstance(old, dict) and isinstance(value, dict):
        filled.add(id(old))
        arrays = (torch.Tensor, np.ndarray)
        new = {
            key: one if isinstance(one, arrays) else _put_back(old.get(key), one, filled) for key, one in value.items()
        }
        old.clear()
        old.update(new)
    elif isinstance(old, list) and isinstance(value, list):
        old[:] = value
    elif isinstance(old, set) and isinstance(value, set):
        old.clear()
        old.update(value)
    elif isinstance(old, deque) and isinstance(value, deque):
        old.clear()
        old.extend(value)
    else:
        return value
    filled.add(id(old))
    return old


def is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def as_list(value: Any, kind: type, name: str) -> list[Any]:
    items = [value] if isinstance(value, kind) else list(value) if isinstance(value, list | tuple) else []
    if any(type(one).__module__.startswith("deepspeed.runtime.") for one in items or [value]):
        raise BadConfig(
            "DeepSpeed keeps weights and optimizer in places of its own: everstep.integrations.deepspeed.guard(engine, "
            "loader, dir=...) knows them"
        )
    if not items or not all(isinstance(item, kind) for item in items):
        raise BadConfig(f"{name} must be a {kind.__module__}.{kind.__name__} or a list of them, not {value!r}")
    return items


def stateful_list(value: Any, name: str) -> list[Any]:
    items = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    for item in items:
        if not is_stateful(item):
            raise BadConfig(f"{name} must have state_dict() and load_state_dict(), and {item!r} has not")
    return items
