"""Real runs that measure, choose, turn and say so."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from lives import fork_keeper, live, must_finish, run_directory, run_of, tiny, train_tiny
from torch import nn

import everstep
from everstep import Disk
from everstep.capture import room, steering
from everstep.capture.arena import Arena
from everstep.capture.snapshot import Capture
from everstep.errors import BadConfig
from everstep.events import Chose, Degraded, Skipped, Tuned, read_events
from everstep.keeper import client, pace
from everstep.keeper.logbook import Logbook
from everstep.keeper.pace import Pace
from everstep.store.disk import DiskTier
from everstep.store.log import scan, segments
from everstep.tune.controller import Measured

COPY_S, COMPUTE_S = 0.04, 0.005
PATIENCE_S = 60.0


def hold_up_updates(slow: Callable[[], bool]) -> None:
    """Copies of bases that last longer than all that they could hide behind, for certain and on any machine."""
    copy, gate = Capture._copy, Capture._gate
    wanted = threading.Event()  # an update is at the gate

    def slowly(self: Capture, *args: Any) -> None:
        if slow():
            wanted.wait(1.0)
            time.sleep(COPY_S)
        copy(self, *args)

    def gated(self: Capture, optimizer: int, *_: object) -> None:
        wanted.set()
        gate(self, optimizer)
        wanted.clear()

    Capture._copy, Capture._gate = slowly, gated  # type: ignore[method-assign]


class Looks:
    """Knows when the keeper inside this process has looked at the ring."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.changed = threading.Condition()
        take = Pace.take

        def counted(pace: Pace, *ring: Any, **how: Any) -> int:
            with self.changed:
                self.begun += 1
            try:
                return take(pace, *ring, **how)
            finally:
                with self.changed:
                    self.ended = self.begun
                    self.changed.notify_all()

        Pace.take = counted  # type: ignore[method-assign]

    def wait(self) -> None:
        """Until it has looked at all that is sealed now."""
        with self.changed:
            next_one = self.begun + 1
            assert self.changed.wait_for(lambda: self.ended >= next_one, PATIENCE_S), "the keeper does not look"


def stop_the_clock() -> None:
    """Records that gather no longer become old: what is flushed is so for another reason."""
    pace.time = SimpleNamespace(time=lambda: 0.0, monotonic=time.monotonic)  # type: ignore[assignment]


@pytest.fixture
def directory() -> Iterator[Path]:
    with run_directory() as path:
        yield path


def auto(
    directory: Path, *, slow: range, steps: int = 150, at_step: Callable[[everstep.Run], None] = lambda run: None
) -> dict[str, Any]:
    """One life whose copies of bases are slow in some steps; run in a child, which is patched.

    The stalls of slow copies are measured; all else is given, so that a busy machine does not take part in the choice.
    """
    steering.WINDOW, read = 5, steering.Steering._read
    seen: list[tuple[str, int]] = []
    now = [0]

    def without_noise(self: steering.Steering, *what: Any) -> Measured:
        measured = read(self, *what)
        stall_s = measured.base_stall_s
        if stall_s >= 0 and now[0] not in slow:
            stall_s = 0.0
        return msgspec.structs.replace(
            measured, step_s=COMPUTE_S + max(stall_s, 0.0), base_stall_s=stall_s, record_stall_s=0.0,
            base_write_s=0.001, record_write_s=0.001, replay_s=0.001,
        )  # fmt: skip

    def each(run: everstep.Run) -> None:
        now[0] = run.step
        deadline = time.monotonic() + PATIENCE_S
        while run.step == steps - 1 and run.status()["strategy"] == "snapshot" and rings_held() - before:
            assert time.monotonic() < deadline, "the ring stays"
            time.sleep(0.01)
        if run.status()["strategy"] == "log":
            looks.wait()
        seen.append((str(run.status()["strategy"]), len(rings_held() - before)))
        at_step(run)

    before, looks = rings_held(), Looks()
    hold_up_updates(lambda: now[0] in slow)
    steering.Steering._read = without_noise  # type: ignore[method-assign]
    result = train_tiny(directory, each, steps=steps, strategy="auto", overhead_budget=0.6)
    return {**result, "seen": seen}


def rings_held() -> set[str]:
    """The rings whose memory this process, and a keeper inside it, still hold."""
    held = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            held.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent.name)
        except OSError:
            continue  # closed in this moment
    return {name for name in held if "-log-" in name}


def undisturbed(steps: int = 150) -> str:
    with run_directory() as path:
        return str(must_finish(lambda: train_tiny(path, steps=steps, strategy="snapshot"))["digest"])


