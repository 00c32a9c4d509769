"""Faults while a log is written: slow disks, full disks, dying keepers. Training goes on, no two steps are mixed."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lives import (
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
from refusal import Refusal, wait_through

import everstep
from everstep import Disk
from everstep.capture.arena import Arena
from everstep.capture.host import arena_root
from everstep.errors import EverstepError
from everstep.events import ChainEnded, Degraded, Logged, Persisted, Retired
from everstep.keeper import client
from everstep.keeper.logbook import Logbook
from everstep.store.disk import DiskTier

STEPS = 24
SELDOM = [Disk(every=100)]


def die(run: everstep.Run) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- a slow disk


class Slow:
    """A disk whose every write to a log takes until somebody lets it go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.taken = threading.Event()
        take = Logbook.take

        def taking(logbook: Logbook, *ring: Any, **how: Any) -> int:
            count = take(logbook, *ring, **how)
            if count:
                self.taken.set()
            return count

        Logbook.take = taking  # type: ignore[method-assign]
        DiskTier.before = staticmethod(self)  # type: ignore[assignment]

    def __call__(self, name: str) -> None:
        if name.startswith("write log-"):
            self.may_go_on.wait()


def slow_life(directory: Path, end: Callable[[everstep.Run], Any]) -> dict[str, Any]:
    """No record is written from step 4 to step 14: if a step waited for one, it would wait for ever."""
    slow = Slow()

    def at_step(run: everstep.Run) -> None:
        if run.step == 4:
            run.wait("durable")
            slow.may_go_on.clear()
            slow.taken.clear()
        if run.step == 14:
            slow.may_go_on.set()
            assert slow.taken.wait(60), "the write that was under way did not end"
        if run.step >= 14:
            run.wait("durable")
        if run.step == 21:
            end(run)

    return train_log(directory, at_step, steps=STEPS, records_a_base=50, digest_every=2, tiers=SELDOM)


def test_a_slow_disk_blocks_no_step_the_chain_ends_and_comes_back() -> None:
    with run_directory() as directory:
        result = must_finish(lambda: slow_life(directory, lambda run: None))
        assert result["digest"] == undisturbed(STEPS)
        ended = told(directory, ChainEnded)
        assert [event.reason.split(":")[0] for event in ended] == ["the ring is full"]
        assert any(event.first > ended[0].step for event in told(directory, Logged)), "the chain did not come back"


@pytest.mark.parametrize("reboot", [False, True], ids=["killed", "rebooted"])
def test_after_a_slow_disk_a_killed_run_goes_on_from_its_last_step(reboot: bool) -> None:
    with run_directory() as directory:
        assert live(lambda: slow_life(directory, die)).killed
        if reboot:
            forget_memory(directory)
        plan = everstep.open(directory).plan()
        assert plan.step == 21 and plan.base is not None and plan.base > 5
        result = must_finish(lambda: train_log(directory, steps=STEPS, digest_every=2, tiers=SELDOM))
        assert (result["resumed_from"], result["digest"]) == (21, undisturbed(STEPS))


@pytest.mark.parametrize("reboot", [False, True], ids=["killed", "rebooted"])
def test_killed_while_the_ring_is_full_nothing_durable_is_lost(reboot: bool) -> None:
    def life() -> dict[str, Any]:
        slow = Slow()

        def at_step(run: everstep.Run) -> None:
            if run.step == 4:
                run.wait("durable")
                slow.may_go_on.clear()
            if run.step == 12:
                run.wait("sealed")
                die(run)

        return train_log(directory, at_step, steps=STEPS, records_a_base=50, tiers=SELDOM)

    with run_directory() as directory:
        assert live(life).killed
        assert told(directory, ChainEnded)
        if reboot:
            forget_memory(directory)
        result = must_finish(lambda: train_log(directory, steps=STEPS, tiers=SELDOM))
        assert result["resumed_from"] == 12 if not reboot else result["resumed_from"] >= 4
        assert result["digest"] == undisturbed(STEPS)


