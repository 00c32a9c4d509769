"""The weights of another tool's checkpoint become step 0 of a new run.

What a run under guard() takes from it is the model, and the optimizer's state if its class is named and the file says
which parameter each part of it belongs to. Everything else begins as in a new run: schedulers, data, randomness.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from everstep.capture.layout import plain_name
from everstep.errors import BadConfig, Damaged, Unstorable
from everstep.image import Wanted
from everstep.integrations.foreign import read
from everstep.integrations.given import Given
from everstep.integrations.parts import NewPart, blank_tree, info_of, wanted
from everstep.keeper import flush
from everstep.recover.export import PARAM_NAMES
from everstep.store import claim
from everstep.store.disk import DiskTier
from everstep.store.manifest import committed_steps, run_name
from everstep.store.places import Places
from everstep.types import OptimizerInfo

STEP = 0
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    run: str
    kind: str  # of file
    tensors: int
    bytes: int
    optimizer: str  # empty: none was taken
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Content:
    tensors: dict[str, Given] = field(default_factory=dict)  # by full name
    aliases: dict[str, str] = field(default_factory=dict)
    optimizer: OptimizerInfo | None = None
    saved: dict[str, Any] | None = None  # what an optimizer has beside its tensors
    on_host: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def adopt(
    source: str | Path,
    directory: str | Path,
    *,
    key: str | None = None,
    optimizer: str | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> Adopted:
    """Make a run whose step 0 is what a file or directory of another tool holds.

    key: where the model's state_dict is in it, with dots between; by default it is found by its usual names.
    optimizer: the class whose state is taken along, such as "AdamW" of torch.optim, or with its module.
    watch: is told how many bytes of how many are done.
    """
    foreign, place = read(Path(source)), Path(directory).absolute()
    content = _Content()
    model = _model_part(foreign.tree, key)
    _refuse_everything(foreign.tree, str(source))
    _take_model(content, model)
    if model is not foreign.tree:
        beside = [str(name) for name, value in foreign.tree.items() if isinstance(value, Given)]
        content.notes += [f"{name} stands beside the model and was left out" for name in beside]
    state = next((foreign.tree[one] for one in _OPTIMIZER_KEYS if isinstance(foreign.tree.get(one), dict)), None)
    if optimizer is not None:
        _take_optimizer(content, _named(state, foreign.tree.get(PARAM_NAMES)), _full_class(optimizer))
    elif state is not None:
        content.notes.append("it also has an optimizer's state, which is taken if its class is named (--optimizer)")
    room = [wanted(name, one.dtype, one.shape) for name, one in content.tensors.items()]
    claim.make(Places(directory=str(place)))
    tier = DiskTier(place)
    with claim.keep_away(place) as is_free:
        if not is_free or committed_steps(tier):
            raise BadConfig(f"{place} is a run with a past already; import into a directory of its own")
        run = _name(tier)
        size = _write(tier, run, content, room, watch)
    return Adopted(
        run=run, kind=foreign.kind, tensors=len(content.tensors), bytes=size,
        optimizer=content.optimizer.type if content.optimizer is not None else "", notes=tuple(content.notes),
    )  # fmt: skip


def _name(tier: DiskTier) -> str:
    """The run's, which an import that was killed may have given it already."""
    try:
        return run_name(tier)
    except FileNotFoundError:
        name = uuid.uuid4().hex
        claim.sign(tier, name, lambda event: None)
        return name


def _write(
    tier: DiskTier, run: str, content: _Content, room: list[Wanted], watch: Callable[[int, int], None] | None
) -> int:
    tree = blank_tree(STEP) | {"optimizers": [content.saved] if content.saved is not None else []}
    info = msgspec.structs.replace(
        info_of(run, 0, 1, content.aliases), on_host=tuple(content.on_host),
        optimizers=(content.optimizer,) if content.optimizer is not None else (),
    )  # fmt: skip
    part = NewPart(room, info, tree)
    done, total = 0, sum(part.place_of(name).nbytes for name in content.tensors)
    for name, one in content.tensors.items():
        target = part.place_of(name)
        one.copy_to(target)
        done += target.nbytes
        if watch is not None:
            watch(done, total)
    generation = uuid.uuid4().hex
    size = part.put(tier, generation).bytes
    if not flush.commit(tier, STEP, [0], 1, generation):
        raise Damaged("what was written cannot be read back", tier=tier.name, step=STEP)
    return size


# -- the model


def _model_part(tree: dict[str, Any], key: str | None) -> dict[str, Any]:
    found: Any = tree
    if key is not None:
        for word in key.split("."):
            if not isinstance(found, dict) or word not in found:
                there = ", ".join(map(str, found)) if isinstance(found, dict) else "nothing"
                raise BadConfig(f"there is no {word!r} on the way to {key}; there is {there}")
            found = found[word]
    else:
        named = [one for one in _MODEL_KEYS if isinstance(tree.get(one), dict)]
        is_one = any(isinstance(one, Given | torch.Tensor) for one in tree.values())  # a state_dict by itself
        if len(named) > 1 or not (named or is_one):
            raise BadConfig(f"which of {', '.join(map(str, tree)) or 'nothing'} is the model? Say so with key (--key)")
        found = tree[named[0]] if named else tree
    if not isinstance(found, dict):
        raise BadConfig(f"{key} is not a state_dict")
    return found


