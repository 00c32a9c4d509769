"""Damage to a log and to the bases it follows: found before a tensor is touched, and the newest proven step is taken.

One run is made once: bases 5 and 9 on disk, and a log of three segments that leads to step 13. Its memory is gone, as
after a reboot. Every attack works on a copy.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lives import forget_memory, live, must_finish, run_directory, run_of, train_log, undisturbed
from typer.testing import CliRunner

import everstep
from everstep import Disk
from everstep.capture.arena import find_arenas
from everstep.capture.host import arena_root
from everstep.cli import app
from everstep.events import Rejected, Replayed, read_events
from everstep.keeper.logbook import Logbook
from everstep.recover.load import clear_attempt, find
from everstep.recover.survey import Sources
from everstep.store.disk import DiskTier
from everstep.store.log import LogRead, log_name, read_log, segments
from everstep.store.places import Places
from everstep.topology import Topology, node_name

LAST, STEPS = 13, 15
SEGMENTS = {1: (2, 6), 6: (7, 10), 10: (11, 13)}  # start -> the steps in it
ALONE = Topology(rank=0, world=1, node=node_name())


def doomed(directory: Path) -> dict[str, Any]:
    """A segment ends a moment after a base is durable: the loop waits for that moment."""
    rotate, rotated = Logbook.rotate, threading.Semaphore(0)

    def telling(self: Logbook) -> None:
        rotate(self)
        rotated.release()

    def at_step(run: everstep.Run) -> None:
        if run.step:
            run.wait("durable")
        if run.step in SEGMENTS:
            base = 1 if run.step == 1 else run.step - 1
            run._keeper.wait_durable(base, None, as_base=True)
            assert rotated.acquire(timeout=60)
        if run.step == LAST:
            os.kill(os.getpid(), 9)

    Logbook.rotate = telling  # type: ignore[method-assign]
    return train_log(directory, at_step, records_a_base=4, steps=STEPS, tiers=[Disk(every=100)])


@cache
def original() -> Path:
    """A run that died, in three segments."""
    directory = Path(tempfile.mkdtemp(prefix="everstep-log-"), "run")
    outcome = live(lambda: doomed(directory))
    assert outcome.killed, outcome.error
    forget_memory(directory)
    assert sorted(int(p.name[5:15]) for p in directory.glob("step-*.json")) == [5, 9]
    found = {start: log_of(directory, start) for start in segments(DiskTier(directory))}
    assert {start: (log.start + 1, log.last) for start, log in found.items()} == SEGMENTS
    return directory


def log_of(directory: Path, start: int) -> LogRead:
    return read_log(DiskTier(directory), start, 0, run_of(directory))


def path_of(directory: Path, start: int) -> Path:
    return directory / log_name(start, 0)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def lose_base(directory: Path, step: int) -> None:
    (directory / f"step-{step:010d}.json").unlink()
    shutil.rmtree(directory / f"step-{step:010d}")


def spoil_base(directory: Path, step: int) -> None:
    path = directory / f"step-{step:010d}" / "rank-00000.safetensors"
    flip(path, path.stat().st_size // 2)


def spoil_record(directory: Path, step: int) -> None:
    start = next(start for start, (first, last) in SEGMENTS.items() if first <= step <= last)
    record = log_of(directory, start).records[step - start - 1]
    flip(path_of(directory, start), record.offset + record.length // 2)


def cut_in(directory: Path, step: int, *, at_boundary: bool) -> None:
    start = next(start for start, (first, last) in SEGMENTS.items() if first <= step <= last)
    record = log_of(directory, start).records[step - start - 1]
    os.truncate(path_of(directory, start), record.begin if at_boundary else record.offset + record.length // 2)


def swap(a: Path, b: Path) -> None:
    kept = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(kept)


def both(*deeds: Callable[[Path], Any]) -> Callable[[Path], None]:
    return lambda directory: [deed(directory) for deed in deeds] and None


# what is done -> the base and the step that are taken, and a word of the reason
ATTACKS: dict[str, tuple[Callable[[Path], Any], int, int, str]] = {
    "a bit of the last record": (lambda d: spoil_record(d, 13), 9, 12, "do not match"),
    "a bit in the middle of a segment": (lambda d: spoil_record(d, 12), 9, 11, "do not match"),
    "a bit of the first record of a segment": (lambda d: spoil_record(d, 11), 9, 10, "do not match"),
    "the last record cut off": (lambda d: cut_in(d, 13, at_boundary=False), 9, 12, "torn tail"),
    "the last record cut away": (lambda d: cut_in(d, 13, at_boundary=True), 9, 12, ""),
    "all after the layout cut away": (lambda d: cut_in(d, 11, at_boundary=True), 9, 10, ""),
    "an empty file": (lambda d: os.truncate(path_of(d, 10), 0), 9, 10, ""),
    "zeros": (lambda d: path_of(d, 10).write_bytes(bytes(path_of(d, 10).stat().st_size)), 9, 10, "no frame"),
    "noise": (lambda d: path_of(d, 10).write_bytes(os.urandom(70000)), 9, 10, "no frame"),
    "the layout": (lambda d: flip(path_of(d, 10), 4096 + 100), 9, 10, "log-0000000010"),
    "no last segment": (lambda d: shutil.rmtree(d / "log-0000000010"), 9, 10, ""),
    "no file in the last segment": (lambda d: path_of(d, 10).unlink(), 9, 10, ""),
    "no segment in the middle": (lambda d: shutil.rmtree(d / "log-0000000006"), 9, 9, "step 10"),
    "segments swapped": (lambda d: swap(path_of(d, 6), path_of(d, 10)), 9, 9, "first frame"),
    "an old segment under a new name": (lambda d: shutil.copy(path_of(d, 1), path_of(d, 10)), 9, 10, "first frame"),
    "a segment that begins in the gap of no base": (
        both(lambda d: lose_base(d, 9), lambda d: shutil.rmtree(d / "log-0000000006")), 5, 6, "step 7",
    ),
    "the newest base is missing": (lambda d: lose_base(d, 9), 5, 13, ""),
    "the newest base is damaged": (lambda d: spoil_base(d, 9), 5, 13, "checksum"),
    "the newest base has no commit": (lambda d: (d / "step-0000000009.json").unlink(), 5, 13, ""),
    "the older base is missing": (lambda d: lose_base(d, 5), 9, 13, ""),
    "the newest base and a record before it": (
        both(lambda d: spoil_base(d, 9), lambda d: spoil_record(d, 8)), 5, 7, "do not match",
    ),
    "the newest base and a record after it": (
        both(lambda d: spoil_base(d, 9), lambda d: spoil_record(d, 12)), 5, 11, "do not match",
    ),
    # A damaged frame ends its file, also for the base that lies behind it.
    "a record before the newest base": (lambda d: spoil_record(d, 8), 9, 9, "step 8"),
    "a record before the newest base, in a segment of its own": (lambda d: spoil_record(d, 3), 9, 13, ""),
}  # fmt: skip


@pytest.mark.parametrize("what", ATTACKS)
def test_a_damaged_log_is_named_and_the_newest_proven_step_is_taken(
    run: Path, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    deed, base, step, reason = ATTACKS[what]
    deed(run)
    plan = everstep.open(run).plan()
    assert (plan.base, plan.step) == (base, step)
    assert not reason or any(reason in rejection.reason for rejection in plan.rejections), plan.rejections
    said = CliRunner().invoke(app, ["plan", str(run)], env={"COLUMNS": "400"}).output
    assert f"step {step} would be restored" in said and reason in said
    result = must_finish(lambda: train_log(run, steps=STEPS))
    assert result["resumed_from"] == step
    assert result["digest"] == undisturbed(STEPS), "something damaged reached the model"
    told = read_events(run)
    lost = [r for r in plan.rejections if r.certain and r.source == "disk" and r.step > step]
    passed_over = [line for line in capfd.readouterr().err.splitlines() if "passed over" in line]
    assert len(passed_over) == len({r.step for r in lost})
    assert not reason or any(isinstance(e, Rejected) and reason in e.reason for e in told)
    replayed = [(e.base, e.steps) for e in told if isinstance(e, Replayed)]
    assert replayed == ([(base, step - base)] if step > base else [])


def test_without_a_base_a_log_is_of_no_use_and_nothing_is_begun_anew(run: Path) -> None:
    for step in (5, 9):
        spoil_base(run, step)
    outcome = live(lambda: train_log(run, steps=STEPS))
    assert "everstep.errors.Damaged" in outcome.error
    assert len(log_of(run, 10).records) == 3, "nothing is changed"


def test_a_log_without_any_base_is_passed_over_with_a_reason(run: Path) -> None:
    """As after a reboot before the first base was durable: there is nothing to go on from."""
    for step in (5, 9):
        lose_base(run, step)
    result = must_finish(lambda: train_log(run, steps=STEPS))
    assert (result["resumed_from"], result["digest"]) == (None, undisturbed(STEPS))
    assert any(isinstance(e, Rejected) and "no base" in e.reason for e in read_events(run))


def test_a_log_of_another_run_is_not_taken(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert live(lambda: doomed(other)).killed
    forget_memory(other)
    shutil.copy(path_of(other, 10), path_of(run, 10))
    plan = everstep.open(run).plan()
    assert plan.step == 10 and any("of run" in r.reason for r in plan.rejections)
    result = must_finish(lambda: train_log(run, steps=STEPS))
    assert (result["resumed_from"], result["digest"]) == (10, undisturbed(STEPS))


def read_all(directory: Path) -> tuple[int, dict[int, Any]]:
    """What a recovery would give to the optimizers: the base's step, and the bytes of every record after it."""
    with Sources(Places(directory=str(directory)), run_of(directory)) as sources:
        found = find(sources, ALONE, lambda event: None)
        clear_attempt(sources, lambda event: None)
        assert found is not None and found.chain is not None
        names = [name for group in found.base.info.optimizers[0].groups for name in group]
        given = {
            one.step: [one.gradient(name, 0, found.base.kind(name).shape[0]).tolist() for name in names]
            + [repr(one.calls)]
            for one in found.chain.consumed
        }
        given[found.latest.step].append(found.latest.extras["position"])
        return found.base.step, given