def test_copies_that_become_slow_turn_the_run_to_a_log_and_back_when_they_are_fast_again(directory: Path) -> None:
    result = must_finish(lambda: auto(directory, slow=range(25)))
    chosen = [event for event in read_events(directory) if isinstance(event, Chose)]
    ways = [event.strategy for event in chosen]
    assert ways[-2:] == ["log", "snapshot"], chosen
    assert "bases cost" in chosen[-1].reason
    assert chosen[-2].inputs["overhead_of_bases"] > 0.6 > chosen[-2].inputs["overhead_of_log"]
    assert ["log", 1] in result["seen"] and result["seen"][-1] == ["snapshot", 0]
    assert result["digest"] == undisturbed()


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("way", ["log", "snapshot"])
def test_killed_soon_after_a_turn_it_goes_on_from_the_very_step(directory: Path, way: str, after: int) -> None:
    turned: list[int] = []

    def die(run: everstep.Run) -> None:
        was_log = any(isinstance(event, Chose) and event.strategy == "log" for event in read_events(directory))
        if run.status()["strategy"] == way and (way == "log" or was_log):
            turned.append(run.step)
        if turned and run.step == turned[0] + after:
            (directory.parent / "died").write_text(str(run.step))
            os.kill(os.getpid(), signal.SIGKILL)

    assert live(lambda: auto(directory, slow=range(25), at_step=die)).killed
    died = int((directory.parent / "died").read_text())
    result = must_finish(lambda: auto(directory, slow=range(0)))
    assert result["resumed_from"] in (died, died - 1)
    assert result["digest"] == undisturbed()


