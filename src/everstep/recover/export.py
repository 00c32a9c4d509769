"""Out to other tools: one safetensors file, torch.save, or a DCP directory. Each is written beside its final name."""

from __future__ import annotations

import os
import shutil
import uuid
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everstep.capture.layout import optimizer_name
from everstep.errors import BadConfig
from everstep.recover.assemble import Checkpoint

PARAM_NAMES = "param_names"  # of each group of an optimizer, as its state has them by number


def write(checkpoint: Checkpoint, path: Path, *, format: str, only: str) -> None:
    if only not in ("all", "model"):
        raise BadConfig(f"only must be 'all' or 'model', not {only!r}")
    writers = {"safetensors": _safetensors, "torch": _torch, "dcp": _dcp}
    if format not in writers:
        raise BadConfig(f"format must be 'safetensors', 'torch' or 'dcp', not {format!r}")
    if path.exists():
        raise BadConfig(f"{path} exists already; choose another name or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        writers[format](checkpoint, temporary, only)
        os.rename(temporary, path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def module_state(checkpoint: Checkpoint, prefix: str) -> dict[str, Tensor]:
    """A module's own state_dict: plain names, tied tensors under each of their names, no volatile buffers."""
    names = {name: name for name in checkpoint.pieces if name.startswith(prefix)}
    names |= {alias: name for alias, name in checkpoint.info.aliases.items() if alias.startswith(prefix)}
    return {alias.removeprefix(prefix): checkpoint.tensor(name) for alias, name in names.items()}


def extra_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """What was given as extra=: plain values as they are, of objects their state_dict."""
    saved = checkpoint.extras["extra"]
    found = {key: value["state"] if "state" in value else value["value"] for key, value in saved.items()}
    modules = sorted({name.split(".")[1] for name in checkpoint.pieces if name.startswith("extra.")})
    return found | {key: module_state(checkpoint, f"extra.{key}.") for key in modules}


def optimizer_states(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """What each optimizer.state_dict() gave: state by index, groups by index."""
    found = []
    infos = checkpoint.info.optimizers
    for i, (info, saved) in enumerate(zip(infos, checkpoint.extras["optimizers"], strict=True)):
        prefix = optimizer_name(i, len(infos))
        tensors = checkpoint.state_names(prefix)
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        for group, members in zip(saved["groups"], info.groups, strict=True):
            first = sum(len(earlier["params"]) for earlier in groups)
            groups.append({**group, "params": list(range(first, first + len(members)))})
            for index, name in enumerate(members, first):
                values = {key: checkpoint.tensor(full) for key, full in tensors.get(name, {}).items()}
                values |= saved["plain"].get(name, {})
                if values:
                    state[index] = values
        found.append({"state": state, "param_groups": groups})
    return found


def _everything(checkpoint: Checkpoint) -> dict[str, Any]:
    if "dcp" in checkpoint.extras:
        return _as_saved(checkpoint)
    optimizers = optimizer_states(checkpoint)
    names = [[[one.removeprefix("model.") for one in group] for group in o.groups] for o in checkpoint.info.optimizers]
    return {
        "model": module_state(checkpoint, "model."),
        "optimizer": optimizers[0] if len(optimizers) == 1 else optimizers,
        PARAM_NAMES: names[0] if len(names) == 1 else names,  # beside it: an optimizer would keep what it does not know
        "schedulers": checkpoint.extras["schedulers"],
        "scaler": checkpoint.scaler_state(),
        "extra": extra_state(checkpoint),
        "step": checkpoint.step,
    }


def _as_saved(checkpoint: Checkpoint) -> dict[str, Any]:
    """What was saved through torch.distributed.checkpoint: the state_dict that it was given, whatever that is."""
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    state: dict[str, Any] = {name: checkpoint.tensor(name) for name in checkpoint.pieces}
    state |= checkpoint.extras["values"]
    paths = checkpoint.extras["dcp"]["paths"] or {}
    return unflatten_state_dict(state, {name: tuple(paths.get(name, (name,))) for name in state})


def _safetensors(checkpoint: Checkpoint, path: Path, only: str) -> None:
    from safetensors.torch import save_file

    if only == "model":
        tensors = module_state(checkpoint, "model.")
    else:
        tensors = {name: checkpoint.tensor(name) for name in checkpoint.pieces}
    save_file(tensors, path, metadata={"everstep.step": str(checkpoint.step), "format": "pt"})


def _torch(checkpoint: Checkpoint, path: Path, only: str) -> None:
    torch.save(module_state(checkpoint, "model.") if only == "model" else _everything(checkpoint), path)


def _dcp(checkpoint: Checkpoint, path: Path, only: str) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"model": module_state(checkpoint, "model.")} if only == "model" else _everything(checkpoint)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is what is meant
        dcp.save(state, checkpoint_id=path, no_dist=True)
