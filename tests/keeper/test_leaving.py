"""A run that is over and that nobody needs leaves its process as it was: no memory, no descriptor and no thread.

As long as somebody has it its memory stays mapped: whoever comes late, a reduction or another thread, looks into it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.capture.copier import Copier
from everstep.capture.snapshot import Capture
from everstep.errors import Misuse, RunHeld
from everstep.events import Closed, Degraded, read_events
from everstep.keeper.client import KeeperClient, keeper_pid
from everstep.keeper.keeper import Keeper

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import run_directory


def held() -> tuple[int, int, set[str]]:
    """Mappings of arenas, open descriptors, threads of ours."""
    maps = sum("everstep" in line for line in Path("/proc/self/maps").read_text().splitlines())
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("everstep")}
    return maps, len(os.listdir("/proc/self/fd")), threads


def until_threads_ended() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("everstep"):
            thread.join(3.0)
    gc.collect()


def guarded(directory: Path, strategy: str, keeper: str, steps: int = 4) -> everstep.Run:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    run = everstep.guard(model, optimizer, dir=directory, strategy=strategy, keeper=keeper, linger="1s")
    for _ in range(steps):
        update(run)
        run.done()
    return run


def update(run: everstep.Run) -> None:
    (model,), (optimizer,) = run._state.subjects.models, run._state.subjects.optimizers
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("ending", ["close", "give_up", "finish"])
@pytest.mark.parametrize("keeper", ["process", "inline"])
@pytest.mark.parametrize("strategy", ["snapshot", "log", "replica"])
def test_a_run_that_is_over_and_let_go_of_holds_nothing_of_its_process(strategy: str, keeper: str, ending: str) -> None:
    with run_directory() as directory:
        guarded(directory, strategy, keeper).close()  # whatever is loaded only once
    until_threads_ended()
    before = held()
    with run_directory() as directory:
        run = guarded(directory, strategy, keeper)
        assert held()[0] > before[0], "nothing was captured: the test would not see what stays"
        getattr(run, ending)()
        assert run.step == 4
        del run
        until_threads_ended()
        assert held() == before


def test_a_run_that_is_over_takes_nothing_says_so_and_does_not_wait_for_ever() -> None:
    """A cell of a notebook breaks between an update and its cut, and another one goes on with the same run."""
    with run_directory() as directory:
        run = guarded(directory, "snapshot", "process")
        run.wait("durable")
        update(run)
        run.give_up()
        memory = {path: path.stat().st_ino for path in Path(str(run.status()["arena"])).iterdir()}
        with pytest.raises(Misuse, match="this run is over"):
            run.done()
        assert run.wait("sealed")
        assert run.wait("durable")
        assert {path: path.stat().st_ino for path in memory} == memory
        run = guarded(directory, "snapshot", "process", steps=0)
        assert run.resumed_from == 4
        run.close()


def test_a_run_whose_life_was_ended_by_a_loss_is_closed_by_letting_go() -> None:
    """`try: for step in run.live() ... finally: run.close()`: its exit code is that of the loss, not of the closing."""
    with run_directory() as directory:
        run = guarded(directory, "log", "process")
        run.end_life()
        run.close()
        run = guarded(directory, "log", "process", steps=0)
        assert run.resumed_from == 4
        run.close()


@pytest.mark.parametrize("strategy", ["snapshot", "log"])
@pytest.mark.parametrize("where", ["Capture", "Copier", "KeeperClient"])
def test_an_end_that_is_interrupted_still_lets_go_of_all_else(
    strategy: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C once, while somebody is waited for: the next guard() is not told that this process holds the run."""
    kind = {"Capture": Capture, "Copier": Copier, "KeeperClient": KeeperClient}[where]
    close, asked = kind.close, list[object]()

    def interrupted(self: Any, **how: Any) -> None:
        asked.append(self)
        if len(asked) == 1:
            raise KeyboardInterrupt
        close(self, **how)

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with run_directory() as directory:
        run = guarded(directory, strategy, "process")
        hooks = run._state.subjects.optimizers[0]._optimizer_step_pre_hooks
        assert hooks
        monkeypatch.setattr(kind, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.close()
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
        if where != "Capture":  # whose own they are
            assert not hooks
        if where != "KeeperClient":
            assert run._keeper._closing
        assert not run._timeline._thread.is_alive()
        again = guarded(directory, strategy, "process", steps=0)
        assert again.resumed_from == 4
        again.close()


def test_a_copier_ends_after_its_job_even_if_whoever_waits_for_that_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By an event: a thread whose join() was interrupted says that it has ended."""
    copier, go, ended, done = Copier(), threading.Event(), threading.Event(), list[int]()
    work = copier._work

    def until_the_end() -> None:
        work()
        ended.set()

    monkeypatch.setattr(copier, "_work", until_the_end)
    copier.submit(lambda: done.append(go.wait(60)))
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(KeyboardInterrupt):
            copier.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    go.set()
    assert ended.wait(60) and done == [True]


def test_a_run_is_held_until_a_keeper_in_its_process_has_ended_even_if_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the next run's keeper and this one would write into one directory."""
    serve, writes = Keeper.serve, threading.Event()

    def slow(self: Keeper, *how: Any) -> None:
        serve(self, *how)
        assert writes.wait(60)

    monkeypatch.setattr(Keeper, "serve", slow)
    with run_directory() as directory:
        run = guarded(directory, "snapshot", "inline")
        before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
        try:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(KeyboardInterrupt):
                run.close()
        finally:
            signal.signal(signal.SIGUSR1, before)
        with pytest.raises(RunHeld):
            guarded(directory, "snapshot", "inline", steps=0)
        writes.set()
        again, deadline = None, time.monotonic() + 60
        while again is None:
            try:
                again = guarded(directory, "snapshot", "inline", steps=0)
            except RunHeld:
                assert time.monotonic() < deadline, "the keeper has ended, and the run is held all the same"
                time.sleep(0.01)
        assert again.resumed_from == 4
        again.close()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_whichever_of_several_runs_ends_first_signals_are_in_the_end_what_they_were(order: tuple[int, ...]) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    until_threads_ended()
    woken, before = signal.set_wakeup_fd(-1), held()
    with ExitStack() as folders:
        runs = [guarded(folders.enter_context(run_directory()), "snapshot", "inline") for _ in order]
        for at in order:
            runs[at].close()
        del runs
        until_threads_ended()
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
        assert signal.set_wakeup_fd(woken) == -1
        assert held() == before


def test_a_run_may_follow_one_whose_handlers_somebody_has_put_back() -> None:
    """As a library does that has its own in between: it saw them when the run had begun, and is done after its end."""
    before = signal.getsignal(signal.SIGTERM)
    with run_directory() as first, run_directory() as second:
        run = guarded(first, "snapshot", "inline")
        between = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        run.close()
        signal.signal(signal.SIGTERM, between)
        guarded(second, "snapshot", "inline").close()
        assert signal.getsignal(signal.SIGTERM) == before


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_while_the_run_ends_is_heard_by_the_program_afterwards(number: signal.Signals) -> None:
    with run_directory() as directory:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            run = guarded(directory, "snapshot", "inline")
            bring_down = run._keeping.bring_down

            def interrupted(*words: Any) -> None:
                os.kill(os.getpid(), number)
                bring_down(*words)

            run._keeping.bring_down = interrupted  # type: ignore[method-assign]
            run.close()
            os._exit(1)  # it went on as if nobody had asked
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
        assert everstep.open(directory).plan(lost={"memory"}).step == 4
        assert any(isinstance(event, Closed) for event in read_events(directory))


def test_whoever_waits_in_another_thread_is_told_when_the_run_is_over() -> None:
    with run_directory() as directory:
        run = guarded(directory, "snapshot", "process")
        run.wait("durable")
        run._keeper.durable_step = -1  # as if a disk took for ever
        answers: list[bool] = []
        waiting = threading.Thread(target=lambda: answers.append(run._keeper.wait_durable(99, None)))
        waiting.start()
        run.give_up()
        waiting.join(5.0)
        assert answers == [False]


@pytest.mark.parametrize("strategy", ["snapshot", "log"])
def test_a_keeper_that_is_born_while_its_trainer_leaves_is_told_goodbye(strategy: str) -> None:
    with run_directory() as directory:
        run = guarded(directory, strategy, "process")
        run.wait("sealed")
        name = str(run.status()["run"])
        keeper = keeper_pid(name)
        assert keeper is not None
        os.kill(keeper, signal.SIGKILL)
        time.sleep(0.1)
        run.give_up()  # and this process lives on
        time.sleep(2.0)  # until it is born
        deadline = time.monotonic() + 20.0
        while keeper_pid(name) is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert keeper_pid(name) is None, "it takes the trainer for alive"
        assert everstep.open(directory).latest() == 4


def test_a_forked_child_that_ends_as_python_does_leaves_the_keeper_to_its_parent() -> None:
    with run_directory() as directory:
        run = guarded(directory, "snapshot", "process")
        child = os.fork()
        if not child:
            run._at_exit()
            os._exit(0)
        os.waitpid(child, 0)
        update(run)
        run.done()
        assert run.wait("durable", timeout=20.0)
        assert not [event for event in read_events(directory) if isinstance(event, Degraded)]
        run.close()