class Odd(torch.optim.AdamW):
    """Draws random numbers in its step."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad += torch.randn_like(p) * 1e-3
        return super().step(closure)


def odd_life(directory: Path) -> dict[str, Any]:
    steering.WINDOW = 5
    hold_up_updates(lambda: True)
    model, _, loader = tiny()
    optimizer = Odd(model.parameters(), lr=0.01)
    run = everstep.guard(model, optimizer, loader, dir=directory, steps=30, epochs=None, keeper="inline")
    for x, y in run:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return run.status()


def test_an_optimizer_that_cannot_be_repeated_is_given_bases_for_good(directory: Path) -> None:
    status = must_finish(lambda: odd_life(directory))
    ways = [event.strategy for event in read_events(directory) if isinstance(event, Chose)]
    assert ways == ["log", "snapshot"]
    assert str(status["reason"]).startswith("there can be no log: ") and "Odd" in str(status["reason"])
    assert any(isinstance(e, Degraded) and e.what.startswith("there is no log") for e in read_events(directory))


def test_a_log_that_was_asked_for_has_bases_as_often_as_the_model_says(directory: Path) -> None:
    def life() -> dict[str, Any]:
        steering.WINDOW = 5
        # Two steps more than the last decision, so that it is seen.
        return train_tiny(directory, lambda run: seen.append(run.status()) and None, steps=42, strategy="log") | {
            "bases": sorted({int(str(s["steps_per_base"])) for s in seen}),
            "reasons": sorted({str(s["reason"]) for s in seen}),
        }

    seen: list[dict[str, object]] = []
    result = must_finish(life)
    told = [event for event in read_events(directory) if isinstance(event, Tuned) and event.what == "steps per base"]
    assert told and told[-1].formula == "sqrt(2 M C_F / r) / T" and told[-1].assumed == ("M",)
    assert {event.value for event in told} <= set(result["bases"])
    assert result["reasons"] == ["as told"]


# -- the group commit


def logged_life(directory: Path, lose_at_most: int | str, steps: int = 30) -> dict[str, Any]:
    """The keeper looks at the ring once or more after every step."""
    groups: list[int] = []
    take, looks = Logbook.take, Looks()

    def counted(self: Logbook, *ring: Any, **how: Any) -> int:
        count = take(self, *ring, **how)
        groups.extend([count] if count else [])
        return count

    def each(run: everstep.Run) -> None:
        if run.step:
            looks.wait()

    Logbook.take = counted  # type: ignore[method-assign]
    result = train_tiny(
        directory, each, steps=steps, strategy="log", lose_at_most=lose_at_most, tiers=[Disk(every=1000)]
    )
    return {**result, "groups": groups}


def test_by_default_every_record_is_flushed_as_soon_as_it_is_there(directory: Path) -> None:
    groups = must_finish(lambda: logged_life(directory, 1))["groups"]
    assert groups[:28] == [1] * 28, groups  # of the last one the base may be there first


def test_records_gather_up_to_what_may_be_lost_and_half_of_the_ring(directory: Path) -> None:
    def life() -> dict[str, Any]:
        stop_the_clock()
        return logged_life(directory, 2)

    groups = must_finish(life)["groups"]
    assert groups[:14] == [1] + [2] * 13, groups  # what a flush costs is known after the first
    told = [e for e in read_events(directory) if isinstance(e, Tuned) and e.what == "records per flush"]
    assert (told[-1].value, told[-1].formula) == (2, "sqrt(2 M C_D) / T")


def test_nothing_gathers_for_longer_than_may_be_lost(directory: Path) -> None:
    groups = must_finish(lambda: logged_life(directory, "10ms"))["groups"]
    assert groups[:28] == [1] * 28, groups


def unhurried_life(directory: Path, at_step: Callable[[everstep.Run], None]) -> dict[str, Any]:
    """Records would wait for each other for ever, once it is known what a flush costs."""
    room._MIN_SLOTS = 200  # type: ignore[attr-defined]

    def never_due() -> None:
        stop_the_clock()
        choose = pace.steps_per_flush
        pace.steps_per_flush = lambda *a, **how: replace(choose(*a, **how), value=10**6)

    client.start = lambda run, where: fork_keeper(run, where, never_due)  # type: ignore[assignment]

    def each(run: everstep.Run) -> None:
        if run.step == 2:
            run.wait("durable")
        at_step(run)

    return train_tiny(directory, each, steps=9, strategy="log", lose_at_most=1000, keeper="process", linger="1s")


def newest_on_disk(directory: Path) -> int:
    tier, run, newest = DiskTier(directory), run_of(directory), -1
    for start in segments(tier):
        try:
            newest = max(newest, scan(tier, start, 0, run).last)
        except FileNotFoundError:
            continue  # the keeper has just let it go: a newer base is there
    return newest


def test_whoever_waits_gets_a_flush_at_once(directory: Path) -> None:
    behind: list[int] = []

    def wait(run: everstep.Run) -> None:
        if run.step == 6:
            behind.append(run.step - newest_on_disk(directory))
            assert run.wait("durable", timeout=PATIENCE_S)

    result = must_finish(lambda: unhurried_life(directory, wait) | {"behind": behind})
    assert result["behind"][0] > 1, "nothing had gathered"


def test_when_the_trainer_is_gone_everything_is_flushed(directory: Path) -> None:
    def die(run: everstep.Run) -> None:
        if run.step == 6:
            (directory.parent / "behind").write_text(str(run.step - newest_on_disk(directory)))
            os.kill(os.getpid(), signal.SIGKILL)

    assert live(lambda: unhurried_life(directory, die)).killed
    assert int((directory.parent / "behind").read_text()) > 1, "nothing had gathered"
    deadline = time.monotonic() + PATIENCE_S
    while newest_on_disk(directory) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert newest_on_disk(directory) == 6


# -- a turn whose base came to nothing


@pytest.mark.parametrize(("turn", "died"), [(4, 7), (8, 8), (8, 11)], ids=["to the log", "back", "back for good"])
def test_a_turn_is_made_up_for_when_no_slot_was_free_for_its_base(directory: Path, turn: int, died: int) -> None:
    """Until a base is sealed nothing that follows it counts, and what came before is held."""

    def life() -> dict[str, Any]:
        read, free = steering.Steering._read, Arena.free_slot
        now = [0]

        def made_up(self: steering.Steering, recorder: Any, *rest: Any) -> Measured:
            seen = read(self, recorder, *rest)
            return msgspec.structs.replace(
                seen, step_s=0.1, base_stall_s=0.05 if now[0] < 7 else 0.0, record_stall_s=0.0
            )

        def die(run: everstep.Run) -> None:
            run.wait("sealed")
            now[0] = run.step
            if run.step == died:
                os.kill(os.getpid(), signal.SIGKILL)

        def full(self: Arena, *args: Any) -> int | None:
            return None if now[0] == turn - 1 else free(self, *args)

        steering.WINDOW = 4
        steering.Steering._read = made_up  # type: ignore[method-assign]
        Arena.free_slot = full  # type: ignore[method-assign]
        return train_tiny(directory, die, steps=20, strategy="auto")

    assert live(life).killed
    assert any(isinstance(e, Skipped) and e.step == turn for e in read_events(directory))
    for name in directory.glob("step-*"):
        shutil.rmtree(name) if name.is_dir() else name.unlink()  # the bases in memory must do
    result = must_finish(lambda: train_tiny(directory, steps=20, strategy="snapshot"))
    assert result["resumed_from"] == died, "\n".join(map(str, read_events(directory)))
    assert result["digest"] == undisturbed(20)


# -- asking


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, True, float("nan")])
def test_a_budget_is_a_share(directory: Path, share: float) -> None:
    model, optimizer, loader = tiny()
    with pytest.raises(BadConfig, match="overhead_budget must be a share between 0 and 1"):
        everstep.guard(model, optimizer, loader, dir=directory, overhead_budget=share)


def test_tune_prints_formula_inputs_and_result(directory: Path) -> None:
    must_finish(lambda: auto(directory, slow=range(1000), steps=30))

    def tune(*words: str) -> str:
        command = [sys.executable, "-m", "everstep.cli", "tune", str(directory), *words]
        environment = {**os.environ, "COLUMNS": "300"}
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment).stdout

    said = tune()
    assert "strategy log since step" in said and "overhead_of_bases=" in said
    assert "sqrt(2 M C_F / r) / T" in said and "sqrt(2 M C_D) / T" in said and "M=2.16e+04 (assumed)" in said
    told = json.loads(tune("--json"))
    assert told["strategy"]["strategy"] == "log"
    assert {one["what"] for one in told["decisions"]} == {"steps per base", "records per flush"}


def test_tune_says_so_where_nothing_was_decided(directory: Path) -> None:
    must_finish(lambda: train_tiny(directory))
    command = [sys.executable, "-m", "everstep.cli", "tune", str(directory)]
    assert "nothing was decided yet" in subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
