"""`everstep run` starts a real training; a worker is killed, or all are asked to leave, and it goes on."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from crews import Job, Program
from lives import digest, run_directory, told
from team import Team
from typer.testing import CliRunner

import everstep
from everstep import signals
from everstep.cli import app
from everstep.events import Halted, RanksLost, Started, Stopping, WentOn
from everstep.topology import process_alive

TRAIN = Path(__file__).parents[2] / "examples/train_live.py"


def kept(directory: Path, step: int) -> str:
    """What the run has on its disk at the end, to the bit."""
    state: dict[str, Any] = everstep.open(directory).load(step)
    tensors = {name: value for name, value in state.items() if name.startswith(("model.", "optimizer."))}
    assert len(tensors) > 10
    return digest(tensors, state["extra"], state["random"]["torch"])


def undisturbed(folder: Path, workers: int, steps: int) -> tuple[str, dict[str, str]]:
    folder.mkdir()
    with run_directory() as directory:
        job = Job(folder, "--nproc", workers, TRAIN, "--dir", directory, "--steps", steps)
        assert job.wait() == 0, job.said
        return kept(directory, steps), results(job)


def results(job: Job) -> dict[str, str]:
    """By rank: what it says of itself at the end, without its process."""
    return dict(re.findall(r"^rank (\d) of \d \(process \d+\): (.*)$", job.said, re.MULTILINE))


def reached(directory: Path) -> int:
    try:
        return int(everstep.open(directory).status()["step"])  # type: ignore[call-overload]
    except everstep.EverstepError:
        return 0  # it has not begun


@pytest.mark.soak
def test_a_worker_killed_at_any_moment_is_replaced_and_the_result_is_the_same_to_the_bit(
    directory: Path, tmp_path: Path
) -> None:
    steps, at = 300, random.randint(5, 200)
    job = Job(tmp_path, "--nproc", 3, "--spares", 1, TRAIN, "--dir", directory, "--steps", steps)
    job.until(lambda: reached(directory) >= at)
    time.sleep(random.random() * 0.02)
    before = [event.pid for event in told(directory, Started)]
    assert len(before) == 3
    victim = random.choice(before)
    os.kill(victim, signal.SIGKILL)
    assert job.wait() == 0, job.said
    assert len(told(directory, RanksLost)) == 1
    assert {event.rank for event in told(directory, WentOn) if event.exact} == {0, 1, 2}
    assert all(event.stopped_s + event.met_s + event.restored_s < 30 for event in told(directory, WentOn))
    after = [event.pid for event in told(directory, Started)[3:]]
    assert len(after) == 3 and set(before) - {victim} < set(after), "who was not killed stays in its process"
    assert (kept(directory, steps), results(job)) == undisturbed(tmp_path / "undisturbed", 3, steps)


def test_a_spare_that_is_asked_to_leave_has_no_step_to_finish_and_leaves_at_once(directory: Path) -> None:
    team = Team(directory, 2, spares=1, on_loss=["spare"]).start(lambda here: time.sleep(0.3))
    time.sleep(2.0)
    os.kill(team.pids[2], signal.SIGTERM)
    asked = time.monotonic()
    while process_alive(team.pids[2]):
        time.sleep(0.01)
    assert time.monotonic() - asked < signals._GRACE_S / 2
    found = team.wait()
    assert [found[name].code for name in range(3)] == [0, 0, 128 + signal.SIGTERM]


def test_a_spare_whose_job_ends_before_it_has_met_anybody_says_nothing(directory: Path, tmp_path: Path) -> None:
    """As one does that was started in the place of a dead worker shortly before the others were done."""
    body = f"""
if rank is None:
    from torch import nn, optim
    import everstep
    everstep.init_process_group("gloo")
    model = nn.Linear(2, 2)
    (notes / "looks").touch()
    everstep.guard(model, optim.SGD(model.parameters()), dir={str(directory)!r}, on_loss=["spare"])
wait_for("looks")
time.sleep(2.5)  # it looks for a second at a time
"""
    job = Job(tmp_path, "--nproc", 1, "--spares", 1, Program(tmp_path, body).path)
    assert (job.wait(), job.said) == (0, "")


@pytest.mark.soak
def test_a_halt_is_for_all_ranks_and_no_spare_takes_the_place_of_one_that_leaves(
    directory: Path, tmp_path: Path
) -> None:
    job = Job(tmp_path, "--nproc", 2, "--spares", 1, TRAIN, "--dir", directory, "--steps", 1_000_000)
    job.until(lambda: reached(directory) >= 5)
    assert CliRunner().invoke(app, ["halt", str(directory), "--now"]).exit_code == 0
    assert job.wait(60) == 0, job.said
    assert [event.rank for event in sorted(told(directory, Halted), key=lambda event: event.rank)] == [0, 1]
    assert len({event.step for event in told(directory, Halted)}) == 1
    assert len(told(directory, Started)) == 2


@pytest.mark.soak
def test_under_torchrun_a_death_means_a_restart_of_all_from_memory(directory: Path, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    job = Job(tmp_path, TRAIN, "--dir", directory, "--steps", 200, "--on-loss", "restart", launcher=torchrun)
    job.until(lambda: reached(directory) >= 30)
    before = told(directory, Started)
    os.kill(before[0].pid, signal.SIGKILL)
    assert job.wait() == 0, job.said
    later = told(directory, Started)[len(before) :]
    assert any(event.pid not in {one.pid for one in before} and event.source == "memory" for event in later)
    assert (kept(directory, 200), results(job)) == undisturbed(tmp_path / "undisturbed", 2, 200)


@pytest.mark.soak
@pytest.mark.parametrize(("times", "trains_s"), [(2, 0.5), (6, 3.0)])
def test_a_job_that_is_preempted_again_and_again_advances_and_loses_no_step(
    directory: Path, tmp_path: Path, times: int, trains_s: float
) -> None:
    left_at = 0
    for life in range(times):
        job = Job(tmp_path, "--nproc", 2, TRAIN, "--dir", directory, "--steps", 1_000_000)
        job.until(lambda life=life: len(told(directory, Started)) == 2 * (life + 1))
        assert [event.step for event in told(directory, Started)[-2:]] == [left_at, left_at]
        time.sleep(trains_s * random.uniform(1, 4 / 3))
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(30) == 128 + signal.SIGTERM, job.said
        before, left_at = left_at, max(event.step for event in told(directory, Stopping))
        assert before < left_at
    steps = left_at + 10
    job = Job(tmp_path, "--nproc", 2, TRAIN, "--dir", directory, "--steps", steps)
    assert job.wait() == 0, job.said
    assert (kept(directory, steps), results(job)) == undisturbed(tmp_path / "undisturbed", 2, steps)
