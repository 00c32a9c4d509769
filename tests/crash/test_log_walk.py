"""SIGKILL before every operation of a run that keeps a log: records, group commits, and bases that take turns.

Shared memory loses at most one step. A disk alone loses nothing that it was said to have.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lives import (
    STEPS,
    Countdown,
    cuts_made,
    forget_memory,
    fork_keeper,
    kill_keeper,
    live,
    must_finish,
    run_directory,
    train_log,
    undisturbed,
)

import everstep
from everstep import Disk
from everstep.keeper import client

STRIDE = 2
OFTEN = [Disk(every=3)]


def note_durable(run: everstep.Run, directory: Path) -> None:
    """Wait for the disk, and leave word of it outside the run's directory."""
    if run.step > 0 and run.wait("durable"):
        directory.with_name("durable").write_text(str(run.step))


def said_durable(directory: Path) -> int:
    note = directory.with_name("durable")
    return int(note.read_text() or 0) if note.exists() else 0


def log_life(directory: Path, **options: Any) -> dict[str, Any]:
    return train_log(directory, lambda run: note_durable(run, directory), tiers=OFTEN, **options)


def killing_life(directory: Path, operation: int) -> dict[str, Any]:
    Countdown(operation).install()
    return log_life(directory)


def walk(first: int, stride: int, *, reboot: bool) -> None:
    for operation in range(first, 1000, stride):
        with run_directory() as directory:
            outcome = live(lambda: killing_life(directory, operation))
            if not outcome.killed:
                assert outcome.result is not None and outcome.result["digest"] == undisturbed(), outcome.error
                assert operation > 120, "the walk is shorter than the protocol"
                return
            said, done = said_durable(directory), cuts_made(directory)
            least = said if reboot else max(said, done - 1)
            if reboot:
                forget_memory(directory)
            result = must_finish(lambda: log_life(directory))
            where = f"killed before operation {operation} after {done} cuts, {said} of them durable"
            assert (result["resumed_from"] or 0) >= least, f"{where}: resumed from {result['resumed_from']}"
            assert result["digest"] == undisturbed(), f"{where}: the result differs"
    pytest.fail("the walk did not end")


@pytest.mark.parametrize("reboot", [False, True], ids=["killed", "rebooted"])
def test_killed_before_some_operations_the_log_gives_the_same_bits(reboot: bool) -> None:
    walk(5, 11, reboot=reboot)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(STRIDE))
@pytest.mark.parametrize("reboot", [False, True], ids=["killed", "rebooted"])
def test_killed_before_every_operation_the_log_gives_the_same_bits(first: int, reboot: bool) -> None:
    walk(first, STRIDE, reboot=reboot)


# -- the recovery itself


def die_at(step: int) -> Any:
    return lambda run: run.step == step and os.kill(os.getpid(), 9)


def walk_recovery(operations: range, *, reboot: bool) -> None:
    """A life that ended in the middle of a chain, and one that ends while it recovers or soon after."""
    for operation in operations:
        with run_directory() as directory:
            assert live(lambda: train_log(directory, die_at(4), tiers=OFTEN, records_a_base=4)).killed
            done = cuts_made(directory)
            live(lambda: killing_life(directory, operation))
            if reboot:
                forget_memory(directory)
            said = said_durable(directory)
            result = must_finish(lambda: log_life(directory))
            where = f"killed again before operation {operation}"
            assert (result["resumed_from"] or 0) >= (said if reboot else done - 1), where
            assert result["digest"] == undisturbed(), where


@pytest.mark.parametrize("reboot", [False, True], ids=["killed", "rebooted"])
def test_killed_again_before_some_operations_of_a_recovery_by_the_log(reboot: bool) -> None:
    walk_recovery(range(1, 60, 9), reboot=reboot)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(2))
@pytest.mark.parametrize("reboot", [False, True], ids=["killed", "rebooted"])
def test_killed_again_before_every_operation_of_a_recovery_by_the_log(first: int, reboot: bool) -> None:
    walk_recovery(range(first, 100, 2), reboot=reboot)


# -- the keeper alone


def start_doomed(operation: int, marker: Path, run: str, directory: Path) -> None:
    """The first keeper dies before its n-th operation, later ones live."""

    def doom() -> None:
        if not marker.exists():
            marker.touch()
            Countdown(operation).install()

    fork_keeper(run, directory, doom)


def life_with_doomed_keeper(directory: Path, operation: int, deed: Any = None) -> dict[str, Any]:
    marker = directory.with_name("doomed")
    client.start = lambda run, where: start_doomed(operation, marker, run, where)  # type: ignore[assignment]

    def at_step(run: everstep.Run) -> None:
        note_durable(run, directory)
        if deed is not None:
            deed(run)

    return train_log(directory, at_step, tiers=OFTEN, keeper="process", linger="1s")


def walk_keeper(operations: range) -> None:
    for operation in operations:
        with run_directory() as directory:
            result = must_finish(lambda: life_with_doomed_keeper(directory, operation))
            where = f"the keeper died before operation {operation}"
            assert result["digest"] == undisturbed(), where
            assert (directory / f"step-{STEPS:010d}.json").exists(), f"{where}: the last step is not durable"


def test_training_outlives_a_keeper_killed_before_some_operations_of_the_log() -> None:
    walk_keeper(range(3, 110, 18))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(2))
def test_training_outlives_a_keeper_killed_before_every_operation_of_the_log(first: int) -> None:
    walk_keeper(range(first, 110, 2))


def walk_keeper_and_reboot(operations: range) -> None:
    """The keeper dies, another takes over, and then the machine goes: what was said to be durable is there."""
    for operation in operations:
        with run_directory() as directory:
            assert live(lambda: life_with_doomed_keeper(directory, operation, die_at(5))).killed
            said = said_durable(directory)
            assert said == 5
            kill_keeper(directory)
            forget_memory(directory)
            result = must_finish(lambda: log_life(directory))
            assert result["resumed_from"] >= said, f"the keeper died before operation {operation}"
            assert result["digest"] == undisturbed()


def test_a_keeper_that_follows_a_dead_one_forgets_nothing_durable() -> None:
    walk_keeper_and_reboot(range(40, 110, 23))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(2))
def test_a_keeper_that_follows_a_dead_one_forgets_nothing_durable_wherever_it_died(first: int) -> None:
    walk_keeper_and_reboot(range(first, 110, 2))
