"""A run that is over leaves its process as it was: no memory, no descriptor and no thread stays for it."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import everstep

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import run_directory


def held() -> tuple[int, int, set[str]]:
    """Mappings of arenas, open descriptors, threads of ours."""
    maps = sum("everstep" in line for line in Path("/proc/self/maps").read_text().splitlines())
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("everstep")}
    return maps, len(os.listdir("/proc/self/fd")), threads


def guarded(directory: Path, strategy: str, keeper: str) -> everstep.Run:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    run = everstep.guard(model, optimizer, dir=directory, strategy=strategy, keeper=keeper, linger="1s")
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.done()
    return run


@pytest.mark.parametrize("ending", ["close", "give_up", "finish"])
@pytest.mark.parametrize("keeper", ["process", "inline"])
@pytest.mark.parametrize("strategy", ["snapshot", "log", "replica"])
def test_a_run_that_is_over_holds_nothing_of_its_process(strategy: str, keeper: str, ending: str) -> None:
    with run_directory() as directory:
        guarded(directory, strategy, keeper).close()  # whatever is loaded only once
    gc.collect()
    before = held()
    with run_directory() as directory:
        run = guarded(directory, strategy, keeper)
        assert held()[0] > before[0], "nothing was captured: the test would not see what stays"
        getattr(run, ending)()
        for thread in threading.enumerate():
            if thread.name.startswith("everstep"):
                thread.join(3.0)
        assert held() == before
        assert run.step == 4


def test_asking_a_run_that_is_over_neither_takes_anything_nor_waits_for_ever() -> None:
    with run_directory() as directory:
        run = guarded(directory, "snapshot", "process")
        run.wait("durable")
        run.give_up()
        run.step += 1  # a loop that broke between an update and its cut
        assert run.wait("sealed")
        assert run.wait("durable")
        assert run.status()["arena"] is None
