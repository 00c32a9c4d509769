"""Out to other tools: one safetensors file, torch.save, or a DCP directory. Each is written beside its final name."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everstep.capture.layout import optimizer_name
from everstep.errors import BadConfig, TierFailed
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _beside(path) as temporary:
            writers[format](checkpoint, temporary, only)
    except OSError as error:
        refused = f"it cannot be written: {error.strerror}; make room, or name another place"
        raise TierFailed(error.errno, refused, str(path)) from None


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        yield temporary
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


# The system says first, in its words, that nothing can be made at a place. What a tool says later becomes an OSError.


def _safetensors(checkpoint: Checkpoint, path: Path, only: str) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if only == "model":
        tensors = module_state(checkpoint, "model.")
    else:
        tensors = {name: checkpoint.tensor(name) for name in checkpoint.pieces}
    path.touch()
    try:
        save_file(tensors, path, metadata={"everstep.step": str(checkpoint.step), "format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error)) from error


def _torch(checkpoint: Checkpoint, path: Path, only: str) -> None:
    state = module_state(checkpoint, "model.") if only == "model" else _everything(checkpoint)
    path.touch()
    try:
        torch.save(state, path)
    except RuntimeError as error:
        raise OSError(errno.EIO, str(error)) from error


def _dcp(checkpoint: Checkpoint, path: Path, only: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    state = {"model": module_state(checkpoint, "model.")} if only == "model" else _everything(checkpoint)
    path.mkdir()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is what is meant
        try:
            dcp.save(state, checkpoint_id=path, no_dist=True)
        except CheckpointException as error:
            (cause, _), *_ = error.failures.values()
            raise (cause if isinstance(cause, OSError) else OSError(errno.EIO, str(cause))) from error
