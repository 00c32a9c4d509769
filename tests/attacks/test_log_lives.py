"""A run with a log comes back as something else: without one, with one, finished, collected, changed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lives import STEPS, forget_memory, live, must_finish, run_directory, run_of, train_log, train_tiny, undisturbed
from typer.testing import CliRunner

import everstep
from everstep import Disk, Memory
from everstep.capture.arena import Arena, find_arenas
from everstep.capture.host import arena_root
from everstep.cli import app
from everstep.keeper.base_writer import BaseWriter
from everstep.keeper.logbook import Logbook

SELDOM = [Disk(every=100)]


def die_at(step: int, before: Callable[[everstep.Run], Any] = lambda run: None) -> Callable[[everstep.Run], None]:
    def when(run: everstep.Run) -> None:
        if run.step == step:
            before(run)
            os.kill(os.getpid(), 9)

    return when


def steps_in_memory(directory: Path, kind: str) -> set[int]:
    arenas = list(find_arenas(arena_root(None), run_of(directory)))
    return {seal.step for arena in arenas if arena.kind == kind for seal in arena.seals().values()}


def in_memory(directory: Path) -> list[str]:
    return [path.name for path in (arena_root(None) / run_of(directory)).glob("rank-*")]


# -- memory of a dead run


@pytest.mark.parametrize("durable", [False, True], ids=["nothing on disk", "a base on disk"])
def test_gc_saves_the_records_of_a_dead_run_and_takes_none_of_them_for_a_state(durable: bool, tmp_path: Path) -> None:
    """Base 1 and records 2 to 4 are in memory, and perhaps the base on disk."""

    def hold_the_keeper_back() -> None:
        Logbook.take = lambda *_, **__: 0  # type: ignore[method-assign]
        BaseWriter._due = lambda _: None  # type: ignore[method-assign]

    def at_step(run: everstep.Run) -> None:
        if run.step == 1 and durable:
            run.wait("durable")
            hold_the_keeper_back()
        die_at(4, lambda run: run.wait("sealed"))(run)

    def life() -> dict[str, Any]:
        if not durable:
            hold_the_keeper_back()
        return train_log(directory, at_step, records_a_base=8, tiers=[*SELDOM, Memory(path=str(tmp_path))])

    with run_directory() as directory:
        assert live(life).killed
        said = CliRunner().invoke(app, ["gc", "--dry-run", "--memory", str(tmp_path)], env={"COLUMNS": "400"}).output
        assert "holding step 4" in said
        said = CliRunner().invoke(app, ["gc", "--memory", str(tmp_path)], env={"COLUMNS": "400"}).output
        assert "step 4 is on disk; removed" in said
        assert not list(tmp_path.rglob("rank-*"))
        assert [path.name for path in directory.glob("step-*.json")] == ["step-0000000001.json"]
        plan = everstep.open(directory).plan()
        assert (plan.base, plan.step) == (1, 4)
        result = must_finish(lambda: train_log(directory, tiers=SELDOM))
        assert (result["resumed_from"], result["digest"]) == (4, undisturbed())


@pytest.mark.parametrize("operation", ["arena header", "arena gone"])
def test_a_ring_whose_owner_died_while_making_or_removing_it_does_not_stay_in_memory(operation: str) -> None:
    """A ring has a name of its own, so nobody makes it again: whoever follows must find it."""

    def dying() -> dict[str, Any]:
        def before(seen: str) -> None:
            rings = list((arena_root(None) / run_of(directory)).glob("rank-*-log-*"))
            if seen == operation and rings:
                os.kill(os.getpid(), 9)

        Arena.before = staticmethod(before)  # type: ignore[assignment]
        return train_log(directory, tiers=SELDOM)

    with run_directory() as directory:
        assert live(lambda: train_log(directory, die_at(2), tiers=SELDOM)).killed
        shape = next(a for a in find_arenas(arena_root(None), run_of(directory)) if a.kind == "log")
        os.truncate(Path(shape.place) / "control", 100)  # so that it is not taken over, but made again
        assert live(dying).killed
        wrecks = in_memory(directory)
        assert any("-log-" in name for name in wrecks)
        assert must_finish(lambda: train_log(directory, tiers=SELDOM))["digest"] == undisturbed()
        assert in_memory(directory) == []


# -- another strategy


@pytest.mark.parametrize("reboot", [False, True], ids=["killed", "rebooted"])
def test_a_run_with_a_log_goes_on_without_one_and_with_one_again(reboot: bool) -> None:
    def die_durable(step: int) -> Callable[[everstep.Run], None]:
        return die_at(step, lambda run: run.wait("durable"))

    with run_directory() as directory:
        for strategy, step in (("log", 3), ("snapshot", 6), ("log", 9), ("snapshot", 11)):
            train = train_log if strategy == "log" else train_tiny
            outcome = live(lambda: train(directory, die_durable(step), steps=12, tiers=SELDOM))
            assert outcome.killed, outcome.error
            if reboot:
                forget_memory(directory)
            assert everstep.open(directory).plan().step == step, f"after {strategy} up to {step}"
        result = must_finish(lambda: train_log(directory, steps=12, tiers=SELDOM))
        assert (result["resumed_from"], result["digest"]) == (11, undisturbed(12))
        assert in_memory(directory) == []


def test_records_that_a_life_without_a_log_passed_over_are_never_followed() -> None:
    """A record is lost, from the ring and from the disk if it had come so far, so that a life goes on from the step
    before it, by bases. Its bases must not be followed by the records that the former life left."""
    with run_directory() as directory:
        assert live(lambda: train_log(directory, die_at(4), records_a_base=8, tiers=SELDOM)).killed
        ring = next(a for a in find_arenas(arena_root(None), run_of(directory)) if a.kind == "log")
        slot = ring.slot_of(3)
        assert slot is not None and steps_in_memory(directory, "log") >= {3, 4}
        ring.unseal(slot)
        ring.close()
        for log in directory.glob("log-*"):
            shutil.rmtree(log)
        assert live(lambda: train_tiny(directory, die_at(3, lambda run: run.wait("sealed")), tiers=SELDOM)).killed
        assert everstep.open(directory).plan().step == 3, "a record of a life that was given up was followed"
        result = must_finish(lambda: train_log(directory, tiers=SELDOM))
        assert (result["resumed_from"], result["digest"]) == (3, undisturbed())
        assert in_memory(directory) == []


@pytest.mark.parametrize("strategy", ["log", "snapshot"])
def test_a_finished_run_with_a_log_yields_nothing_more(strategy: str) -> None:
    with run_directory() as directory:
        assert must_finish(lambda: train_log(directory, tiers=SELDOM))["digest"] == undisturbed()
        assert in_memory(directory) == []
        again = must_finish(lambda: train_tiny(directory, strategy=strategy, tiers=SELDOM))
        assert (again["resumed_from"], again["step"], again["digest"]) == (STEPS, STEPS, undisturbed())
        assert in_memory(directory) == []


def test_a_finished_run_with_a_log_may_go_further() -> None:
    with run_directory() as directory:
        must_finish(lambda: train_log(directory, tiers=SELDOM))
        result = must_finish(lambda: train_log(directory, steps=12, tiers=SELDOM))
        assert (result["resumed_from"], result["digest"]) == (STEPS, undisturbed(12))


# -- a new life under a keeper that has just written a base


def test_the_first_steps_after_a_restart_are_durable_long_before_another_base_is_due() -> None:
    """The first step of a life has no record: what follows leads on from its base, which must be on the disk."""

    def until_durable(run: everstep.Run) -> None:
        if run.step == 5:
            deadline = time.monotonic() + 30
            while (run.status()["durable_step"] or 0) < 5 and time.monotonic() < deadline:  # type: ignore[operator]
                time.sleep(0.01)
            os.kill(os.getpid(), 9)

    def life(at_step: Callable[[everstep.Run], None]) -> dict[str, Any]:
        return train_log(directory, at_step, records_a_base=100, tiers=SELDOM)

    with run_directory() as directory:
        assert live(lambda: life(die_at(2, lambda run: run.wait("durable")))).killed
        assert live(lambda: life(until_durable)).killed
        forget_memory(directory)
        result = must_finish(lambda: life(lambda run: None))
        assert (result["resumed_from"], result["digest"]) == (5, undisturbed())