# -- a disk that refuses


@pytest.mark.parametrize(
    ("number", "after_bytes"),
    [(errno.ENOSPC, 0), (errno.ENOSPC, 10_000), (errno.EROFS, 0), (errno.EIO, 5_000)],
)
def test_training_goes_on_while_the_log_is_refused_and_it_is_written_once_it_is_not(
    number: int, after_bytes: int
) -> None:
    """Also in the middle of an append: what is half there is taken back, or cut off."""

    def life() -> dict[str, Any]:
        refusal = Refusal(directory, number, after_bytes)
        said: list[str] = []

        def at_step(run: everstep.Run) -> None:
            if run.step == 4:
                run.wait("durable")
                refusal.on = True
            if run.step == 6:
                try:
                    run.wait("durable", timeout=60)
                except EverstepError as error:
                    said.append(str(error))
            if run.step == 12:
                refusal.on = False
                wait_through(run)
            if run.step == 15:
                run.wait("durable")
                die(run)

        return {**train_log(directory, at_step, steps=STEPS, records_a_base=50, tiers=SELDOM), "said": said}

    with run_directory() as directory:
        outcome = live(life)
        assert outcome.killed, outcome.error
        assert any("not durable yet" in event.what for event in told(directory, Degraded))
        forget_memory(directory)
        result = must_finish(lambda: train_log(directory, steps=STEPS, tiers=SELDOM))
        assert (result["resumed_from"], result["digest"]) == (15, undisturbed(STEPS))
        assert everstep.open(directory).verify()


def test_whoever_waits_for_a_record_is_told_at_once_however_often_the_disk_has_refused() -> None:
    def life() -> dict[str, Any]:
        refusal = Refusal(directory, errno.ENOSPC)
        took: list[float] = []

        def at_step(run: everstep.Run) -> None:
            if run.step == 3:
                run.wait("durable")
                refusal.on = True
            if run.step == 4:
                for _ in range(8):
                    began = time.monotonic()
                    with pytest.raises(EverstepError):
                        run.wait("durable")
                    took.append(time.monotonic() - began)
                refusal.on = False
                began = time.monotonic()
                wait_through(run)
                took.append(time.monotonic() - began)

        train_log(directory, at_step, records_a_base=50, tiers=SELDOM)
        return {"took": took}

    with run_directory() as directory:
        assert sum(must_finish(life)["took"]) < 50  # with pauses that double it would be three minutes


# -- keepers


