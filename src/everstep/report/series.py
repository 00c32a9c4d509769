"""What a story says over time: how long steps took, how many would have been lost, and what lay where. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import nan

from everstep.events import (
    ArenaMade,
    Brought,
    Called,
    ChainEnded,
    Closed,
    Degraded,
    Event,
    Finished,
    Halted,
    Joined,
    KeeperStarted,
    Persisted,
    Protected,
    RanksLost,
    Rejected,
    Replayed,
    Retired,
    RingMade,
    Sank,
    Scavenged,
    Skipped,
    Started,
    Stopping,
    WentOn,
)
from everstep.report.story import Story
from everstep.timeline import Kind, Track, device_and_percent

INCIDENTS = (
    Started, RanksLost, Called, WentOn, Rejected, Replayed, Degraded, Skipped, ChainEnded, Scavenged, Stopping, Halted,
    Closed, Finished, KeeperStarted, Joined,
)  # fmt: skip
Line = list[tuple[float, float]]  # time, and the value from there on
_UNASKED_S = 2.0  # between two answers of a device: nobody asked it


@dataclass(frozen=True, slots=True)
class Steps:
    """Of one rank."""

    name: str
    ends: list[float]  # when each was over
    steps: list[int]
    seconds: list[float]
    captured: list[bool]  # whether a base was copied while it was computed
    spent: list[float]  # seconds of it that the training thread gave to keeping: cut, gate, record

    def took(self, *, captured: bool) -> list[float]:
        return [s for s, was in zip(self.seconds[1:], self.captured[1:], strict=True) if was == captured]

    @property
    def share(self) -> float | None:
        """Of the time that went into keeping."""
        return sum(self.spent[1:]) / sum(self.seconds[1:]) if sum(self.seconds[1:]) else None


def steps_of(track: Track) -> Steps:
    """The first step of a life is told, too; it takes longer, and medians leave out the very first."""
    copies = sorted((span.begin, span.end) for span in track.spans if span.kind == Kind.COPY)
    begins = [begin for begin, _ in copies]
    paid = sorted((s.begin, s.seconds) for s in track.spans if s.kind in (Kind.CUT, Kind.GATE, Kind.RECORD))
    found = Steps(track.name, [], [], [], [], [])
    at = 0
    for span in (span for span in track.spans if span.kind == Kind.STEP):
        before = bisect_right(begins, span.end)
        spent = 0.0
        while at < len(paid) and paid[at][0] < span.end:
            spent += paid[at][1] if paid[at][0] >= span.begin - 1e-4 else 0.0
            at += 1
        found.ends.append(span.end)
        found.steps.append(span.step)
        found.seconds.append(span.seconds)
        found.captured.append(before > 0 and copies[before - 1][1] > span.begin)
        found.spent.append(spent)
    return found


@dataclass(slots=True)
class _Sealing:
    """How far ranks are, and what of it survives what."""

    done: dict[str, int] = field(default_factory=dict)
    sealed: dict[str, int] = field(default_factory=dict)
    logged: dict[int, int] = field(default_factory=dict)
    durable: int | None = None
    protected: int | None = None
    shared: int | None = None

    def lost(self) -> Iterator[tuple[str, int]]:
        done = max(self.done.values(), default=0)
        # rank by rank: what a killed one had marked last is not known of its steps either
        behind = max((step - self.sealed.get(name, 0) for name, step in self.done.items()), default=0)
        durable = max(self.durable or 0, min(self.logged.values(), default=0))
        yield "the processes die", behind
        yield "the machine reboots", done - min(done, durable)
        if self.protected is not None:
            yield "a node is lost", done - min(done, self.protected)
        if self.shared is not None:
            yield "all nodes are lost", done - min(done, self.shared)


def exposure(story: Story) -> dict[str, Line]:
    """How many steps each kind of loss would have cost, from each moment on."""
    moments: list[tuple[float, str, str, int]] = []
    for track in story.tracks:
        recorded = {span.step for span in track.spans if span.kind == Kind.RECORD}
        for span in track.spans:
            if span.kind == Kind.STEP:
                moments.append((span.end, "done", track.name, span.step))
            if span.kind in (Kind.COPY, Kind.DRAIN) or (span.kind == Kind.CUT and span.step in recorded):
                moments.append((span.end, "sealed", track.name, span.step))
            if span.kind == Kind.APPEND:
                moments.append((span.end, "logged", str(span.part), span.step))
    for event in story.events:
        match event:
            case Started(rank=rank, step=step):
                moments.append((event.time, "started", f"rank {rank}", step))
            case Persisted(step=step):
                moments.append((event.time, "durable", "", step))
            case Protected(step=step):
                moments.append((event.time, "protected", "", step))
            case Sank(step=step):
                moments.append((event.time, "shared", "", step))
    lines: dict[str, Line] = defaultdict(list)
    state = _Sealing()
    for when, what, name, step in sorted(moments):
        _move(state, what, name, step)
        for loss, steps in state.lost():
            line = lines[loss]
            if not line or line[-1][1] != steps:
                line.append((when, max(0, steps)))
    return dict(lines)


def _move(state: _Sealing, what: str, name: str, step: int) -> None:
    match what:
        case "started":
            state.done[name] = state.sealed[name] = step
        case "done":
            state.done[name] = step
        case "sealed":
            state.sealed[name] = step
        case "logged":
            state.logged[int(name)] = step
        case "durable":
            state.durable = step
        case "protected":
            state.protected = step
        case "shared":
            state.shared = step


def occupancy(story: Story) -> dict[str, Line]:
    """Bytes on each tier, as the events tell: arenas and rings in memory, bases on disks and deeper; not the log."""
    memory: dict[tuple[str, int], int] = {}
    held: dict[str, dict[int, int]] = defaultdict(dict)
    lines: dict[str, Line] = defaultdict(list)
    sizes: dict[int, int] = {}
    for event in story.events:
        match event:
            case (
                ArenaMade(rank=rank, slots=slots, slot_bytes=size) | RingMade(rank=rank, slots=slots, record_bytes=size)
            ):
                memory[type(event).__name__, rank] = slots * size
                lines["memory"].append((event.time, sum(memory.values())))
            case Persisted(step=step, bytes=size):
                held["disk"][step] = sizes[step] = size
                lines["disk (bases)"].append((event.time, sum(held["disk"].values())))
            case Brought(step=step, tier=tier, bytes=size):
                held[tier][step] = size
                stays = held[tier] if tier in ("shared", "objects") else {step: size}
                lines[tier].append((event.time, sum(stays.values())))
            case Retired(step=step, reason=reason):
                names = [tier for tier in ("shared", "objects") if reason.startswith("newer checkpoints are on ")]
                for name in names or ["disk"]:
                    if held[name].pop(step, None) is not None:
                        title = "disk (bases)" if name == "disk" else name
                        lines[title].append((event.time, sum(held[name].values())))
    return dict(lines)


def utilisation(story: Story) -> dict[str, Line]:
    """How busy each accelerator was, in per cent; not a number where nobody asked."""
    lines: dict[tuple[int, str], Line] = defaultdict(list)
    for track in story.devices:
        for span in track.spans:
            device, percent = device_and_percent(span)
            line = lines[device, track.name.removeprefix("devices ")]
            if line and span.begin - line[-1][0] > _UNASKED_S:
                line.append((line[-1][0], nan))
            line += [(span.begin, percent), (span.end, percent)]
    return {f"device {device} {node}": line for (device, node), line in sorted(lines.items())}


def incidents(story: Story) -> list[tuple[float, str, str]]:
    """What went wrong and how it went on: when, what, and in words."""
    return [
        (event.time, type(event).__name__, in_words(event)) for event in story.events if isinstance(event, INCIDENTS)
    ]


def in_words(event: Event) -> str:
    """All that an event tells, without its name and its time."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__ if name != "time"}
    return ", ".join(f"{name} {_short(value)}" for name, value in fields.items() if value not in ("", ()))


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value)
