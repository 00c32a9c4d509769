"""What a keeper knows, in numbers: counted as it happens, gathered when somebody asks, written as Prometheus reads it.

Counters hear the keeper's own events and spans as they pass. The rest is read, at the moment of the question, from the
control pages of the arenas and from what trainers are told; no lock is taken that a trainer could wait for.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from everstep import __version__
from everstep.config import Policy
from everstep.events import Brought, Called, Degraded, Event, Persisted, RanksLost, Sink
from everstep.keeper.logbook import Logbook
from everstep.keeper.protocol import Durable, Hello
from everstep.keeper.roster import Roster
from everstep.keeper.session import Session
from everstep.tiers import Tiers, gather, parse, tier_name
from everstep.timeline import Kind, Mark

_MOST_CUTS = 4096
_LOOK_S = 0.5  # between two notes of how far training is
_NONE = -1


class Metric(NamedTuple):
    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]  # beside `run` and `node`
    help: str


METRICS = {
    "everstep_run_info": Metric("gauge", ("directory", "version"), "Always 1; where the run lies, and whose it is."),
    "everstep_world_ranks": Metric("gauge", (), "Ranks of the job, on all nodes."),
    "everstep_rank_alive": Metric("gauge", ("rank",), "Whether the trainer of a rank is there."),
    "everstep_step": Metric("gauge", ("rank",), "The newest step of a rank that was kept, or is about to be."),
    "everstep_sealed_step": Metric("gauge", ("rank",), "The newest step of a rank that its death leaves in memory."),
    "everstep_durable_step": Metric("gauge", (), "The newest step on the disks; -1: none."),
    "everstep_protected_step": Metric("gauge", (), "The newest step that other nodes protect; -1: none yet."),
    "everstep_shared_step": Metric("gauge", (), "The newest step on the deepest tier; -1: none yet."),
    "everstep_exposure_steps": Metric("gauge", ("loss",), "Steps that a loss would cost now."),
    "everstep_exposure_seconds": Metric("gauge", ("loss",), "Seconds since the step that a loss would leave was done."),
    "everstep_records_waiting": Metric("gauge", ("rank",), "Records in memory that are not on the disk yet."),
    "everstep_flush_waiting_bytes": Metric("gauge", ("tier",), "Bytes of a base under way that are not there yet."),
    "everstep_silent_nodes": Metric("gauge", (), "Nodes that have not been heard of lately."),
    "everstep_written_bytes_total": Metric("counter", ("tier", "what"), "Bytes that this node wrote to a tier."),
    "everstep_writes_total": Metric("counter", ("tier", "what"), "Bases, or groups of records, that it wrote."),
    "everstep_write_seconds_total": Metric("counter", ("tier", "what"), "Seconds that it wrote."),
    "everstep_flush_failures_total": Metric("counter", ("tier",), "Writes to a tier that failed; each is tried again."),
    "everstep_records_total": Metric("counter", ("rank",), "Records of a rank that were written to the disk."),
    "everstep_lives_total": Metric("counter", (), "Times that trainers began here: starts, restarts and live views."),
    "everstep_ranks_lost_total": Metric("counter", (), "Ranks that live views have lost, as this keeper decided."),
    "everstep_recoveries_total": Metric("counter", ("policy",), "Live views that followed a loss, by what was done."),
    "everstep_degraded_total": Metric("counter", (), "Events that say that something is not as safe as was asked."),
}  # fmt: skip
Sample = tuple[str, dict[str, str], float]


class Tally:
    """Counts what passes between a keeper and those who keep its events and spans."""

    def __init__(self, emit: Sink, mark: Mark) -> None:
        self._emit, self._mark = emit, mark
        self._lock = threading.Lock()  # for an addition, by threads of the keeper
        self._counted: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        key = (name, tuple(labels.items()))
        with self._lock:
            self._counted[key] = self._counted.get(key, 0) + amount

    def emit(self, event: Event) -> None:
        match event:
            case Persisted(bytes=size, seconds=seconds):
                self._wrote("disk", "bases", size, seconds)
            case Brought(tier=tier, bytes=size, seconds=seconds):
                self._wrote(tier, "bases", size, seconds)
            case Degraded(tier=tier):
                self.add("everstep_degraded_total")
                if tier:
                    self.add("everstep_flush_failures_total", tier=tier)
            case RanksLost():
                self.add("everstep_ranks_lost_total")
            case Called(policy=policy):
                self.add("everstep_recoveries_total", policy=policy)
        self._emit(event)

    def mark(self, kind: Kind, step: int, begin: float, end: float, part: int = 0) -> None:
        if kind is Kind.APPEND:
            self._wrote("disk", "records", 0, end - begin)
        self._mark(kind, step, begin, end, part)

    def _wrote(self, tier: str, what: str, size: int, seconds: float, times: int = 1) -> None:
        self.add("everstep_written_bytes_total", size, tier=tier, what=what)
        self.add("everstep_writes_total", times, tier=tier, what=what)
        self.add("everstep_write_seconds_total", seconds, tier=tier, what=what)

    def expect(self, tiers: Tiers) -> None:
        """What may come counts from nothing on: who looks for a rise must have seen the ground."""
        deeper = [tier_name(tier) for tier in tiers.deeper]
        protection = [tier_name(tiers.protection)] if tiers.protection is not None else []
        self._wrote("disk", "records", 0, 0.0, times=0)
        for tier in ("disk", *protection, *deeper):
            self._wrote(tier, "bases", 0, 0.0, times=0)
            self.add("everstep_flush_failures_total", 0, tier=tier)
        for policy in get_args(Policy):
            self.add("everstep_recoveries_total", 0, policy=policy)
        for name in ("everstep_degraded_total", "everstep_ranks_lost_total", "everstep_lives_total"):
            self.add(name, 0)

    def samples(self) -> list[Sample]:
        with self._lock:
            counted = list(self._counted.items())
        return [(name, dict(labels), value) for (name, labels), value in counted]


class Cuts:
    """When steps were done: of the newest as often as somebody looked, of older ones ever more rarely."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._times: list[float] = []

    def begin(self, step: int, when: float) -> None:
        """A life goes on from a step: what was done beyond it is done again."""
        keep = bisect_right(self._steps, step)
        self._steps[keep:], self._times[keep:] = [step], [when]

    def note(self, step: int, when: float) -> None:
        if not self._steps or step <= self._steps[-1]:
            return
        self._steps.append(step)
        self._times.append(when)
        if len(self._steps) > _MOST_CUTS:
            for line in (self._steps, self._times):
                del line[1 : _MOST_CUTS // 2 : 2]

    def time_of(self, step: int) -> float:
        """Of the newest step that is known and not beyond it, so that no loss is told too small."""
        return self._times[max(0, bisect_right(self._steps, step) - 1)]


@dataclass(frozen=True, slots=True)
class _Rank:
    rank: int
    alive: bool
    step: int
    cut_time: float
    sealed: int
    waiting: int  # records
    cuts: dict[int, float]  # of what is sealed


class Metrics:
    def __init__(self, tally: Tally, roster: Roster, logbook: Logbook, durable: Callable[[], Durable]) -> None:
        """`durable`: how far each level is, as trainers are told."""
        self._tally, self._roster, self._logbook, self._durable = tally, roster, logbook, durable
        self._cuts = Cuts()
        self._noted_at = 0.0
        self._hello: Hello | None = None
        self._node, self._tiers = "", Tiers()

    def begin_life(self, hello: Hello, node: str) -> None:
        self._node, self._tiers = node, gather(parse(hello.tiers, "Hello"))
        self._tally.expect(self._tiers)
        self._tally.add("everstep_lives_total")
        self._cuts.begin(hello.resumed_from or 0, hello.began)
        self._hello = hello

    # -- a thread of its own

    def look(self) -> None:
        """Now and then: take note of how far training is."""
        if time.monotonic() - self._noted_at < _LOOK_S:
            return
        self._noted_at = time.monotonic()
        for one in self._ranks():
            self._cuts.note(one.step, one.cut_time)

    def _ranks(self) -> list[_Rank]:
        found = []
        for session in self._roster.all():
            try:
                found.append(_seen(session))
            except ValueError:
                continue  # its arena was closed in this moment: another one follows
        return sorted(found, key=lambda one: one.rank)

    def samples(self) -> Iterator[Sample]:
        """Those of this moment, without the labels that all have."""
        hello = self._hello
        if hello is None:
            return
        yield "everstep_run_info", {"directory": hello.directory, "version": __version__}, 1
        yield "everstep_world_ranks", {}, hello.world
        ranks, durable = self._ranks(), self._durable()
        for one in ranks:
            rank = {"rank": str(one.rank)}
            yield "everstep_rank_alive", rank, one.alive
            yield "everstep_step", rank, one.step
            yield "everstep_sealed_step", rank, one.sealed
            yield "everstep_records_waiting", rank, one.waiting
        yield "everstep_durable_step", {}, durable.step
        if self._tiers.protection is not None and hello.secret:
            yield "everstep_protected_step", {}, durable.protected
        if self._tiers.deeper:
            yield "everstep_shared_step", {}, durable.shared
        yield from self._exposure(hello, ranks, durable)
        left = {flush.tier: flush.of_bytes - flush.bytes for flush in durable.flushes}
        for tier in map(tier_name, self._tiers.deeper):
            yield "everstep_flush_waiting_bytes", {"tier": tier}, max(0, left.get(tier, 0))
        yield "everstep_silent_nodes", {}, len(durable.silent)
        yield from self._counters()

    def _counters(self) -> Iterator[Sample]:
        for name, labels, value in self._tally.samples():
            is_records = name == "everstep_written_bytes_total" and labels["what"] == "records"
            yield name, labels, value + (self._logbook.record_bytes if is_records else 0)
        for rank, count in sorted(self._logbook.records.copy().items()):
            yield "everstep_records_total", {"rank": str(rank)}, count

    def _exposure(self, hello: Hello, ranks: list[_Rank], durable: Durable) -> Iterator[Sample]:
        """By kind of loss, of those that this run is guarded against."""
        if not ranks:
            return
        disk_is_common = len(hello.ranks_here) == hello.world
        left = {
            "process": max(min(one.sealed for one in ranks), durable.step),
            "reboot": max(durable.step, durable.shared),
        }
        if hello.local < hello.world:
            left["node"] = max(durable.protected, durable.shared, durable.step if disk_is_common else _NONE)
        if self._tiers.deeper:
            left["all_nodes"] = durable.shared
        done = max(one.step for one in ranks)
        until = time.time() if any(one.alive for one in ranks) else max(one.cut_time for one in ranks)
        known = {step: when for one in ranks for step, when in one.cuts.items()}
        for loss, step in left.items():
            when = known.get(step) or self._cuts.time_of(step)
            yield "everstep_exposure_steps", {"loss": loss}, max(0, done - max(0, step))
            yield "everstep_exposure_seconds", {"loss": loss}, max(0.0, until - when)

    def text(self) -> str:
        """In the text format of Prometheus, version 0.0.4."""
        found: dict[str, list[str]] = {name: [] for name in METRICS}
        if self._hello is not None:
            everybody = {"run": self._hello.run, "node": self._node}
            for name, labels, value in self.samples():
                found[name].append(f"{name}{{{_labels(everybody | labels)}}} {_number(value)}")
        lines = []
        for name, metric in METRICS.items():
            lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}", *found[name]]
        return "\n".join(lines) + "\n"


def _seen(session: Session) -> _Rank:
    past = session.hello.resumed_from or 0
    arenas = [arena for arena in (session.arena, session.ring) if arena is not None]
    lives = [live for live in (arena.live() for arena in arenas) if live.step > past]
    newest = max(lives, key=lambda live: live.step, default=None)
    cuts = {seal.step: seal.cut_time for arena in arenas for seal in arena.seals().values()}
    ring = session.ring
    return _Rank(
        rank=session.hello.rank, alive=session.alive, step=newest.step if newest is not None else past,
        cut_time=newest.cut_time if newest is not None else session.hello.began, sealed=max(cuts, default=0),
        waiting=0 if ring is None else sum(seal.step > ring.taken() for seal in ring.seals().values()), cuts=cuts,
    )  # fmt: skip


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{_quoted(value)}"' for name, value in labels.items())


def _quoted(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
