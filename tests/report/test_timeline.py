"""What a run did when: the spans of its ranks and keepers, and the file that they lie in."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lives import live, must_finish, run_directory, tiny, told, train_log, train_tiny
from torch import nn

import everstep
from everstep.capture import moments
from everstep.events import Persisted, Replayed
from everstep.timeline import Kind, Span, Timeline, Track, read_timeline, timeline_of_rank

SLACK_S = 0.001  # begins are doubles since the epoch, and lengths have 24 bits


def by_kind(track: Track) -> dict[int, list[Span]]:
    found = defaultdict(list)
    for span in track.spans:
        found[span.kind].append(span)
    return found


def rank_of(directory: Path) -> Track:
    return next(track for track in read_timeline(directory) if track.name == "rank 0")


def keeper_of(directory: Path) -> list[Span]:
    return [span for track in read_timeline(directory) if track.name.startswith("keeper of ") for span in track.spans]


def is_within(inner: Span, outer: Span) -> bool:
    return outer.begin - SLACK_S <= inner.begin and inner.end <= outer.end + SLACK_S


# -- what is in it


def test_every_step_of_a_run_has_its_parts_in_their_order() -> None:
    with run_directory() as directory:
        must_finish(lambda: train_tiny(directory, tiers=[everstep.Disk(every=2)]))
        track = rank_of(directory)
        kinds = by_kind(track)
        assert not track.problems
        for kind in (Kind.STEP, Kind.DATA, Kind.COMPUTE, Kind.UPDATE, Kind.CUT, Kind.COPY):
            assert {span.step for span in kinds[kind]} == {1, 2, 3, 4, 5, 6}, kind.name
        steps = {span.step: span for span in kinds[Kind.STEP]}
        for step, whole in steps.items():
            data, compute, update, cut = (
                next(span for span in kinds[kind] if span.step == step)
                for kind in (Kind.DATA, Kind.COMPUTE, Kind.UPDATE, Kind.CUT)
            )
            assert data.end <= compute.begin + SLACK_S and compute.end <= update.begin + SLACK_S
            assert is_within(compute, whole) and is_within(update, whole)
            assert cut.begin >= whole.end - SLACK_S
        for bucket in kinds[Kind.BUCKET]:
            assert any(is_within(bucket, copy) for copy in kinds[Kind.COPY] if copy.step == bucket.step)
        assert Kind.FORWARD not in kinds and Kind.COMMUNICATION not in kinds  # nobody could know


def test_what_was_persisted_is_what_the_events_say() -> None:
    with run_directory() as directory:
        must_finish(lambda: train_tiny(directory, tiers=[everstep.Disk(every=2)]))
        spans = by_kind(rank_of(directory))[Kind.PERSIST]
        events = told(directory, Persisted)
        assert events and [span.step for span in spans] == [event.step for event in events]
        for span, event in zip(spans, events, strict=True):
            assert span.seconds == pytest.approx(event.seconds, rel=1e-5)
            assert span.end == pytest.approx(event.time, abs=0.25)


def train_ddp(directory: Path) -> dict[str, Any]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"file://{directory.parent}/meet", rank=0, world_size=1)
    inner, _, loader = tiny()
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = everstep.guard(
        model, optimizer, loader, dir=directory, steps=8, epochs=None, keeper="inline", strategy="log"
    )  # fmt: skip
    for x, y in run:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"step": run.step}


def test_under_ddp_forward_backward_and_communication_are_told_apart() -> None:
    with run_directory() as directory:
        must_finish(lambda: train_ddp(directory))
        kinds = by_kind(rank_of(directory))
        forward, backward, reducing = kinds[Kind.FORWARD], kinds[Kind.BACKWARD], kinds[Kind.COMMUNICATION]
        assert len(forward) == len(backward) == len(reducing) == 8
        for before, after, meanwhile in zip(forward, backward, reducing, strict=True):
            assert before.step == after.step == meanwhile.step
            assert before.end == pytest.approx(after.begin, abs=SLACK_S)
            assert is_within(meanwhile, after)
        assert Kind.COMPUTE not in kinds
        assert kinds[Kind.RECORD] and kinds[Kind.APPEND]


def test_a_resume_shows_what_was_loaded_and_repeated() -> None:
    def die(run: everstep.Run) -> None:
        if run.step == 5:
            run.wait("sealed")
            os.kill(os.getpid(), signal.SIGKILL)

    with run_directory() as directory:
        assert live(lambda: train_log(directory, die, records_a_base=100)).killed
        must_finish(lambda: train_log(directory, records_a_base=100))
        kinds = by_kind(rank_of(directory))
        (whole,), (load,), (replay,) = (kinds[kind] for kind in (Kind.RECOVERY, Kind.LOAD, Kind.REPLAY))
        (event,) = told(directory, Replayed)
        assert whole.step == load.step == replay.step == event.base + event.steps
        assert is_within(load, whole) and is_within(replay, whole) and load.end <= replay.begin + SLACK_S
        assert replay.seconds >= event.seconds
        assert len({span.pid for span in kinds[Kind.STEP]}) == 1 + (min(s.step for s in kinds[Kind.STEP]) == 1)


def test_a_keeper_has_a_file_of_its_own() -> None:
    with run_directory() as directory:
        must_finish(lambda: train_tiny(directory, keeper="process"))
        until(lambda: 6 in [span.step for span in keeper_of(directory) if span.kind == Kind.PERSIST])
        assert {span.step for span in keeper_of(directory)} == {event.step for event in told(directory, Persisted)}
        assert Kind.PERSIST not in by_kind(rank_of(directory))


def test_optimizers_inside_backward_leave_the_phases_out() -> None:
    """One a parameter: their steps are no phase of a step, and a clock call for each would cost too much."""
    marked: list[Kind] = []
    one = moments.Moments(lambda kind, *_: marked.append(kind), optimizers=9)
    one.given()
    for optimizer in range(9):
        one.updates()
        one.updated(optimizer)
    one.cut(1)
    assert marked == [Kind.DATA, Kind.STEP]


def test_a_step_of_several_batches_is_not_divided_by_its_first_bucket() -> None:
    marked: list[Kind] = []
    one = moments.Moments(lambda kind, *_: marked.append(kind))
    one.given()
    one.given()
    one.reduces()
    one.updates()
    assert marked == [Kind.DATA, Kind.COMPUTE]


# -- the file


def written(path: Path, spans: int, **options: Any) -> None:
    one = Timeline(path, **options)
    now = time.monotonic()
    for step in range(1, spans + 1):
        one.mark(Kind.STEP, step, now + step, now + step + 0.5)
    one.close()


def steps_in(directory: Path) -> list[int]:
    return [span.step for span in rank_of(directory).spans]


def test_a_torn_end_is_read_up_to_the_tear(tmp_path: Path) -> None:
    path = timeline_of_rank(tmp_path, 0)
    written(path, 3)
    whole = path.stat().st_size
    written(path, 2)
    both = path.read_bytes()
    for size in (whole + 1, whole + 23, whole + 24, whole + 30, len(both) - 1):
        path.write_bytes(both[:size])
        track = rank_of(tmp_path)
        assert [span.step for span in track.spans] == [1, 2, 3]
        assert track.problems == [f"{size - whole} bytes of it are torn or damaged"]


def test_what_follows_a_tear_is_read(tmp_path: Path) -> None:
    """A killed process left half a block, and its successor has written behind it."""
    path = timeline_of_rank(tmp_path, 0)
    written(path, 3)
    path.write_bytes(path.read_bytes()[:-7])
    written(path, 2)
    track = rank_of(tmp_path)
    assert [span.step for span in track.spans] == [1, 2]
    assert len(track.problems) == 1


@pytest.mark.parametrize("at", [0, 5, 9, 14, 20, 30, 60])
def test_a_flipped_bit_is_never_shown_as_a_span(at: int, tmp_path: Path) -> None:
    path = timeline_of_rank(tmp_path, 0)
    written(path, 3)
    first = path.read_bytes()
    damaged = bytearray(first)
    damaged[at] ^= 4
    path.write_bytes(damaged)
    track = rank_of(tmp_path)
    assert track.spans == [] or at in range(8, 12), track  # of a pid any number may be true
    assert track.problems or at in range(8, 12)


def test_a_newer_version_is_named_and_not_guessed(tmp_path: Path) -> None:
    path = timeline_of_rank(tmp_path, 0)
    written(path, 3)
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, 4, 2)
    path.write_bytes(data)
    assert rank_of(tmp_path).problems == ["from byte 0 on it was written by a newer everstep (version 2)"]


def test_it_stays_small_and_forgets_the_old_before_the_new(tmp_path: Path) -> None:
    path, limit = timeline_of_rank(tmp_path, 0), 8192
    one = Timeline(path, limit_bytes=limit)
    one.mark(Kind.RECOVERY, 1, 0.0, 1.0)
    sizes = []
    for step in range(1, 3001):
        one.mark(Kind.STEP, step, float(step), step + 0.5)
        if step % 50 == 0:
            one.flush()  # as its thread does
            sizes.append(path.stat().st_size)
    one.close()
    assert max(sizes) < limit and min(sizes[10:]) > limit // 2
    track = rank_of(tmp_path)
    steps = [span.step for span in track.spans if span.kind == Kind.STEP]
    assert steps == sorted(set(steps))
    assert steps[-100:] == list(range(2901, 3001))
    gaps = [b - a for a, b in pairwise(steps)]
    assert gaps[0] > 4 and gaps[-1] == 1
    assert [span.kind for span in track.spans].count(Kind.RECOVERY) == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_a_medium_that_refuses_hurts_nobody_and_gets_it_later(tmp_path: Path) -> None:
    folder = tmp_path / "not yet"
    one = Timeline(timeline_of_rank(folder, 0))
    one.mark(Kind.STEP, 1, 0.0, 1.0)
    one.flush()
    folder.mkdir()
    one.mark(Kind.STEP, 2, 1.0, 2.0)
    one.close()
    assert steps_in(folder) == [1, 2]


def test_a_killed_process_has_left_all_but_its_last_moment(tmp_path: Path) -> None:
    def die() -> dict[str, Any]:
        one = Timeline(timeline_of_rank(tmp_path, 0))
        one.mark(Kind.STEP, 1, 0.0, 1.0)
        until(lambda: timeline_of_rank(tmp_path, 0).exists() and steps_in(tmp_path) == [1])
        one.mark(Kind.STEP, 2, 1.0, 2.0)
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    assert live(die).killed
    assert steps_in(tmp_path) == [1]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
