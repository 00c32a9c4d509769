"""`everstep top`: a run that goes on, one that has ended, and one that cannot be looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from lives import must_finish, run_directory, train_tiny
from said import Cli

import everstep
from everstep.cli import top
from everstep.report.now import look
from everstep.timeline import Kind, Timeline, read_timeline, timeline_of_rank


def test_a_run_that_goes_on_shows_its_ranks_its_steps_and_what_is_safe() -> None:
    seen: dict[str, Any] = {}

    def looked_at(directory: Path) -> Callable[[everstep.Run], None]:
        def at_step(run: everstep.Run) -> None:
            if run.step == 4:
                run.wait()
                run._timeline.flush()  # as its thread does a few times a second
                seen.update(msgspec.to_builtins(look(everstep.open(directory))))

        return at_step

    def life() -> dict[str, Any]:
        train_tiny(directory, looked_at(directory))
        return seen

    with run_directory() as directory:
        now = must_finish(life)
    (rank,) = now["paces"]
    assert now["status"]["alive"] and now["status"]["durable_step"] == 4
    assert rank["name"] == "rank 0" and rank["step"] == 4 and 0 < rank["step_s"] < 10
    assert rank["pid"] in now["status"]["trainers"]
    assert now["tiers"]["memory"] == now["status"]["arena_bytes"] > 0
    assert now["events"][0]["time"] >= now["events"][-1]["time"]


def test_once_prints_what_machines_are_told(cli: Cli, resumed: Path) -> None:
    said, told = cli("top", resumed, "--once"), cli("top", resumed, "--json").json
    assert said.code == 0 and "nobody trains, step 12" in said.out
    assert told["status"]["step"] == told["paces"][0]["step"] == 12
    assert "newest step durable 12" in said.out and "the machine reboots" in said.out
    assert told["events"][0]["event"] == "finished" and "rank 0, step 12" in said.out


def test_it_looks_again_and_again_until_ctrl_c(cli: Cli, resumed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(top, "time", SimpleNamespace(sleep=sleep))
    said = cli("top", resumed)
    assert said.code == 0 and len(looks) == 3 and "step 12" in said.out


def test_a_directory_that_is_no_run_is_refused(cli: Cli, tmp_path: Path) -> None:
    said = cli("top", tmp_path, "--once")
    assert said.code == 3 and "not a run's directory" in said.err


def test_only_the_end_of_a_long_timeline_is_read(tmp_path: Path) -> None:
    one = Timeline(timeline_of_rank(tmp_path, 0))
    for step in range(1, 101):
        one.mark(Kind.STEP, step, float(step), step + 1.0)
        one.flush()
    one.close()
    (track,) = read_timeline(tmp_path, newest_bytes=1000)
    assert [span.step for span in track.spans] == list(range(101 - 1000 // 48, 101))
