"""What tests of DCP have in common: states, how they are saved and loaded, and ranks that do it."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lives import end_keeper, forget_memory, run_of
from torch import nn

from everstep.integrations.dcp import Reader, Writer
from everstep.keeper.client import keeper_pid


def state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    odd = {
        "half": torch.randn(3, 2).to(torch.bfloat16),
        "scalar": torch.tensor(seed),
        "empty": torch.empty(0, 5),
        "last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "strided": torch.randn(6, 4)[::2, 1:],
        "flags": torch.tensor([True, False]),
    }
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "odd": odd, "step": seed,
        "words": ["a", {"b": (1, 2.5, None)}, b"bytes"],
    }  # fmt: skip


def blank(like: Any) -> Any:
    """The same with nothing in it."""
    if isinstance(like, torch.Tensor):
        return torch.zeros_like(like)
    if isinstance(like, dict):
        return {key: blank(value) for key, value in like.items()}
    return [blank(one) for one in like] if isinstance(like, list) else None


def loaded(directory: Path, like: dict[str, Any], **how: Any) -> dict[str, Any]:
    found: dict[str, Any] = blank(like)
    dcp.load(found, storage_reader=Reader(directory), no_dist=True, **how)
    return found


def save(directory: Path, what: dict[str, Any], **how: Any) -> None:
    """On the disk, and not in memory any more."""
    with Writer(directory) as writer:
        dcp.save(what, storage_writer=writer, no_dist=True, **how)
    while keeper_pid(run_of(directory)) is not None:
        time.sleep(0.005)


def give_memory_back(place: Path) -> None:
    """Of all runs there, with the keepers that linger."""
    for record in place.rglob("run.json"):
        end_keeper(record.parent)
        forget_memory(record.parent)


def ranks(app: Callable[[int], object], place: Path, count: int = 2, timeout_s: float = 90.0) -> list[str]:
    """One start of a job over gloo: what each rank said, or why it could not; "killed" if it was."""
    place.mkdir()
    children = {}
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            said = ""
            try:
                dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=count)
                said = str(app(rank))
            except BaseException:
                said = traceback.format_exc()
            (place / f"said-{rank}").write_text(said)
            os._exit(0)
        children[pid] = rank
    deadline = time.monotonic() + timeout_s
    while children and time.monotonic() < deadline:
        for pid in list(children):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del children[pid]
        time.sleep(0.01)
    for pid in children:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert not children, "ranks did not end"
    files = [place / f"said-{rank}" for rank in range(count)]
    return [file.read_text() if file.exists() else "killed" for file in files]
