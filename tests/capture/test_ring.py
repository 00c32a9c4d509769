"""Records that are on their way while the next step is recorded, as those of a device are."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.capture.arena import Arena
from everstep.capture.copier import Copier
from everstep.capture.life import Life
from everstep.capture.sheet import Sheet
from everstep.capture.snapshot import Capture
from everstep.errors import EverstepError
from everstep.events import Replayed, read_events

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import live, must_finish, run_directory, train_tiny, turn_every


def slowly(directory: Path, **options: Any) -> dict[str, Any]:
    """A life whose records are sealed only after the next step has begun."""
    finish = Sheet.finish

    def later(sheet: Sheet, *arguments: Any) -> None:
        time.sleep(0.03)
        finish(sheet, *arguments)

    Sheet.leaves_later = property(lambda sheet: True)  # type: ignore[assignment, method-assign]
    Sheet.finish = later  # type: ignore[method-assign]
    return train_tiny(directory, strategy="log", steps=12, **options)


@pytest.mark.parametrize("ratio", [None, 0.2], ids=["dense", "with residuals"])
def test_a_slot_that_is_still_being_filled_is_not_given_away(ratio: float | None) -> None:
    def compress() -> dict[str, Any]:
        return {} if ratio is None else {"compress": everstep.compress.TopK(ratio)}

    with run_directory() as one, run_directory() as two:
        whole = must_finish(lambda: train_tiny(one, steps=12, **compress()))

        def die_at_eight(run: everstep.Run) -> None:
            if run.step:
                run.wait("durable")  # a ring that is full would end the chain
            if run.step == 8:
                os.kill(os.getpid(), signal.SIGKILL)

        assert live(lambda: slowly(two, at_step=die_at_eight, **compress())).killed
        resumed = must_finish(lambda: slowly(two, **compress()))
        assert resumed["resumed_from"] >= 6
        assert resumed["digest"] == whole["digest"]
        assert any(isinstance(event, Replayed) for event in read_events(two))


def test_when_a_record_cannot_leave_the_device_its_residuals_are_let_go_too_and_the_loop_hears_of_it() -> None:
    """The next update waits until both have left spare memory; whatever happens to the first, it must not for ever."""
    launch = Sheet.launch
    launched: list[str] = []

    def fails(sheet: Sheet, *arguments: Any) -> float:
        launched.append(sheet.arena.kind)
        if sheet.arena.kind == "log":
            raise RuntimeError("the link is gone")
        return launch(sheet, *arguments)

    def life() -> dict[str, Any]:
        Sheet.leaves_later = property(lambda sheet: True)  # type: ignore[assignment, method-assign]
        Sheet.launch = fails  # type: ignore[method-assign]
        with pytest.raises(everstep.EverstepError, match="the link is gone"):
            train_tiny(directory, strategy="log", compress=everstep.compress.TopK(0.2))
        return {"launched": launched}

    with run_directory() as directory:
        assert must_finish(life)["launched"][:2] == ["log", "values"]


BASE = 5


def ask_for_a_base(run: everstep.Run) -> None:
    if run.step and run.step < BASE:
        run.wait("durable")
    if run.step == BASE - 1:
        run._keeping.take_base_at(BASE)


def with_a_late_base(directory: Path) -> list[bool]:
    """Whether records came before the base that they follow, which waits for them."""
    seal, found, runs = Life.seal, list[bool](), list[everstep.Run]()
    Sheet.leaves_later = property(lambda sheet: True)  # type: ignore[assignment, method-assign]

    def late(life: Life, arena: Arena, slot: int, *, step: int, cut_time: float) -> None:
        if arena.kind == "base" and step == BASE:
            recorder, deadline = runs[-1]._keeping.recorder, time.monotonic() + 10.0
            assert recorder is not None
            while (recorder.recorded_step or 0) <= BASE and time.monotonic() < deadline:
                time.sleep(0.001)
            found.append((recorder.recorded_step or 0) > BASE)
        seal(life, arena, slot, step=step, cut_time=cut_time)

    def at_step(run: everstep.Run) -> None:
        runs.append(run)
        ask_for_a_base(run)

    Life.seal = late  # type: ignore[method-assign]
    train_tiny(directory, at_step, strategy="log", steps=8)
    return found


def test_records_do_not_wait_for_a_base_that_is_on_its_way() -> None:
    with run_directory() as directory:
        assert must_finish(lambda: {"found": with_a_late_base(directory)})["found"] == [True]


def test_a_base_that_cannot_be_copied_is_heard_of_at_the_next_step_of_a_log() -> None:
    copy = Capture._copy

    def broken(self: Capture, shape: Any, views: Any, step: int) -> None:
        if step == BASE:
            raise RuntimeError("the device is gone")
        copy(self, shape, views, step)

    def life() -> dict[str, Any]:
        Capture._copy = broken  # type: ignore[method-assign]
        steps: list[int] = []

        def at_step(run: everstep.Run) -> None:
            ask_for_a_base(run)
            steps.append(run.step)

        try:
            train_tiny(directory, at_step, strategy="log", steps=40)
        except EverstepError as error:
            return {"error": str(error), "step": steps[-1]}
        return {}

    with run_directory() as directory:
        result = must_finish(life)
    assert "the device is gone" in result["error"]
    assert result["step"] <= BASE + 1


def test_a_base_that_cannot_be_copied_takes_no_record_with_it_when_the_interpreter_ends() -> None:
    copy, seal = Capture._copy, Life.seal

    def broken(self: Capture, shape: Any, views: Any, step: int) -> None:
        if step == BASE:
            raise RuntimeError("the device is gone")
        copy(self, shape, views, step)

    def late(life: Life, arena: Arena, slot: int, *, step: int, cut_time: float) -> None:
        if arena.kind == "log" and step == BASE:
            time.sleep(0.3)
        seal(life, arena, slot, step=step, cut_time=cut_time)

    def end(run: everstep.Run) -> None:
        ask_for_a_base(run)
        if run.step == BASE:
            with pytest.raises(EverstepError, match="the device is gone"):
                run._at_exit()
            os.kill(os.getpid(), signal.SIGKILL)

    def life() -> dict[str, Any]:
        Sheet.leaves_later = property(lambda sheet: True)  # type: ignore[assignment, method-assign]
        Capture._copy, Life.seal = broken, late  # type: ignore[method-assign]
        return train_tiny(directory, end, strategy="log", steps=8)

    with run_directory() as directory:
        assert live(life).killed
        assert must_finish(lambda: train_tiny(directory, strategy="log", steps=8))["resumed_from"] == BASE


def test_a_record_that_fails_where_a_run_turns_to_bases_is_heard_of() -> None:
    """Its recorder is closed in the same step, and nobody asks it again."""
    seal, turn, failed = Life.seal, 8, list[int]()

    def broken(life: Life, arena: Arena, slot: int, *, step: int, cut_time: float) -> None:
        if arena.kind == "log" and step == turn:
            failed.append(step)
            raise RuntimeError("the link is gone")
        seal(life, arena, slot, step=step, cut_time=cut_time)

    def life() -> dict[str, Any]:
        Sheet.leaves_later = property(lambda sheet: True)  # type: ignore[assignment, method-assign]
        Life.seal = broken  # type: ignore[method-assign]
        turn_every(turn // 2)
        with pytest.raises(EverstepError, match="the link is gone"):
            train_tiny(directory, lambda run: bool(run.step) and run.wait(), strategy="auto", steps=20)
        return {"failed": failed}

    with run_directory() as directory:
        assert must_finish(life)["failed"] == [turn]


def test_several_threads_that_hand_over_a_first_job_have_one_thread_copy() -> None:
    """As those do that reduce gradients of a device: what ran twice, or beside another, would copy the wrong bytes."""
    copier, together, made = Copier(), threading.Barrier(4), threading.Thread.__init__
    ran: list[tuple[int, str]] = []

    def slowly_made(thread: threading.Thread, *arguments: Any, **options: Any) -> None:
        time.sleep(0.05)
        made(thread, *arguments, **options)

    def hand_over(number: int) -> None:
        together.wait()
        copier.submit(lambda: ran.append((number, str(threading.get_ident()))))

    threads = [threading.Thread(target=hand_over, args=(number,)) for number in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "__init__", slowly_made)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    copier.close()
    assert sorted(number for number, _ in ran) == [0, 1, 2, 3]
    assert len({who for _, who in ran}) == 1