def test_a_keeper_killed_while_a_batch_is_open_leaves_a_torn_tail_that_is_cut() -> None:
    """It dies between the writes of an append; another one takes over in the same life, and then the machine goes."""
    marker = Path()

    def start(run: str, where: Path) -> None:
        def doom() -> None:
            if not marker.exists():
                marker.touch()
                DiskTier._extend = torn  # type: ignore[method-assign]

        fork_keeper(run, where, doom)

    whole = DiskTier._extend

    def torn(tier: DiskTier, name: str, descriptor: int, parts: Any, end: int, direct: bool) -> None:
        if end == 0:
            whole(tier, name, descriptor, parts, end, direct)
            return
        data = b"".join(parts)
        os.pwrite(descriptor, data[: len(data) // 2 + 100], end) if not direct else None
        os.kill(os.getpid(), signal.SIGKILL)

    def life() -> dict[str, Any]:
        client.start = start  # type: ignore[assignment]
        DiskTier.direct = False

        def at_step(run: everstep.Run) -> None:
            if run.step:
                run.wait("durable")
            if run.step == 7:
                die(run)

        return train_log(directory, at_step, keeper="process", linger="1s", records_a_base=50, steps=STEPS)

    with run_directory() as directory:
        marker = directory.with_name("doomed")
        outcome = live(life)
        assert outcome.killed, outcome.error
        assert any("the keeper died" in event.what for event in told(directory, Degraded))
        kill_keeper(directory)
        forget_memory(directory)
        result = must_finish(lambda: train_log(directory, steps=STEPS, tiers=SELDOM))
        assert (result["resumed_from"], result["digest"]) == (7, undisturbed(STEPS))


def test_a_keeper_that_dies_after_bases_of_this_life_does_not_take_them_along() -> None:
    """Its successor is told from where the life resumed; what that life made durable since is not passed over."""

    def life() -> dict[str, Any]:
        def at_step(run: everstep.Run) -> None:
            if run.step:
                run.wait("durable")
            if run.step == 8:
                run._keeper.wait_durable(run._capture.sealed_step or 0, None, as_base=True)
                kill_keeper(directory)
                run._keeper.durable_step = run._keeper.durable_base = -1  # so that its successor is asked, and answers:
                assert run.wait("durable", timeout=60)  # it has been told from where this life resumed
                die(run)

        return train_log(directory, at_step, keeper="process", linger="1s", steps=STEPS, tiers=SELDOM)

    with run_directory() as directory:
        assert live(lambda: train_log(directory, lambda run: run.step == 2 and die(run), steps=STEPS)).killed
        outcome = live(life)
        assert outcome.killed, outcome.error
        kill_keeper(directory)
        forget_memory(directory)
        assert not [e for e in told(directory, Retired) if "newer than" in e.reason]
        assert max(e.step for e in told(directory, Persisted)) > 2
        result = must_finish(lambda: train_log(directory, steps=STEPS, tiers=SELDOM))
        assert (result["resumed_from"], result["digest"]) == (8, undisturbed(STEPS))


# -- nothing grows


def descriptors() -> int:
    """How many stay: the keeper opens some for a moment, and is looked at until it rests."""
    return min(len(os.listdir("/proc/self/fd")) for _ in range(20) if not time.sleep(0.01))


def growing(directory: Path) -> list[Path]:
    """The segments; one may be let go while they are looked for."""
    while True:
        try:
            return [path for path in directory.glob("log-*/*.log") if path.stat().st_size]
        except FileNotFoundError:
            continue


def test_over_500_steps_nothing_grows_and_nothing_is_left_in_memory() -> None:
    def life() -> dict[str, Any]:
        seen: list[tuple[int, int, int]] = []
        created: list[str] = []
        create = Arena.create

        def counting(*arguments: Any, **options: Any) -> Arena:
            created.append(options.get("kind", "base"))
            return create(*arguments, **options)

        Arena.create = counting  # type: ignore[method-assign]

        def at_step(run: everstep.Run) -> None:
            if run.step % 2 == 0 and run.step:
                run.wait("durable")  # or the ring might be full, and be made longer
            if run.step % 10 == 0 and run.step:
                run._keeper.wait_durable(run._capture.sealed_step or 0, None, as_base=True)
            if run.step % 100 == 50:
                memory = sum(p.stat().st_size for p in (arena_root(None) / run_of(directory)).rglob("*") if p.is_file())
                logs = sum(path.stat().st_size for path in growing(directory))
                seen.append((descriptors(), memory, logs))

        result = train_log(directory, at_step, steps=500, records_a_base=10, tiers=[Disk(every=20)])
        return {**result, "seen": seen, "created": sorted(created)}

    with run_directory() as directory:
        result = must_finish(life)
        assert result["created"] == ["base", "log"], "arenas were made again"
        counts, memory, logs = zip(*result["seen"], strict=True)
        assert max(counts) <= min(counts) + 2, f"descriptors: {counts}"
        assert len(set(memory)) == 1
        assert max(logs[2:]) <= 2 * max(logs[:2]), f"segments were not let go: {logs}"
        assert len(list(directory.glob("log-*"))) <= 6 and len(list(directory.glob("step-*.json"))) == 2
        assert not (arena_root(None) / run_of(directory)).exists(), "something is left in /dev/shm"
