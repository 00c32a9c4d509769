"""Back to an earlier step because somebody wants it: a loss that has gone wild, a batch that was bad."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lives import STEPS, live, must_finish, run_directory, train_log, train_tiny, undisturbed

import everstep
from everstep.capture.arena import find_arenas
from everstep.capture.host import arena_root
from everstep.cli import rewind
from everstep.errors import BadConfig, Damaged, Misuse, NothingToRestore
from everstep.store import rewinds

OFTEN: dict[str, Any] = {"tiers": [everstep.Disk(every=1)], "keep": 99}
MEMORY: dict[str, Any] = {"tiers": [everstep.Memory(), everstep.Disk(every=2)], "keep": 99}


def durable(run: everstep.Run) -> None:
    if run.step:
        run.wait("durable")


def killed_at(step: int, then: Callable[[everstep.Run], None] = durable) -> Callable[[everstep.Run], None]:
    def act(run: everstep.Run) -> None:
        then(run)
        if run.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


@pytest.mark.parametrize("train", [train_tiny, train_log])
def test_the_next_life_goes_on_from_there_and_what_was_newer_never_comes_back(
    train: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with run_directory() as directory:
        must_finish(lambda: train(directory, durable, **OFTEN))
        rewind.command(str(directory), 2)
        assert capsys.readouterr().out == "the next life goes on from step 2; steps 3 to 6 will be set aside\n"
        assert everstep.open(directory).plan().step == 2
        assert everstep.open(directory).load(STEPS)["step"] == STEPS  # whoever asks for it has it until then
        assert live(lambda: train(directory, killed_at(3), **OFTEN)).killed
        assert not (directory / rewinds.RECORD).exists()
        assert everstep.open(directory).latest() == 3
        result = must_finish(lambda: train(directory, **OFTEN))
        assert result["resumed_from"] == 3 and result["digest"] == undisturbed()


def test_memory_that_nobody_cares_for_has_newer_steps_and_they_do_not_come_back() -> None:
    with run_directory() as directory:
        assert live(lambda: train_tiny(directory, killed_at(5), **MEMORY)).killed  # the keeper dies with it
        assert everstep.open(directory).plan().step == 5
        assert everstep.open(directory).rewind(2)[-1] == 5
        assert live(lambda: train_tiny(directory, killed_at(3, lambda run: None), **MEMORY)).killed
        run = everstep.open(directory).run
        sealed = {seal.step for arena in find_arenas(arena_root(None), run) for seal in arena.seals().values()}
        assert max(sealed) == 3
        result = must_finish(lambda: train_tiny(directory, **MEMORY))
        assert result["resumed_from"] == 3 and result["digest"] == undisturbed()


def test_killed_while_it_goes_back_it_goes_back_again() -> None:
    def life() -> dict[str, Any]:
        rewinds.forget = lambda tier, emit: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        return train_tiny(directory, **OFTEN)

    with run_directory() as directory:
        must_finish(lambda: train_tiny(directory, durable, **OFTEN))
        everstep.open(directory).rewind(2)
        assert live(life).killed
        result = must_finish(lambda: train_tiny(directory, **OFTEN))
        assert result["resumed_from"] == 2 and result["digest"] == undisturbed()


def test_it_can_be_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    with run_directory() as directory:
        must_finish(lambda: train_tiny(directory, durable, **OFTEN))
        rewind.command(str(directory), 2, json=True)
        assert '"newer"' in capsys.readouterr().out
        rewind.command(str(directory), undo=True)
        assert everstep.open(directory).plan().step == STEPS


def test_only_a_step_that_is_there_and_only_while_nobody_trains(tmp_path: Path) -> None:
    with run_directory() as directory:

        def ask(run: everstep.Run) -> None:
            if run.step == 3:
                with pytest.raises(Misuse, match=r"in use\. End the run"):
                    everstep.open(directory).rewind(2)
            durable(run)

        must_finish(lambda: train_tiny(directory, ask, **OFTEN))
        with pytest.raises(NothingToRestore, match=r"step 77 cannot be restored; these can: .*6"):
            everstep.open(directory).rewind(77)
        for step, undo in ((None, False), (2, True)):
            with pytest.raises(BadConfig, match="give a step to go back to, or --undo"):
                rewind.command(str(directory), step, undo)
        assert everstep.open(directory).plan().step == STEPS


def test_a_wish_that_cannot_be_read_is_not_passed_over() -> None:
    """Else the run would go on from where somebody did not want it to."""
    with run_directory() as directory:
        must_finish(lambda: train_tiny(directory, durable, **OFTEN))
        everstep.open(directory).rewind(2)
        record = directory / rewinds.RECORD
        record.write_bytes(record.read_bytes().replace(b'"step":2', b'"step":4'))
        outcome = live(lambda: train_tiny(directory, **OFTEN))
        assert Damaged.__name__ in outcome.error and rewinds.RECORD in outcome.error
        rewind.command(str(directory), undo=True)
        assert must_finish(lambda: train_tiny(directory, **OFTEN))["resumed_from"] == STEPS


@pytest.mark.parametrize("train", [train_tiny, train_log])
def test_what_a_deeper_tier_has_of_newer_steps_does_not_come_back_either(
    train: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Though the life that goes back dies before it has brought anything there."""
    options = {"tiers": [everstep.Disk(every=1), everstep.Shared(str(tmp_path / "far"), every=2)], "keep": 99}

    def sunk(run: everstep.Run) -> None:
        durable(run)
        if run.step in (2, 4):
            run.wait("shared")

    with run_directory() as directory:
        must_finish(lambda: train(directory, sunk, **options))
        everstep.open(directory).rewind(2)
        assert live(lambda: train(directory, killed_at(2, lambda run: None), **options)).killed
        assert not (directory / rewinds.RECORD).exists()
        assert everstep.open(directory).plan().step == 2
        result = must_finish(lambda: train(directory, **options))
        assert result["resumed_from"] == 2 and result["digest"] == undisturbed()
