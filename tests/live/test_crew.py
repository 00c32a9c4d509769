"""`everstep run --nproc`: who dies is replaced, the others are left alone, and nobody outlives the supervisor."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from crews import Job, Program

from everstep.topology import process_alive


def test_workers_are_told_who_they_are_and_spares_that_they_are_spares(tmp_path: Path) -> None:
    told = "('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')"
    program = Program(tmp_path, f"say(kind, *(os.environ[name] for name in {told}), *sys.argv[1:])")
    words = ["--nproc", 2, "--nodes", 3, "--node-rank", 1, "--master", "n0:77", program.path, "--lr", "1"]
    job = Job(tmp_path, *words[:2], "--spares", 1, *words[2:])
    assert job.wait() == 0
    assert sorted(job.said.splitlines()) == [
        "rank-2 2 6 0 2 n0 77 --lr 1", "rank-3 3 6 1 2 n0 77 --lr 1", "spare 0 6 2 2 n0 77 --lr 1"
    ]  # fmt: skip


def test_workers_of_one_node_meet_at_a_port_that_nobody_else_is_given(tmp_path: Path) -> None:
    body = """
import socket
if rank == 0:
    try:
        socket.socket().bind(("", int(os.environ["MASTER_PORT"])))
        raise SystemExit("anybody could have taken it")
    except OSError:
        pass
    mine = socket.socket()
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    mine.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    mine.listen()
    (notes / "listens").touch()
    mine.accept()
else:
    wait_for("listens")
    socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
"""
    job = Job(tmp_path, "--nproc", 2, Program(tmp_path, body).path)
    assert (job.wait(), job.said) == (0, "")


def test_a_worker_that_dies_leaves_the_others_alone_and_a_fresh_spare_is_started_in_its_seat(tmp_path: Path) -> None:
    body = """
if rank == 1:
    wait_for("go")
    die()
wait_for("end")
assert rank is not None or os.environ["LOCAL_RANK"] == "1"
"""
    program = Program(tmp_path, body)
    job = Job(tmp_path, "--nproc", 3, program.path)
    job.until(lambda: len(program.pids("rank-*")) == 3)
    before = program.pids("rank-*")
    program.note("go")
    job.until(lambda: program.pids("spare"))
    others = set(before) - set(program.pids("rank-1"))
    assert all(process_alive(pid) for pid in others) and program.pids("rank-*") == before
    program.note("end")
    assert job.wait() == 0
    line = "rank 1 (process N) was ended by SIGKILL: the others are left alone; process N is started to stand by, "
    assert job.lines == [line + "restart 1 of 30"]


def test_a_spare_that_took_a_place_is_waited_for_and_one_that_did_not_is_ended(tmp_path: Path) -> None:
    body = """
if rank is None and os.environ["LOCAL_RANK"] == "2":
    tell_crew(1)
    (notes / "taken").touch()
    wait_for("end")
    time.sleep(0.5)
    (notes / "worked").touch()
    raise SystemExit(4)
if rank is None:
    time.sleep(60)
if rank == 1:
    die()
wait_for("end")
"""
    program = Program(tmp_path, body)
    job = Job(tmp_path, "--nproc", 2, "--spares", 1, "--max-restarts", 1, program.path)
    job.until(lambda: program.has("taken") and "is started to stand by" in job.said)
    program.note("end")
    began = time.monotonic()
    assert job.wait() == 4
    assert program.has("worked") and time.monotonic() - began < 30
    assert job.lines[-1] == "rank 1 (process N) left with code 4: nobody needs a spare any more"


@pytest.mark.parametrize("how", ["raise SystemExit(75)", "die()"])
def test_when_nobody_trains_any_more_the_job_is_started_again(tmp_path: Path, how: str) -> None:
    body = f"""
if rank is None:
    time.sleep(60)
wait_for("go")
if started(kind) == 1:
    {how}
"""
    program = Program(tmp_path, body)
    job = Job(tmp_path, "--nproc", 2, "--spares", 1, program.path)
    job.until(lambda: len(program.pids("rank-*")) == 2)
    program.note("go")
    assert job.wait() == 0
    assert len(program.pids("rank-0")) == len(program.pids("rank-1")) == 2
    assert sum("nobody trains any more" in line and "the job is started again" in line for line in job.lines) == 1
    assert not any(process_alive(pid) for pid in program.pids("*"))


def test_restarts_have_an_end_and_the_code_of_a_worker_is_left(tmp_path: Path) -> None:
    program = Program(tmp_path, "raise SystemExit(75)")
    job = Job(tmp_path, "--nproc", 1, "--max-restarts", 2, program.path)
    assert job.wait() == 75
    assert len(program.pids("rank-0")) == 3
    assert job.lines[-1].endswith("not started again: the restarts are used up (--max-restarts 2)")


def test_a_worker_that_dies_when_restarts_are_used_up_is_not_replaced_and_the_others_go_on(tmp_path: Path) -> None:
    body = """
if rank == 1:
    die()
wait_for("end")
"""
    program = Program(tmp_path, body)
    job = Job(tmp_path, "--nproc", 2, "--max-restarts", 0, program.path)
    job.until(lambda: "it is not replaced: the restarts are used up" in job.said)
    program.note("end")
    assert job.wait() == 0
    assert not program.pids("spare")


def test_an_error_of_the_program_is_not_tried_again(tmp_path: Path) -> None:
    program = Program(tmp_path, "wait_for('go')\nraise SystemExit(9)")
    job = Job(tmp_path, "--nproc", 2, program.path)
    job.until(lambda: len(program.pids("rank-*")) == 2)
    program.note("go")
    assert job.wait() == 9
    assert len(program.pids("rank-*")) == 2


def test_who_fails_when_others_have_done_their_work_is_not_replaced_and_its_code_is_left(tmp_path: Path) -> None:
    body = """