def flips(directory: Path, stride: int) -> Iterator[tuple[Path, int]]:
    """Some bits of every region: prologue and header of every frame more densely, payloads by a stride."""
    for start in SEGMENTS:
        size = path_of(directory, start).stat().st_size
        heads = [record.begin for record in log_of(directory, start).records]
        for begin in (0, *heads):
            yield from ((path_of(directory, start), begin + at) for at in range(0, 400, stride // 199))
        yield from ((path_of(directory, start), at) for at in range(0, size, stride))


def no_bit_goes_unnoticed(run: Path, stride: int) -> None:
    _, truth = read_all(run)
    assert set(truth) == set(range(10, LAST + 1))
    for path, offset in flips(original(), stride):
        flip(path := run / path.relative_to(original()), offset, offset % 8)
        try:
            base, given = read_all(run)
        except AssertionError:
            base, given = 9, {}  # no chain is left
        assert base == 9
        for step, what in given.items():
            assert what[: len(truth[step])] == truth[step][: len(what)], f"byte {offset} of {path.name}, step {step}"
        flip(path, offset, offset % 8)
    assert read_all(run)[1] == truth


def test_no_flipped_bit_of_a_log_goes_unnoticed(run: Path) -> None:
    no_bit_goes_unnoticed(run, 13333)


@pytest.mark.soak
def test_no_flipped_bit_of_a_log_goes_unnoticed_wherever_it_is(run: Path) -> None:
    no_bit_goes_unnoticed(run, 797)


# -- rings


def ring_of(directory: Path) -> Any:
    return next(arena for arena in find_arenas(arena_root(None), run_of(directory)) if arena.kind == "log")


def killed_in_memory(directory: Path) -> None:
    """Base 1 on disk, base 5 in memory, and records up to step 8, of which 6 and later are in the ring only."""

    def at_step(run: everstep.Run) -> None:
        if 1 <= run.step <= 5:
            run.wait("durable")
        if run.step == 5:
            DiskTier.before = staticmethod(lambda name: time.sleep(3600))  # type: ignore[assignment]
        if run.step == 8:
            os.kill(os.getpid(), 9)

    assert live(lambda: train_log(directory, at_step, records_a_base=4, steps=STEPS, tiers=[Disk(every=100)])).killed


@pytest.mark.parametrize("what", ["header", "seal", "missing slot", "control"])
def test_a_broken_ring_is_reported_and_what_is_left_takes_over(what: str) -> None:
    with run_directory() as directory:
        killed_in_memory(directory)
        ring = ring_of(directory)
        slot = ring.slot_of(7)
        assert slot is not None and ring.slot_of(8) is not None
        match what:
            case "header":
                ring.slots[slot][20] ^= 1
            case "seal":
                ring.control[512 + 128 * slot + 8] ^= 1
            case "missing slot":
                Path(ring.place, f"slot-{slot}.safetensors").unlink()
            case "control":
                flip(Path(ring.place, "control"), 20)
        ring.close()
        result = must_finish(lambda: train_log(directory, steps=STEPS))
        assert result["resumed_from"] == (6 if what in ("header", "seal") else 5)
        assert result["digest"] == undisturbed(STEPS)
        assert any(isinstance(e, Rejected) and e.source == "memory" for e in read_events(directory))
        left = list((arena_root(None) / run_of(directory)).glob("rank-*"))
        assert left == [] or what in ("missing slot", "control"), "what cannot be opened stays for everstep gc"
