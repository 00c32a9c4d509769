"""`everstep halt`, as people and machines use it. What a run does about it is in keeper/test_halt.py."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from lives import must_finish, run_directory, train_tiny
from said import Cli

from everstep.cli.halt import parse_time
from everstep.errors import BadConfig
from everstep.store import halts


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with run_directory() as place:
        must_finish(lambda: train_tiny(place))
        yield place


def test_a_halt_is_set_shown_replaced_and_cleared(cli: Cli, directory: Path) -> None:
    assert cli("halt", directory, "--show").out == "no halt is asked for\n"
    assert cli("halt", directory, "--show", "--json").json == {"directory": str(directory), "halt": None}
    assert "halt now, asked for" in cli("halt", directory, "--now").out
    assert "halt after 1 checkpoint, asked" in cli("halt", directory, "--after", 1).out
    said = cli("halt", directory, "--after", 3, "--before", "2099-12-24T18:30", "--seconds", 600)
    assert said.code == 0
    assert "halt after 3 checkpoints or before 2099-12-24 18:30:00 or with 600 seconds of the allocation" in said.out
    told = cli("halt", directory, "--show", "--json").json["halt"]
    assert (told["now"], told["after"], told["seconds"], told["in_force"]) == (False, 3, 600.0, True)
    assert told["before"] == datetime.datetime(2099, 12, 24, 18, 30).timestamp()
    assert cli("halt", directory, "--clear").out == "no halt is asked for\n"
    assert halts.read(directory) is None


def test_whoever_halts_a_run_that_nobody_trains_is_told_whom_it_will_stop(cli: Cli, directory: Path) -> None:
    said = cli("halt", directory, "--now").out
    assert "nobody trains it on this node now" in said and "its next start leaves after a step or a few" in said
    assert said.endswith("--clear takes the halt back\n")
    cli("halt", directory, "--clear")


def test_a_halt_that_was_obeyed_is_shown_as_such(cli: Cli, directory: Path) -> None:
    cli("halt", directory, "--now")
    record = halts.read(directory)
    assert record is not None
    obeyed = msgspec.structs.replace(record, obeyed_time=time.time(), obeyed_step=5, why="now")
    halts.write(directory, obeyed)
    said = cli("halt", directory, "--show")
    assert "obeyed at step 5" in said.out and "it stops nobody any more" in said.out
    assert not cli("halt", directory, "--show", "--json").json["halt"]["in_force"]
    cli("halt", directory, "--clear")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "say when: --now, --after, --before or --seconds; or --clear, or --show"),
        (["--now", "--clear"], 2, "say when"),
        (["--after", "0"], 2, "Invalid value for '--after'"),
        (["--before", "soon"], 2, "--before must be a time such as 18:30 or 2026-12-24T18:30, not 'soon'"),
        (["--before", "2020-01-01"], 2, "is over; use --now"),
    ],
)
def test_what_cannot_be_right_is_refused(words: list[str], code: int, said: str, cli: Cli, directory: Path) -> None:
    answer = cli("halt", directory, *words)
    assert answer.code == code and said in answer.err
    assert halts.read(directory) is None


def test_a_directory_without_a_run_and_a_damaged_wish(cli: Cli, directory: Path, tmp_path: Path) -> None:
    assert cli("halt", tmp_path, "--now").code == 3
    assert list(tmp_path.iterdir()) == []
    (directory / halts.RECORD).write_text("{}")
    answer = cli("halt", directory, "--show")
    assert answer.code == 4 and "halt.json" in answer.err
    assert cli("halt", directory, "--clear").code == 0


def test_a_time_of_day_is_the_next_one_that_comes() -> None:
    noon = datetime.datetime(2026, 11, 15, 12, 0)
    assert parse_time("18:30", noon.timestamp()) == noon.replace(hour=18, minute=30).timestamp()
    assert parse_time("9:05", noon.timestamp()) == datetime.datetime(2026, 11, 16, 9, 5).timestamp()
    assert parse_time("2026-11-15T12:00:01", noon.timestamp()) == noon.timestamp() + 1
    zoned = parse_time("2026-11-16T00:00:00+02:00", noon.timestamp())
    assert zoned == datetime.datetime(2026, 11, 15, 22, tzinfo=datetime.UTC).timestamp()
    with pytest.raises(BadConfig):
        parse_time("24:00", noon.timestamp())
