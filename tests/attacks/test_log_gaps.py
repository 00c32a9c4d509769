"""A log whose indices lie in it as gaps: read by everybody who reads a log, and what is damaged in it found.

One run is made once: base 1 on disk, records of compressed training up to step 10, and the residuals of steps 9 and 10.
Its memory is gone, as after a reboot. Every attack works on a copy.
"""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from lives import digest, forget_memory, live, must_finish, run_directory, run_of, train_log, train_tiny
from logged import END, alive, past
from typer.testing import CliRunner

import everstep
from everstep import Disk
from everstep.capture.arena import find_arenas
from everstep.capture.compress import TopK
from everstep.capture.host import arena_root
from everstep.cli import app
from everstep.events import Rejected, read_events
from everstep.keeper.scavenge import scavenge
from everstep.store import frame as frames
from everstep.store.disk import DiskTier
from everstep.store.gaps import from_gaps
from everstep.store.log import log_name, read_log, segments
from everstep.store.manifest import values_steps

LAST, STEPS = 10, 14


def compressed(directory: Path, **options: Any) -> dict[str, Any]:
    options = {"records_a_base": 100, "digest_every": 4, "tiers": [Disk(every=10**6)], **options}
    return train_log(directory, steps=STEPS, compress=TopK(0.4), **options)


@cache
def undisturbed() -> str:
    with run_directory() as directory:
        return str(must_finish(lambda: train_tiny(directory, steps=STEPS, compress=TopK(0.4)))["digest"])


@cache
def original() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="everstep-gaps-"), "run")

    def at_step(run: everstep.Run) -> None:
        run.wait("durable")
        if run.step == LAST:
            os.kill(os.getpid(), 9)

    outcome = live(lambda: compressed(directory, at_step=at_step))
    assert outcome.killed, outcome.error
    forget_memory(directory)
    assert values_steps(DiskTier(directory)) == [LAST - 1, LAST]
    return directory


def record_of(directory: Path, step: int) -> tuple[Path, frames.Record]:
    tier = DiskTier(directory)
    start = max(start for start in segments(tier) if start < step)
    record = read_log(tier, start, 0, run_of(directory)).records[step - start - 1]
    assert record.frame.step == step and record.frame.gaps, "there are no gaps to attack"
    return directory / log_name(start, 0), record


def said(*words: object) -> tuple[int, str]:
    ended = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "400"})
    return ended.exit_code, ended.output


def test_every_record_of_it_has_gaps(run: Path) -> None:
    tier = DiskTier(run)
    for start in segments(tier):
        for record in read_log(tier, start, 0, run_of(run)).records:
            (_, item, stored) = record.frame.gaps[0]
            kept = dict(record.frame.ranges)[record.frame.gaps[0][0]] // item
            assert stored < 16 + 1.1 * kept


def test_a_run_goes_on_from_it_bit_for_bit(run: Path) -> None:
    result = must_finish(lambda: compressed(run))
    assert (result["resumed_from"], result["digest"]) == (LAST, undisturbed())


@pytest.mark.parametrize("words", ["ls", "show --log", "verify", "verify --replay", "plan", "status"])
def test_commands_read_it(run: Path, words: str) -> None:
    code, out = said(*words.split(), run)
    assert code == 0, out
    if words == "show --log":
        assert out.count("TopK") == LAST - 1
    if words == "plan":
        assert f"step {LAST} would be restored" in out


def test_a_step_of_it_is_exported_with_the_bits_that_it_had(tmp_path: Path) -> None:
    with past(compress=TopK(0.4)) as directory:
        assert everstep.open(directory).export(tmp_path / "out", END, format="torch") == END
        found, lived = torch.load(tmp_path / "out", weights_only=True), alive(directory, END)
        for part in ("model", "optimizer", "schedulers"):
            assert digest(found[part]) == digest(lived[part]), part


@pytest.mark.parametrize(("step", "code", "left"), [(LAST, 0, LAST - 1), (LAST - 1, 4, 1)])
def test_a_flipped_bit_in_the_gaps_is_named_and_what_came_before_is_taken(
    run: Path, step: int, code: int, left: int
) -> None:
    """That of the last frame may be a torn tail, and of no step before the last two the residuals are there."""
    path, record = record_of(run, step)
    before = sum(length for at, length in record.frame.ranges if at < record.frame.gaps[0][0])
    with path.open("r+b") as file:
        file.seek(record.offset + before + 20)
        byte = file.read(1)[0]
        file.seek(record.offset + before + 20)
        file.write(bytes([byte ^ 4]))
    found = said("verify", run)
    assert found[0] == code and f"the bytes of step {step} do not match their checksum" in found[1], found[1]
    result = must_finish(lambda: compressed(run))
    assert (result["resumed_from"], result["digest"]) == (left, undisturbed())


def test_gaps_that_say_nonsense_with_a_right_checksum_are_passed_over(run: Path) -> None:
    """Somebody may have made the sums anew: one index fewer than there are values."""
    path, record = record_of(run, LAST)
    begin, _, stored = record.frame.gaps[0]
    before = sum(length for at, length in record.frame.ranges if at < begin)
    data = path.read_bytes()
    payload = bytearray(data[record.offset : record.offset + record.length])
    payload[before + stored - 1] = 255
    forged = frames.encode_frame(record.frame, [memoryview(payload)], synced=record.synced)
    path.write_bytes(data[: record.begin] + b"".join(forged))
    assert said("verify", run)[0] == 0, "its checksums are right"
    result = must_finish(lambda: compressed(run))
    assert (result["resumed_from"], result["digest"]) == (LAST - 1, undisturbed())
    assert any(isinstance(e, Rejected) and "gaps" in e.reason for e in read_events(run))


def test_a_log_without_gaps_that_an_earlier_everstep_left_is_gone_on_with(run: Path) -> None:
    """Each record is spelled anew as it was before there were gaps; the next life appends its own with them."""
    tier = DiskTier(run)
    (start,) = segments(tier)
    log = read_log(tier, start, 0, run_of(run))
    data = (run / log_name(start, 0)).read_bytes()
    spelled = data[: log.records[0].begin]
    for record in log.records:
        parts, at, payload = list[memoryview](), 0, log.payload(record)
        held = {begin: (item, stored) for begin, item, stored in record.frame.gaps}
        for begin, length in record.frame.ranges:
            item, stored = held.get(begin, (0, length))
            part = payload[at : at + stored]
            parts.append(from_gaps(part, item, length) if item else part)
            at += stored
        frame = msgspec.structs.replace(record.frame, format=1, gaps=())
        spelled += b"".join(frames.encode_frame(frame, parts))
    (run / log_name(start, 0)).write_bytes(spelled)
    result = must_finish(lambda: compressed(run))
    assert (result["resumed_from"], result["digest"]) == (LAST, undisturbed())


def test_what_is_in_memory_only_is_brought_to_the_disk_when_everybody_is_gone() -> None:
    with run_directory() as directory:

        def at_step(run: everstep.Run) -> None:
            run.wait("durable" if run.step < LAST - 1 else "sealed")  # so that the small ring is never full
            if run.step == LAST:
                os.kill(os.getpid(), 9)

        outcome = live(lambda: compressed(directory, at_step=at_step))
        assert outcome.killed, outcome.error
        arenas = list(find_arenas(arena_root(None), run_of(directory)))
        assert scavenge(DiskTier(directory), arenas, run_of(directory)) == LAST
        for arena in arenas:
            arena.close()
        forget_memory(directory)
        record_of(directory, LAST)
        result = must_finish(lambda: compressed(directory))
        assert (result["resumed_from"], result["digest"]) == (LAST, undisturbed())