if rank == 1:
    wait_for("go")
    raise SystemExit(5)
if rank == 2:
    wait_for("end")
"""
    program = Program(tmp_path, body)
    job = Job(tmp_path, "--nproc", 3, program.path)
    job.until(lambda: len(program.pids("rank-*")) == 3 and not process_alive(program.pids("rank-0")[0]))
    time.sleep(0.2)  # the supervisor has seen it, too
    program.note("go")
    job.until(lambda: "left with code 5" in job.said)
    program.note("end")
    assert job.wait() == 5
    assert job.lines == ["rank 1 (process N) left with code 5: nobody needs a spare any more"]


def test_a_spare_that_cannot_stand_by_is_not_started_for_ever(tmp_path: Path) -> None:
    program = Program(tmp_path, "if rank is None: raise SystemExit(2)\nwait_for('end')")
    job = Job(tmp_path, "--nproc", 1, "--spares", 1, program.path)
    job.until(lambda: "left with code 2: it is not replaced" in job.said)
    program.note("end")
    assert job.wait() == 0
    assert len(program.pids("spare")) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_nobody_is_started_again(tmp_path: Path, number: signal.Signals) -> None:
    body = f"""
def leave(number, frame):
    time.sleep(0.3)
    (notes / f"saved-{{kind}}").touch()
    raise SystemExit(128 + number)
signal.signal({int(number)}, leave)
(notes / f"ready-{{kind}}").touch()
time.sleep(60)
"""
    program = Program(tmp_path, body)
    job = Job(tmp_path, "--nproc", 2, "--spares", 1, program.path)
    job.until(lambda: all(program.has(f"ready-{kind}") for kind in ("rank-0", "rank-1", "spare")))
    job.process.send_signal(number)
    assert job.wait() == 128 + number
    assert job.lines == [f"{number.name}: passed on to 3 processes"]
    assert all(program.has(f"saved-{kind}") for kind in ("rank-0", "rank-1", "spare"))
    assert len(program.pids("*")) == 3 and not any(process_alive(pid) for pid in program.pids("*"))


def test_who_does_not_hear_is_ended_after_a_while(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n(notes / 'ready').touch()\ntime.sleep(60)"
    program = Program(tmp_path, body)
    job = Job(tmp_path, "--nproc", 1, program.path, before="from everstep.live import crew; crew._GRACE_S = 0.5")
    job.until(lambda: program.has("ready"))
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(20) == 128 + signal.SIGKILL


def test_no_process_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    program = Program(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)")
    job = Job(tmp_path, "--nproc", 2, "--spares", 1, program.path)
    job.until(lambda: len(program.pids("*")) == 3)
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    deadline = time.monotonic() + 5
    while any(process_alive(pid) for pid in program.pids("*")):
        assert time.monotonic() < deadline, "a process outlived its supervisor"
        time.sleep(0.01)


def test_the_supervisor_needs_no_torch(tmp_path: Path) -> None:
    check = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))"
    job = Job(tmp_path, "--nproc", 1, Program(tmp_path, "").path, before=check)
    assert (job.wait(), job.said) == (0, "False\n")


def test_a_node_that_stands_by_starts_spares_only_and_whoever_of_them_ends_is_replaced(tmp_path: Path) -> None:
    body = """
say(kind, *(os.environ[name] for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")))
if os.environ["LOCAL_RANK"] == "0" and started(kind) < 3:  # the first one there, not who replaces it
    tell_crew(5)
    die()
wait_for("end")
"""
    program = Program(tmp_path, body)
    job = Job(tmp_path, "--stand-by", "--nproc", 2, "--master", "n0:77", program.path)
    job.until(lambda: len(program.pids("spare")) == 3)
    program.note("end")
    assert job.wait() == 0
    assert not program.pids("rank-*")
    assert sorted(re.findall(r"^spare .*$", job.said, re.MULTILINE))[-1] == "spare 1 n0 77"


def test_workers_whose_job_went_on_without_them_are_started_again_only_to_stand_by(tmp_path: Path) -> None:
    body = """
if rank is not None:
    wait_for("go")
    tell_crew(-1)
    raise SystemExit(75)
"""
    program = Program(tmp_path, body)
    words = ["--nproc", 2, "--nodes", 2, "--node-rank", 1, "--master", "n0:77"]
    job = Job(tmp_path, *words, program.path)
    job.until(lambda: len(program.pids("rank-*")) == 2)
    program.note("go")
    assert job.wait() == 0
    assert len(program.pids("rank-*")) == 2 and len(program.pids("spare")) == 2
    assert (
        job.lines[-1]
        == "nobody trains any more (left with code 75): all are started again to stand by, restart 1 of 30"
    )


def test_on_one_node_they_are_ranks_again_since_there_is_nobody_else(tmp_path: Path) -> None:
    program = Program(tmp_path, "if started(kind) == 1:\n    tell_crew(-1)\n    raise SystemExit(75)")
    job = Job(tmp_path, "--nproc", 2, program.path)
    assert job.wait() == 0
    assert len(program.pids("rank-0")) == 2 and not program.pids("spare")


@pytest.mark.parametrize("words", [["--spares", 1, "--master", "a:1"], ["--nodes", 2, "--master", "a:1"], []])
def test_standing_by_needs_a_master_and_nothing_else(tmp_path: Path, words: list[object]) -> None:
    job = Job(tmp_path, "--stand-by", "--nproc", 1, *words, "train.py")
    assert job.wait() == 2 and "--stand-by needs --nproc and --master" in job.said
