"""A shell that lets a process open few files, as most do, and a ring of many slots, each of which is two."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lives import live, must_finish, run_directory, run_of, told, train_log, undisturbed

import everstep
from everstep.capture.arena import Wreck, find_arenas
from everstep.capture.host import arena_root
from everstep.errors import TierFailed
from everstep.events import Degraded, Rejected, RingMade, Started

FEW, RING_BYTES = 128, 16 << 20
STEPS, DIES_AT = 12, 8


@pytest.fixture
def directory() -> Iterator[Path]:
    with run_directory() as path:
        yield path


def may_open(files: int, at_most: int | None = None) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most if at_most is None else at_most))


def life(directory: Path, *, dies: bool) -> dict[str, Any]:
    def at_step(run: everstep.Run) -> None:
        if dies and run.step == DIES_AT:
            run.wait("sealed")
            os.kill(os.getpid(), signal.SIGKILL)

    may_open(FEW)
    return train_log(
        directory, at_step, records_a_base=100, ring_bytes=RING_BYTES, steps=STEPS, keeper="process", linger="20s"
    )


def test_a_ring_that_has_more_slots_than_a_shell_allows_files_is_written_and_gone_on_with(directory: Path) -> None:
    assert live(lambda: life(directory, dies=True)).killed
    assert told(directory, RingMade)[0].slots > FEW / 2
    result = must_finish(lambda: life(directory, dies=False))
    assert result["digest"] == undisturbed(STEPS)
    assert told(directory, Started)[-1].source == "memory"
    assert told(directory, Degraded) == told(directory, Rejected) == []


def test_where_a_machine_allows_no_more_a_ring_is_shorter(directory: Path) -> None:
    def life_with_few() -> dict[str, Any]:
        may_open(FEW, FEW)
        return train_log(
            directory, records_a_base=100, ring_bytes=RING_BYTES, steps=STEPS, keeper="process", linger="1s"
        )

    assert must_finish(life_with_few)["digest"] == undisturbed(STEPS)
    assert told(directory, RingMade)[0].slots == FEW // 4
    assert told(directory, Degraded) == []


def test_where_it_is_refused_to_allow_more_what_a_shell_allows_must_do(directory: Path) -> None:
    """As it is to everybody where the limit of a process is above that of its machine."""

    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    def refused() -> dict[str, Any]:
        resource.setrlimit = refuse  # type: ignore[assignment]
        return train_log(directory, steps=STEPS)

    assert must_finish(refused)["digest"] == undisturbed(STEPS)


def test_where_a_machine_allows_no_more_nothing_is_taken_for_a_wreck(directory: Path) -> None:
    def look() -> dict[str, Any]:
        open_now = len(os.listdir("/proc/self/fd"))
        may_open(open_now + 40, open_now + 40)
        wrecks: list[Wreck] = []
        with pytest.raises(TierFailed, match="ulimit -n"):
            list(find_arenas(arena_root(None), run_of(directory), wrecks))
        return {"wrecks": len(wrecks)}

    assert live(lambda: life(directory, dies=True)).killed
    assert must_finish(look)["wrecks"] == 0
