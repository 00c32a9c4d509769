"""Runs that things were done to, made up: what they would have told and noted."""

from __future__ import annotations

from everstep.events import AnyEvent, ArenaMade, Fetched, Persisted, Started
from everstep.lab.injections import Injection
from everstep.lab.injector import Made, Played
from everstep.lab.watching import Done, Reached
from everstep.timeline import Kind


class Told:
    def __init__(self, events: list[AnyEvent], spans: list[Done]) -> None:
        self.events = lambda: events
        self.spans = lambda kind: sorted((one for one in spans if one.kind == kind), key=lambda one: one.end)


def started(time: float, rank: int, step: int, source: str = "memory", pid: int = 0) -> Started:
    return Started(time=time, rank=rank, world=2, pid=pid or 10 + rank, step=step, source=source)


def step(rank: int, pid: int, number: int, end: float, seconds: float = 0.5) -> Done:
    return Done(Kind.STEP, rank, pid, number, end - seconds, end)


def made(act: Injection, time: float, reached: int) -> Made:
    ends = act.do == "kill" and act.target != "keeper"
    return Made(act=act, time=time, reached=Reached(reached, time - 0.05), ends_lives=ends)


def played(events: list[AnyEvent], spans: list[Done], *acts: Made, code: int = 0) -> Played:
    return Played(
        began=0.0, ended=20.0, code=code, why_ended="", made=acts, unmade=(),
        watched=Told(events, spans),  # type: ignore[arg-type]
    )  # fmt: skip


def struck_once(act: Injection, *, at: int, back_to: int, step_s: float = 0.1, restart_s: float = 3.0) -> Played:
    """Two ranks that do 60 steps; 50 ms after step `at` something kills them. Loading takes 200 ms."""
    kill_s = 1.0 + at * step_s + 0.05
    again_s = kill_s + restart_s + 0.2
    events: list[AnyEvent] = []
    spans: list[Done] = []
    for begin_s, first, last, pid in ((1.0, 0, at, 10), (again_s, back_to, 60, 20)):
        for rank in (0, 1):
            events.append(started(begin_s - 0.01, rank, first, pid=pid + rank))
            numbers = range(first + 1, last + 1)
            ends = [begin_s + (number - first) * step_s for number in numbers]
            spans += [step(rank, pid + rank, n, end, step_s) for n, end in zip(numbers, ends, strict=True)]
            spans += [
                Done(Kind.COPY, rank, pid + rank, n, end, end + 0.01) for n, end in zip(numbers, ends, strict=True)
            ]
            events.append(
                ArenaMade(time=begin_s, rank=rank, slots=3, slot_bytes=5 * 10**6, place="", buckets=1, pinned=False)
            )
    events += [Fetched(time=again_s - 0.02, rank=rank, source="memory", bytes=10**6, seconds=0.2) for rank in (0, 1)]
    events.append(Persisted(time=1.5, step=1, bytes=5 * 10**6, seconds=0.005, direct=True))
    return played(sorted(events, key=lambda one: one.time), spans, made(act, kill_s, at))
