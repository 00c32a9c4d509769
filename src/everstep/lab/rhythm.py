"""When checkpoints of a strategy are taken and where they are whole, while nothing fails.

How often is asked of the code that decides it in a run: the controller, the rules of `tune`, and the rounds of the
keepers, which are run here on a virtual clock until they have settled. What follows is arithmetic: a run that nothing
disturbs is periodic, so a month of it costs no more than a minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, inf

from everstep.cadence import Every
from everstep.keeper.rounds import NONE, Lane, Report, Rounds
from everstep.lab.scenario import Scenario, Strategy, failures_per_s
from everstep.tune.classics import checkfreq, daly, young
from everstep.tune.controller import REBASE, Controller, Measured
from everstep.tune.levels import LevelCosts, schedule
from everstep.tune.machine import FLUSH_S, HOST_S, RING_SLOTS
from everstep.tune.models import UNBOUNDED, WRITING_SHARE, Tuning, steps_per_flush, sticking_out
from everstep.types import Source

_BEATS = 200  # looks at a lane in one of its periods: as fine as its end needs to be known


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Checkpoints to one source: every so many steps, whole so long after the cut."""

    source: Source
    every: int
    write_s: float
    bytes: int  # of one, of all nodes
    stall_s: float = 0.0  # of the loop, for each


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Records of every step: how far behind the newest step each source is, in steps."""

    flush: int  # to the disk, so many at once
    partner_lag: int
    shared_group: int  # to the shared file system, so many at once
    bytes: int  # of one step, of all nodes
    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    step_s: float
    ways: tuple[Way, ...]
    log: Log | None
    has_replica: bool
    decisions: tuple[Tuning, ...]  # that were asked for

    def stall_s(self, first: int, last: int) -> float:
        """Of the loop, in the steps after `first` up to `last`."""
        stalls = sum(way.stall_s * (last // way.every - first // way.every) for way in self.ways)
        return stalls + (0.0 if self.log is None else self.log.stall_s * (last - first))

    def time_s(self, first: int, last: int) -> float:
        return (last - first) * self.step_s + self.stall_s(first, last)

    def step_after(self, first: int, seconds: float) -> int:
        """The newest step that is done so long after `first` was."""
        low, high = first, first + int(seconds / self.step_s) + 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.time_s(first, middle) <= seconds else (low, middle - 1)
        return low

    def whole(self, way: Way, first: int, seconds: float, count: int) -> list[int]:
        """The newest `count` checkpoints of a way that are whole so long after `first`, the oldest first."""
        if seconds < way.write_s:
            return []
        newest = self.step_after(first, seconds - way.write_s) // way.every * way.every
        oldest = max(newest - (count - 1) * way.every, (first // way.every + 1) * way.every)
        return list(range(oldest, newest + 1, way.every))


def rhythm_of(scenario: Scenario, strategy: Strategy, nodes: int) -> Rhythm:
    """Of a strategy while so many nodes take part: the global batch stays, so fewer take longer for it."""
    step_s = scenario.training.step_s * scenario.cluster.nodes / nodes
    if strategy.kind in ("torch-save", "dcp", "checkfreq"):
        return _to_one_place(scenario, strategy, nodes, step_s)
    if strategy.kind == "scr":
        return _multi_level(scenario, strategy, nodes, step_s)
    return _by_everstep(scenario, strategy, nodes, step_s)


def _rule(scenario: Scenario, strategy: Strategy, step_s: float, stall_s: float) -> Tuning:
    rule = young if strategy.rule == "young" else daly
    return rule(step_s, stall_s, scenario.mtbf_s)


def _told(strategy: Strategy, step_s: float) -> int | None:
    if strategy.every_s is not None:
        return max(1, round(strategy.every_s / step_s))
    return strategy.every_steps


def _to_one_place(scenario: Scenario, strategy: Strategy, nodes: int, step_s: float) -> Rhythm:
    """Checkpoints to the shared file system: by one rank, by all, or in the background."""
    machine, state = scenario.machine, scenario.training.state
    by_all_s = state / min(machine.shared, machine.network * nodes)
    copy_s = state / nodes / machine.link
    if strategy.kind == "checkfreq":
        stall_s, write_s = sticking_out(copy_s, step_s), copy_s + by_all_s
        tuning = checkfreq(step_s, copy_s, by_all_s, scenario.training.budget)
    else:
        stall_s = by_all_s if strategy.kind == "dcp" else state / min(machine.serialize, machine.shared)
        write_s, tuning = 0.0, _rule(scenario, strategy, step_s, stall_s)
    told = _told(strategy, step_s)
    if told is not None:
        told = max(told, ceil(write_s / step_s))
    way = Way(source="shared", every=told or tuning.value, write_s=write_s, bytes=state, stall_s=stall_s)
    return Rhythm(
        step_s=step_s, ways=(way,), log=None, has_replica=False, decisions=() if told is not None else (tuning,)
    )


def _multi_level(scenario: Scenario, strategy: Strategy, nodes: int, step_s: float) -> Rhythm:
    """As SCR does it: the loop waits for the copy in memory and its protection, and files are flushed behind it."""
    machine, state = scenario.machine, scenario.training.state
    share, rates = state / nodes, _rates_by_level(scenario)
    copy_s, protect_s = share / machine.link, share / machine.network
    levels = [LevelCosts(name="memory", stall_s=copy_s, write_s=0.0, failures_per_s=rates[0])]
    sources: list[Source] = ["memory"]
    if strategy.protection != "none":
        levels.append(LevelCosts(name=strategy.protection, stall_s=protect_s, write_s=0.0, failures_per_s=rates[1]))
        sources.append(strategy.protection)
    flush_s = state / min(machine.shared, machine.network * nodes)
    levels.append(LevelCosts(name="shared", stall_s=HOST_S, write_s=flush_s, failures_per_s=rates[2]))
    sources.append("shared")
    told, decisions = _told(strategy, step_s), schedule(levels, step_s)
    ways = tuple(
        Way(source=source, every=told if told and source != "shared" else one.value,
            write_s=0.0 if source != "shared" else flush_s, bytes=state, stall_s=level.stall_s)
        for source, level, one in zip(sources, levels, decisions, strict=True)
    )  # fmt: skip
    return Rhythm(step_s=step_s, ways=ways, log=None, has_replica=False, decisions=decisions)


def _rates_by_level(scenario: Scenario) -> tuple[float, float, float]:
    """Failures a second that lose processes, single nodes, and more than protection makes up for."""
    rates = {"process": 0.0, "node": 0.0, "rack": 0.0, "cluster": 0.0}
    for source in scenario.failures:
        rates[source.kind] += failures_per_s(source, scenario)
    return rates["process"], rates["node"] + rates["rack"], max(rates["cluster"], 1e-3 / scenario.mtbf_s)


def _by_everstep(scenario: Scenario, strategy: Strategy, nodes: int, step_s: float) -> Rhythm:
    """Into memory, from there behind the loop to partners or parity, to the disks and to the shared file system."""
    machine, state = scenario.machine, scenario.training.state
    share, told = state / nodes, _told(strategy, step_s) or 1
    base_stall_s = HOST_S + sticking_out(share / machine.link, step_s)
    record_bytes = scenario.training.record
    decisions: list[Tuning] = []
    log, has_log, every = None, False, told
    if strategy.kind in ("log", "replica", "auto"):
        controller = _controller(scenario, strategy, nodes, step_s, told)
        decisions += [controller.interval] if controller.interval is not None else []
        has_log = controller.strategy == "log"
        if has_log:
            every = controller.steps_per_base * (REBASE if strategy.kind == "replica" else 1)
    lanes = _lanes(scenario, strategy, nodes, every, step_s)
    if has_log:
        flush = steps_per_flush(step_s, FLUSH_S, slots=RING_SLOTS, lose_steps=told, lose_s=None)
        decisions.append(flush)
        log = Log(
            flush=flush.value, partner_lag=max(1, ceil(record_bytes / nodes / machine.network / step_s)),
            shared_group=max(1, lanes[-1].every // 10), bytes=record_bytes,
            stall_s=HOST_S + sticking_out(record_bytes / nodes / machine.link, step_s),
        )  # fmt: skip
    memory = Way(source="memory", every=every, write_s=share / machine.link, bytes=state, stall_s=base_stall_s)
    return Rhythm(
        step_s=step_s, ways=(memory, *lanes), log=log, has_replica=strategy.kind == "replica",
        decisions=tuple(decisions),
    )  # fmt: skip


def _controller(scenario: Scenario, strategy: Strategy, nodes: int, step_s: float, told: int) -> Controller:
    machine, training = scenario.machine, scenario.training
    share, record = training.state // nodes, training.record // nodes
    controller = Controller(
        now="snapshot" if strategy.kind == "auto" else "log", may_choose=strategy.kind == "auto",
        capture=Every(steps=told), durable=Every(), budget=training.budget,
    )  # fmt: skip
    controller.decide(
        Measured(
            step_s=step_s, base_stall_s=HOST_S + sticking_out(share / machine.link, step_s),
            base_write_s=share / machine.disk, base_bytes=share,
            record_stall_s=HOST_S + sticking_out(record / machine.link, step_s),
            record_write_s=record / machine.disk, record_bytes=record, replay_s=machine.replay * step_s,
            free_bytes=machine.free_disk,
        )
    )  # fmt: skip
    return controller


def _lanes(scenario: Scenario, strategy: Strategy, nodes: int, every: int, step_s: float) -> list[Way]:
    machine, state = scenario.machine, scenario.training.state
    share = state / nodes
    shared_s = state / min(machine.shared, machine.network * nodes)
    lanes: list[tuple[Source, Every, float]] = [("shared", Every(seconds=strategy.shared_every_s), shared_s)]
    if strategy.kind != "in-memory":
        lanes.insert(0, ("disk", Every(steps=strategy.disk_every), share / machine.disk))
    if strategy.protection != "none":
        lanes.insert(0, (strategy.protection, Every(steps=1), share / machine.network))
    return [
        Way(source=source, every=every * settled(cadence, every * step_s, write_s), write_s=write_s, bytes=state)
        for source, cadence, write_s in lanes
    ]


@cache
def settled(cadence: Every, step_s: float, write_s: float) -> int:
    """How many bases further the next complete one of a lane is, as the rounds of keepers appoint them.

    `step_s`: from base to base. One node speaks for all, because all do the same. It looks at its lane a few hundred
    times in a period at most.
    """
    rounds = Rounds({"all"}, {"lane": cadence}, "", WRITING_SHARE)
    stride = max(1, int(max(write_s, cadence.seconds or 0.0) / step_s / _BEATS))
    step, now, done, order = 0, 0.0, NONE, NONE
    writing, until, completed = NONE, inf, list[int]()
    while len(completed) < 4 and step < UNBOUNDED:
        step, now = step + stride, now + stride * step_s
        if writing == NONE and step >= order > done:
            writing, until = step, now + write_s
        if now >= until:
            done, writing, until = writing, NONE, inf
            completed.append(done)
        lane = Lane(done=done, seconds=write_s)
        order = (
            rounds.hear(Report(node="all", generation="", newest=step, lanes={"lane": lane}), now).lanes["lane"].step
        )
    return completed[-1] - completed[-2] if len(completed) > 1 else UNBOUNDED
