"""SIGKILL before every single operation on a medium: at most one step is lost, and not one bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lives import (
    STEPS,
    Countdown,
    cuts_made,
    forget_memory,
    fork_keeper,
    live,
    must_finish,
    run_directory,
    train_tiny,
    undisturbed,
)

from everstep import Disk
from everstep.keeper import client
from everstep.store.disk import DiskTier

STRIDE = 4  # the walk is split into this many tests, for the workers
OFTEN = [Disk(every=1)]


def killing_life(directory: Path, operation: int) -> dict[str, object]:
    """Waits for the disk now and then, so that the walk passes through the whole protocol more than once."""
    Countdown(operation).install()
    return train_tiny(directory, tiers=OFTEN, at_step=lambda run: run.step % 2 == 1 and run.wait("durable") and None)


@pytest.mark.parametrize("first", range(STRIDE))
def test_trainer_and_keeper_killed_before_every_operation(first: int) -> None:
    for operation in range(first, 1000, STRIDE):
        with run_directory() as directory:
            outcome = live(lambda: killing_life(directory, operation))
            if not outcome.killed:
                assert outcome.result is not None and outcome.result["digest"] == undisturbed(), outcome.error
                assert operation > 60, "the walk is shorter than the protocol"
                return
            done = cuts_made(directory)
            result = must_finish(lambda: train_tiny(directory, tiers=OFTEN))
            resumed = result["resumed_from"] or 0
            assert resumed >= done - 1, f"killed before operation {operation}: {done} cuts, resumed from {resumed}"
            assert result["digest"] == undisturbed(), f"killed before operation {operation}: the result differs"
    pytest.fail("the walk did not end")


@pytest.mark.parametrize("first", range(STRIDE))
def test_after_a_reboot_in_the_middle_of_any_operation_the_disk_alone_is_enough(first: int) -> None:
    for operation in range(first, 1000, 3 * STRIDE):
        with run_directory() as directory:
            outcome = live(lambda: killing_life(directory, operation))
            if not outcome.killed:
                return
            forget_memory(directory)
            assert must_finish(lambda: train_tiny(directory, tiers=OFTEN))["digest"] == undisturbed()
    pytest.fail("the walk did not end")


@pytest.mark.parametrize("first", range(2))
def test_killed_again_before_every_operation_of_the_recovery(first: int) -> None:
    for operation in range(first, 40, 2):
        with run_directory() as directory:
            live(
                lambda: train_tiny(
                    directory, tiers=OFTEN, at_step=lambda run: run.step == 3 and os.kill(os.getpid(), 9)
                )
            )
            done = cuts_made(directory)
            live(lambda: killing_life(directory, operation))
            result = must_finish(lambda: train_tiny(directory, tiers=OFTEN))
            assert (result["resumed_from"] or 0) >= done - 1
            assert result["digest"] == undisturbed()


def start_doomed(operation: int, marker: Path, run: str, directory: Path) -> None:
    """The first keeper dies before its n-th operation, later ones live."""

    def doom() -> None:
        if not marker.exists():
            marker.touch()
            DiskTier.before = staticmethod(Countdown(operation))  # type: ignore[assignment]

    fork_keeper(run, directory, doom)


def life_with_doomed_keeper(directory: Path, operation: int) -> dict[str, object]:
    marker = directory.with_name("doomed")
    client.start = lambda run, where: start_doomed(operation, marker, run, where)  # type: ignore[assignment]
    return train_tiny(directory, tiers=OFTEN, keeper="process", at_step=lambda run: run.wait("sealed") and None)


@pytest.mark.parametrize("first", range(2))
def test_training_outlives_a_keeper_killed_before_every_operation(first: int) -> None:
    for operation in range(first, 60, 6):
        with run_directory() as directory:
            result = must_finish(lambda: life_with_doomed_keeper(directory, operation))
            assert result["step"] == STEPS
            assert result["digest"] == undisturbed(), f"the keeper died before operation {operation}"
            assert (directory / f"step-{STEPS:010d}.json").exists(), "the last step did not become durable"
