"""A keeper that lives and does not answer: nobody waits for it without end, or without a word."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lives import STEPS, live, must_finish, run_directory, run_of, train_tiny, undisturbed

import everstep
from everstep import events
from everstep.errors import KeeperSilent
from everstep.keeper import client, protocol
from everstep.keeper.client import keeper_pid

PROCESS: dict[str, Any] = {"keeper": "process", "linger": "30s", "tiers": [everstep.Disk(every=2)]}


def die_at(step: int) -> Any:
    def act(run: everstep.Run) -> None:
        if run.step == step:
            run.wait("durable")
            os.kill(os.getpid(), signal.SIGKILL)

    return act


@contextmanager
def stopped_keeper(directory: Path) -> Iterator[int]:
    pid = keeper_pid(run_of(directory))
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


def test_whoever_asks_a_keeper_that_is_stopped_is_told_which_one_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_PATIENCE_S", 0.5)
    with run_directory() as directory:
        assert live(lambda: train_tiny(directory, die_at(3), **PROCESS)).killed
        with stopped_keeper(directory) as pid:
            for ask in (everstep.open(directory).steps, everstep.open(directory).status, everstep.open(directory).plan):
                with pytest.raises(KeeperSilent, match=f"process {pid}, has not answered in 0.5 s"):
                    ask()
            assert f"kill -CONT {pid}" in live(lambda: train_tiny(directory, **PROCESS)).error
        result = must_finish(lambda: train_tiny(directory, **PROCESS))
        assert result["resumed_from"] == 3 and result["digest"] == undisturbed()


def test_a_run_that_waits_for_its_keeper_at_the_end_says_so() -> None:
    def life() -> dict[str, Any]:
        client._LONG_S = 0.5
        said: list[str] = []
        keeper: list[int] = []

        def heard(line: str) -> None:
            said.append(line)
            os.kill(keeper[0], signal.SIGCONT)

        events.say = heard

        def stop(run: everstep.Run) -> None:
            if run.step == STEPS - 1:
                run.wait("sealed")
                keeper.append(keeper_pid(run_of(directory)) or 0)
                os.kill(keeper[0], signal.SIGSTOP)

        return {**train_tiny(directory, stop, **PROCESS), "said": said}

    with run_directory() as directory:
        result = must_finish(life)
        assert result["digest"] == undisturbed()
        assert any("waiting for the keeper" in line for line in result["said"])
