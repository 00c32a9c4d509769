"""How many failures a run has seen, and what its tuner makes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from lives import live, must_finish, run_directory, train_tiny

import everstep
from everstep.capture import steering
from everstep.errors import BadConfig
from everstep.events import Closed, Event, EventLog, Finished, Halted, Started, Stopping, Tuned, read_events
from everstep.tune.models import MTBF_S, mean_between

STARTED = Started(rank=0, world=1, pid=1, step=0, source="nothing")
ENDS = [
    Closed(rank=0, step=3),
    Finished(rank=0, step=3),
    Halted(rank=0, step=3, why="now"),
    Stopping(rank=0, signal="SIGTERM", step=3),
]
OTHER = Tuned(what="x", value=1, formula="", inputs={}, bound="", assumed=())


def failures(*events: Event) -> int:
    with TemporaryDirectory() as folder:
        log = EventLog.of_rank(Path(folder), 0)
        for event in events:
            log(event)
        return log.failures()


def test_a_first_life_has_seen_nothing() -> None:
    assert failures() == failures(OTHER) == 0


@pytest.mark.parametrize("end", ENDS, ids=lambda end: type(end).__name__)
def test_a_life_that_somebody_ended_is_no_failure(end: Event) -> None:
    assert failures(STARTED, OTHER, end) == 0
    assert failures(STARTED, end, STARTED, OTHER) == 1


def test_lives_that_just_ended_are() -> None:
    assert failures(STARTED) == 1
    assert failures(STARTED, OTHER, STARTED, STARTED, ENDS[0]) == 2


def test_what_nobody_can_read_has_seen_nothing(tmp_path: Path) -> None:
    log = EventLog.of_rank(tmp_path, 0)
    log.path.mkdir()
    log(STARTED)
    assert log.failures() == 0


def test_what_is_given_counts_and_then_what_was_seen() -> None:
    assert mean_between(None, 0, 1e6) is None
    assert mean_between(60.0, 7, 1e6) == 60.0
    assert mean_between(None, 1, 0.0) == MTBF_S / 2
    assert mean_between(None, 99, 100 * 3600.0 - MTBF_S) == 3600.0


def life(directory: Path, steps: int, *, dies: bool = False, **options: Any) -> dict[str, Any]:
    steering.WINDOW = 5

    def at_step(run: everstep.Run) -> None:
        if dies and run.step == steps - 1:
            run.wait("sealed")
            os.kill(os.getpid(), signal.SIGKILL)

    return train_tiny(directory, at_step, steps=steps, strategy="log", **options)


def newest(directory: Path) -> Tuned:
    return [e for e in read_events(directory) if isinstance(e, Tuned) and e.what == "steps per base"][-1]


def test_the_tuner_counts_what_ended_the_lives_of_a_run() -> None:
    with run_directory() as directory:
        assert live(lambda: life(directory, 12, dies=True)).killed
        assert "failures" not in newest(directory).inputs and "M" in newest(directory).assumed
        assert live(lambda: life(directory, 24, dies=True)).killed
        must_finish(lambda: life(directory, 36))
        must_finish(lambda: life(directory, 48))
        told = newest(directory)
        assert told.inputs["failures"] == 2 and "M" not in told.assumed
        assert told.inputs["M"] == pytest.approx(MTBF_S / 3, rel=0.01)


def test_a_run_that_the_program_closes_has_not_failed() -> None:
    def closed() -> None:
        train_tiny(directory, lambda run: run.close() if run.step == 3 else None, steps=6)

    with run_directory() as directory:
        live(closed)
        must_finish(lambda: life(directory, 24))
        assert "failures" not in newest(directory).inputs


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from lives import tiny
import everstep
model, optimizer, loader = tiny()
run = everstep.guard(model, optimizer, loader, dir={directory!r}, epochs=None, keeper="inline", strategy="snapshot")
for x, y in run:
    model(x).sum().backward()
    optimizer.step()
    if run.step == 2:
        {end}
"""


@pytest.mark.parametrize(("end", "failed"), [("break", 0), ("1 / 0", 1)])
def test_a_loop_that_was_left_has_not_failed_and_one_that_broke_has(end: str, failed: int) -> None:
    with run_directory() as directory:
        tests = str(Path(__file__).parents[1])
        program = PROGRAM.format(tests=tests, directory=str(directory), end=end)
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
        assert ended.returncode == failed, ended.stderr
        assert EventLog.of_rank(directory, 0).failures() == failed


def test_what_the_user_knows_of_failures_is_taken() -> None:
    with run_directory() as directory:
        must_finish(lambda: life(directory, 12, mtbf="30min"))
        assert newest(directory).inputs["M"] == 1800 and "M" not in newest(directory).assumed


@pytest.mark.parametrize("mtbf", ["soon", "0s", "-1h", 6])
def test_what_is_no_time_between_failures_is_refused(mtbf: Any) -> None:
    with run_directory() as directory, pytest.raises(BadConfig):
        train_tiny(directory, mtbf=mtbf)
