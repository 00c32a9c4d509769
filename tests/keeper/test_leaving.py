"""A run that is over leaves its process as it was: no memory, no descriptor and no thread stays for it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
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


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_whichever_of_several_runs_ends_first_signals_are_in_the_end_what_they_were(order: tuple[int, ...]) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    woken, before = signal.set_wakeup_fd(-1), held()
    with ExitStack() as folders:
        runs = [guarded(folders.enter_context(run_directory()), "snapshot", "inline") for _ in order]
        for at in order:
            runs[at].close()
        for thread in threading.enumerate():
            if thread.name == "everstep-signals":
                thread.join(3.0)
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
        assert signal.set_wakeup_fd(woken) == -1
        assert held() == before


@pytest.mark.parametrize("ending", ["in another thread", "and its handler comes back"])
def test_a_process_whose_run_is_over_ends_when_it_is_told_to(ending: str) -> None:
    with run_directory() as directory:
        child = os.fork()
        if not child:
            run = guarded(directory, "snapshot", "inline")
            ours = signal.getsignal(signal.SIGTERM)
            if ending == "in another thread":
                closing = threading.Thread(target=run.close)
                closing.start()
                closing.join()
            else:
                run.close()
                signal.signal(signal.SIGTERM, ours)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20.0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
