"""A disk that is too slow for the records, and then something else happens: another keeper, another life, damage."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lives import (
    end_keeper,
    forget_memory,
    fork_keeper,
    kill_keeper,
    live,
    must_finish,
    run_directory,
    run_of,
    told,
    train_log,
    undisturbed,
)

import everstep
from everstep import Disk
from everstep.capture import room
from everstep.capture.arena import Arena, find_arenas
from everstep.capture.host import arena_root
from everstep.events import Rejected
from everstep.keeper import client
from everstep.keeper.base_writer import BaseWriter
from everstep.keeper.client import keeper_pid
from everstep.keeper.logbook import Logbook
from everstep.keeper.pace import Pace
from everstep.keeper.session import checksums
from everstep.recover.survey import Sources

STEPS = 70
SELDOM = [Disk(every=10_000)]
AtStep = Callable[[everstep.Run], Any]


def die(_: object = None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def life(directory: Path, at_step: AtStep, *, keeper: str = "process") -> dict[str, Any]:
    """A keeper that outlives the trainer; its disk is too slow, or writes nothing, while a file says so."""
    slow, held = directory.parent / "slow", directory.parent / "held"

    def change() -> None:
        Pace.is_outpaced = lambda *_: slow.exists()  # type: ignore[assignment]
        take, due = Logbook.take, BaseWriter._due
        BaseWriter._due = lambda writer: None if held.exists() else due(writer)  # type: ignore[method-assign]
        Logbook.take = lambda *ring, **how: 0 if held.exists() else take(*ring, **how)  # type: ignore[method-assign]

    room.LARGE_BYTES = 0  # type: ignore[attr-defined]
    change()
    client.start = lambda run, where: fork_keeper(run, where, change)  # type: ignore[assignment]

    def pausing(run: everstep.Run) -> None:
        time.sleep(0.03)  # so that the keeper gets to see every base
        at_step(run)

    return train_log(directory, pausing, steps=STEPS, records_a_base=1000, tiers=SELDOM, keeper=keeper)


def arenas_of(directory: Path, kind: str) -> list[Arena]:
    return [arena for arena in find_arenas(arena_root(None), run_of(directory)) if arena.kind == kind]


def lose_bases(run: everstep.Run) -> None:
    arena = run._capture.arena()
    for slot in arena.seals():
        arena.unseal(slot)


def test_a_life_that_begins_before_what_was_let_go_has_its_records_written() -> None:
    def unlucky(run: everstep.Run) -> None:
        if run.step == 40:
            lose_bases(run)
            die(run)

    def waiting(run: everstep.Run) -> None:
        if run.step in (10, 20):
            assert run.wait("durable", timeout=8), "nobody writes its records"

    with slow_directory() as directory:
        assert live(lambda: life(directory, unlucky)).killed
        (directory.parent / "slow").unlink()
        assert keeper_pid(run_of(directory)) is not None
        result = must_finish(lambda: life(directory, waiting))
        assert result["digest"] == undisturbed(STEPS)


def stop_at(step: int, what: AtStep) -> AtStep:
    """At this step, or a later one whose newest base is some steps older."""

    def at_step(run: everstep.Run) -> None:
        if run.step >= step and run._capture.base_step < run.step - 1:
            run.wait("sealed")
            what(run)

    return at_step


@contextmanager
def slow_directory() -> Iterator[Path]:
    with run_directory() as directory:
        (directory.parent / "slow").touch()
        yield directory


def test_records_that_a_life_does_not_follow_are_not_written_while_it_begins() -> None:
    """The keeper of both lives still has the ring, as it was left, until the second one has looked through it."""

    def unlucky(run: everstep.Run) -> None:
        if run.step == 40:
            (directory.parent / "held").touch()
            lose_bases(run)
            die(run)

    def second_life() -> dict[str, Any]:
        left_to = Sources.left_to

        def looking(*given: Any, **how: Any) -> Any:
            (directory.parent / "held").unlink()
            time.sleep(0.3)
            return left_to(*given, **how)

        Sources.left_to = looking  # type: ignore[method-assign]
        return life(directory, stop_at(10, lambda run: run.wait("durable", timeout=5) and die(run)))

    with slow_directory() as directory:
        assert live(lambda: life(directory, unlucky)).killed
        (directory.parent / "slow").unlink()
        outcome = live(second_life)
        assert outcome.killed, outcome.error
        end_keeper(directory)
        forget_memory(directory)
        assert {entry.step for entry in everstep.open(directory).log()[0]} <= set(range(12))


def test_a_damaged_base_that_a_life_does_not_follow_lets_no_records_go_while_it_begins() -> None:
    """It was sealed in the last moment, so that no records were let go for it."""

    def damaging(run: everstep.Run) -> None:
        if run.step == 40:
            (directory.parent / "held").touch()
            (directory.parent / "slow").unlink()
        if run.step > 40 and run._capture.base_step > max(ring.taken() for ring in arenas_of(directory, "log")):
            run.wait("sealed")
            arena = run._capture.arena()
            for slot in arena.seals():
                checksums(arena, slot)
                arena.slots[slot][arena.slot_bytes // 2] ^= 16
            die()

    def second_life() -> dict[str, Any]:
        left_to = Sources.left_to

        def looking(*given: Any, **how: Any) -> Any:
            (directory.parent / "slow").touch()
            time.sleep(0.3)
            (directory.parent / "slow").unlink()
            time.sleep(0.1)
            (directory.parent / "held").unlink()
            return left_to(*given, **how)

        def at_step(run: everstep.Run) -> None:
            if run.step == 10:
                assert run.wait("durable", timeout=5), "nobody writes its records"

        Sources.left_to = looking  # type: ignore[method-assign]
        return life(directory, at_step)

    with slow_directory() as directory:
        assert live(lambda: life(directory, damaging)).killed
        result = must_finish(second_life)
        assert result["resumed_from"] < 20
        assert result["digest"] == undisturbed(STEPS)


def test_a_status_says_which_records_no_disk_has() -> None:
    with slow_directory() as directory:
        assert live(lambda: life(directory, stop_at(40, die), keeper="inline")).killed
        status = everstep.open(directory).status()
        rings = arenas_of(directory, "log")
        assert any(seal.step <= ring.taken() for ring in rings for seal in ring.seals().values())
        assert status["ring"]["unwritten"] == status["ring"]["records"], "what was let go is on no disk"
        assert status["durable_step"] is None or status["durable_step"] < 20 < status["sealed_step"]


def test_a_damaged_base_whose_records_were_let_go_is_fallen_back_from_and_said() -> None:
    def once_checked(run: everstep.Run) -> None:
        arena = run._capture.arena()
        slot = arena.slot_of(run._capture.base_step)
        while slot is not None and arena.checks(slot) is None:
            time.sleep(0.01)
        die(run)

    with slow_directory() as directory:
        assert live(lambda: life(directory, stop_at(40, once_checked), keeper="inline")).killed
        base = everstep.open(directory).plan().base
        (arena,) = arenas_of(directory, "base")
        slot = arena.slot_of(base)
        arena.slots[slot][arena.slot_bytes // 2] ^= 16
        arena.close()
        result = must_finish(lambda: train_log(directory, steps=STEPS, tiers=SELDOM))
        assert result["digest"] == undisturbed(STEPS)
        assert any(event.step == base and event.source == "memory" for event in told(directory, Rejected))


@pytest.mark.parametrize("again", [True, False], ids=["too slow again", "fast enough"])
def test_a_keeper_that_follows_another_finds_what_was_let_go(again: bool) -> None:
    """It does not know what the one before has let go, but by the ring: what is there may be overwritten meanwhile."""

    def at_step(run: everstep.Run) -> None:
        if run.step in (25, 40):
            if not again:
                (directory.parent / "slow").unlink(missing_ok=True)
            kill_keeper(directory)
        if run.step == 50:
            assert run.wait("durable", timeout=20)
            die(run)

    with slow_directory() as directory:
        outcome = live(lambda: life(directory, at_step))
        assert outcome.killed, outcome.error
        end_keeper(directory)
        forget_memory(directory)
        result = must_finish(lambda: train_log(directory, steps=STEPS, tiers=SELDOM))
        assert (result["resumed_from"], result["digest"]) == (50, undisturbed(STEPS))


def test_killed_again_at_once_it_goes_on_from_the_same_step() -> None:
    with slow_directory() as directory:
        assert live(lambda: life(directory, stop_at(40, die), keeper="inline")).killed
        step = everstep.open(directory).plan().step
        for place in ("seal", "unseal", "arena header", "taken"):

            def dying(place: str = place) -> dict[str, Any]:
                Arena.before = staticmethod(lambda seen: die() if seen == place else None)  # type: ignore[assignment]
                return life(directory, die, keeper="inline")

            assert live(dying).killed
            assert everstep.open(directory).plan().step == step, place
        result = must_finish(lambda: life(directory, lambda run: None, keeper="inline"))
        assert (result["resumed_from"], result["digest"]) == (step, undisturbed(STEPS))
        assert [one.place for kind in ("base", "log") for one in arenas_of(directory, kind)] == []
