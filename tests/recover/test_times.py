"""How long a plan would take is said where it was measured, and nowhere else."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import live, run_directory, told, train_tiny

import everstep
from everstep.events import Brought, Event, Fetched, Persisted, Replayed
from everstep.recover.times import measure, times
from everstep.types import Holding, ParityHolding, ParityMember, ParityPart, ParityRecord, Plan, Records

MB = 1_000_000


def part(rank: int, source: Any, node: str, size: int = 100 * MB, *, everywhere: bool = False) -> Holding:
    return Holding(
        source=source, node=node, step=10, rank=rank, world=2, generation="g", bytes=size, cut_time=0.0,
        everywhere=everywhere,
    )  # fmt: skip


def records(rank: int, source: Any, node: str) -> Records:
    return Records(source=source, node=node, rank=rank, world=2, first=11, last=14, bytes=5 * MB, cut_time=0.0)


def plan(*parts: Holding, step: int = 10, log: tuple[Records, ...] = (), parities: tuple[Any, ...] = ()) -> Plan:
    return Plan(step=step, world=2, parts=parts, rejections=(), records=log, parities=parities)


WRITTEN = Persisted(step=1, bytes=200 * MB, seconds=2.0, direct=True)


def test_where_nothing_was_measured_nothing_is_said() -> None:
    found = times(plan(part(0, "disk", "a"), part(1, "partner", "b")), measure([WRITTEN]))
    assert found.parts == (1.0, None) and found.total is None
    assert found.unmeasured == ("partner",) and set(found.rates) == {"disk"}


def test_what_a_restart_has_read_counts_before_what_was_written() -> None:
    read = Fetched(rank=0, source="disk", bytes=400 * MB, seconds=1.0)
    found = times(plan(part(0, "disk", "a")), measure([read, WRITTEN]))
    assert found.parts == (0.25,) and found.rates["disk"].measured == "read"


def test_nodes_read_side_by_side_and_each_reads_what_all_see() -> None:
    events: list[Event] = [WRITTEN, Brought(step=1, tier="shared", bytes=50 * MB, seconds=1.0)]
    apart = times(plan(part(0, "disk", "a"), part(1, "disk", "b", 300 * MB)), measure(events))
    assert apart.total == 3.0
    common = [part(rank, "shared", "a", everywhere=True) for rank in (0, 1)]
    assert times(plan(*common), measure(events)).total == 4.0


def test_records_are_read_and_their_steps_repeated() -> None:
    log = (records(0, "disk", "a"), records(1, "disk", "b"))
    wanted = plan(part(0, "disk", "a"), part(1, "disk", "b"), step=14, log=log)
    found = times(wanted, measure([WRITTEN]))
    assert found.records == (0.2, 0.2) and found.replay is None and found.total is None
    assert found.unmeasured == ("repeating steps",)
    again = times(wanted, measure([WRITTEN, Replayed(rank=0, base=1, steps=10, seconds=5.0)]))
    assert again.replay == 2.0 and again.total == pytest.approx(3.2)


def test_for_a_part_that_is_rebuilt_the_blocks_of_all_others_are_read() -> None:
    members = tuple(
        ParityMember(node=node, parts=(ParityPart(rank=rank, bytes=100 * MB, cut_time=0.0, chunks=()),))
        for rank, node in enumerate("abcd")
    )
    record = ParityRecord(
        format=1, run="a" * 32, generation="g", step=10, world=4, losses=1, member=0, members=members, bytes=1,
        chunk_bytes=1, chunks=(),
    )  # fmt: skip
    wanted = plan(part(1, "parity", "b"), parities=(ParityHolding(node="a", record=record),))
    assert times(wanted, measure([Brought(step=1, tier="parity", bytes=100 * MB, seconds=1.0)])).parts == (3.0,)


def die_at(step: int) -> Callable[[everstep.Run], None]:
    def when(run: everstep.Run) -> None:
        if run.step == step:
            run.wait("sealed")
            os.kill(os.getpid(), signal.SIGKILL)

    return when


def test_a_restart_measures_what_it_reads_and_a_plan_knows_it() -> None:
    with run_directory() as directory:
        assert live(lambda: train_tiny(directory, die_at(3), strategy="snapshot")).killed
        past = everstep.open(directory)
        assert past.times(past.plan()).unmeasured == ("memory",)
        assert live(lambda: train_tiny(directory, die_at(5), strategy="snapshot")).killed
        assert {(e.rank, e.source) for e in told(directory, Fetched)} == {(0, "memory")}
        found = past.times(past.plan())
        assert found.rates["memory"].measured == "read" and found.total is not None and 0 < found.total < 60