def _refuse_everything(tree: dict[str, Any], source: str) -> None:
    """A file of nothing but tensors that `everstep export` has written with all of a run."""
    state = next((name for name in tree if re.match(r"optimizer(\.\d+)?\.state\.", str(name))), None)
    if state is not None and any(str(name).startswith("model.") for name in tree):
        raise BadConfig(
            f"{source} has an optimizer's state beside the model ({state}), and nothing of its groups. Write it with "
            "`everstep export --only model`, or all of the run with `--format torch`"
        )


def _take_model(content: _Content, part: dict[str, Any]) -> None:
    first: dict[Any, str] = {}
    for name, value in _flat(part):
        full = f"model.{plain_name(name)}"
        if full in content.tensors or full in content.aliases:
            raise BadConfig(f"two entries would both be {full}; say which is the model with key (--key)")
        _refuse_odd(full, value)
        if not isinstance(value, Given):
            content.notes.append(f"{name} is no tensor and was left out")
        elif value.memory is not None and value.memory in first:
            content.aliases[full] = first[value.memory]
        else:
            content.tensors[full] = value
            if value.memory is not None:
                first[value.memory] = full
    if not content.tensors:
        raise BadConfig("there is no tensor in it")


def _refuse_odd(name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        raise Unstorable(name, value, "it is sparse, nested, or without data")


def _flat(part: Mapping[Any, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in part.items():
        name = f"{before}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, dict) else [(name, value)]
    return found


# -- the optimizer


def _full_class(name: str) -> str:
    if "." in name:
        return name
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise BadConfig(f"torch.optim has no {name}; an optimizer of another module is named with it, as a.b.Name")
    return f"{kind.__module__}.{kind.__qualname__}"


def _take_optimizer(content: _Content, part: dict[str, Any] | None, kind: str) -> None:
    """What it knows by names of parameters; numbers say nothing without the program that gave them."""
    if part is None or not isinstance(part.get("state"), dict) or not isinstance(part.get("param_groups"), list):
        raise BadConfig(f"there is no optimizer's state_dict in it under any of {', '.join(_OPTIMIZER_KEYS)}")
    groups, plain = [], dict[str, dict[str, Any]]()
    for group in part["param_groups"]:
        keys, named = _members(group)
        names = [f"model.{plain_name(one)}" for one in named]
        strange = [name for name in names if name not in content.tensors]
        if len(names) != len(keys) or strange:
            raise BadConfig(
                f"the optimizer's state is of {(strange or keys)[0]!r}, which names no parameter that is there. Where "
                "parameters are numbered, only the program knows which: save their names too, as "
                "torch.distributed.checkpoint.state_dict.get_state_dict does, or leave out the optimizer"
            )
        on_device = bool(group.get("capturable") or group.get("fused"))
        for key, name in zip(keys, names, strict=True):
            state = part["state"].get(key, part["state"].get(str(key), {}))
            if not isinstance(state, dict):
                raise BadConfig(f"the optimizer's state of {key} is a {type(state).__name__}, and not a dict")
            for field_name, value in state.items():
                full = f"optimizer.state.{name}.{field_name}"
                _refuse_odd(full, value)
                if not isinstance(value, Given):
                    plain.setdefault(name, {})[field_name] = value
                    continue
                content.tensors[full] = value
                if field_name == "step" and not on_device:
                    content.on_host.append(full)
        values = {k: v.taken() if isinstance(v, Given) else v for k, v in group.items()}
        groups.append((names, {k: v for k, v in values.items() if k not in ("params", PARAM_NAMES)}))
    content.optimizer = OptimizerInfo(type=kind, groups=tuple(tuple(names) for names, _ in groups))
    content.saved = {"groups": [values for _, values in groups], "plain": plain, "shared": {}}


def _named(state: Any, names: Any) -> Any:
    """With the names of its parameters in each group, where `everstep export` has put them beside it."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(groups, list) or not isinstance(names, list) or len(names) != len(groups):
        return state
    pairs = zip(groups, names, strict=True)
    return {**state, "param_groups": [{PARAM_NAMES: own, **g} if isinstance(g, dict) else g for g, own in pairs]}


def _members(group: Any) -> tuple[list[Any], list[str]]:
    """The parameters of a group: as its state has them, and their names."""
    keys = group.get("params") if isinstance(group, dict) else None
    named = group.get(PARAM_NAMES, keys) if isinstance(group, dict) else None
    if not (isinstance(keys, list) and isinstance(named, list) and all(isinstance(one, str | int) for one in keys)):
        raise BadConfig("a group of the optimizer's state_dict has no list of the names or numbers of its params")
    return keys, [str(one) for one in named]
