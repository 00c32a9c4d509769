"""One vocabulary of what happened.

Live runs emit these; the command line, the tuner and reports read them. A sink is any callable that takes an event;
`EventLog` is the one that keeps them, a JSON line each, in the run's directory.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from everstep.types import Source

NO_LOG = "there is no log, every step is a base"
_REMEMBERED = 1000
_AGAIN_S = 600.0
_SAID: dict[str, float] = {}  # what people were told of by this process, and when


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=str.lower):
    time: float = msgspec.field(default_factory=time.time)


class Started(Event, frozen=True, kw_only=True):
    rank: int
    world: int
    pid: int
    step: int
    source: str  # memory, disk, or nothing


class Rejected(Event, frozen=True, kw_only=True):
    """A candidate was passed over at recovery."""

    step: int
    source: str
    reason: str


class ArenaMade(Event, frozen=True, kw_only=True):
    rank: int
    slots: int
    slot_bytes: int
    place: str
    buckets: int
    pinned: bool


class RingMade(Event, frozen=True, kw_only=True):
    """Where records lie until the keeper has taken them."""

    rank: int
    slots: int
    record_bytes: int
    place: str
    pinned: bool


class TapMoved(Event, frozen=True, kw_only=True):
    """Gradients are no longer recorded as they are reduced, but in front of the optimizer's step."""

    reason: str


class ChainEnded(Event, frozen=True, kw_only=True):
    """A step could not be recorded: the log goes on from the next base."""

    rank: int
    step: int
    reason: str


class Replayed(Event, frozen=True, kw_only=True):
    """Steps that existed only as records were repeated."""

    rank: int
    base: int
    steps: int
    seconds: float


class ReplicaMade(Event, frozen=True, kw_only=True):
    """The keeper holds an image of a rank's state, and advances it by every record. `exact`: with the very bits."""

    rank: int
    step: int
    slot_bytes: int
    place: str
    exact: bool


class Drift(Event, frozen=True, kw_only=True):
    """A replica was compared with a true base of the same step, from which it goes on."""

    rank: int
    step: int
    differing: int  # elements that have other bits
    largest: float  # absolute difference


class Logged(Event, frozen=True, kw_only=True):
    """The first records of a segment are on disk; from now on every step follows."""

    rank: int
    first: int
    last: int
    bytes: int


class Skipped(Event, frozen=True, kw_only=True):
    """A step was not captured."""

    rank: int
    step: int
    reason: str


class Persisted(Event, frozen=True, kw_only=True):
    step: int
    bytes: int
    seconds: float
    direct: bool


class Protected(Event, frozen=True, kw_only=True):
    """All nodes have copied or encoded a base: the nodes that the scheme covers may be lost."""

    step: int


class Brought(Event, frozen=True, kw_only=True):
    """This node's part of a base is beyond it, and what that took."""

    step: int
    tier: Source
    bytes: int  # that were moved for it
    seconds: float


class Fetched(Event, frozen=True, kw_only=True):
    """What a rank read, checked and passed on of a base at recovery, and what that took."""

    rank: int
    source: Source
    bytes: int
    seconds: float


class Sank(Event, frozen=True, kw_only=True):
    """A base is committed on a deeper tier."""

    step: int
    tier: str


class FlushCancelled(Event, frozen=True, kw_only=True):
    """A base stopped on its way to a deeper tier. Parts of it that are whole stay until a newer one is committed."""

    step: int
    tier: str
    bytes: int  # so far,
    of_bytes: int  # of so many of this node's
    reason: str


class Joined(Event, frozen=True, kw_only=True):
    """This node among the others: who protects it, and what of the wish could not be had."""

    node: str
    nodes: int
    scheme: str
    others: tuple[str, ...]
    warnings: tuple[str, ...]


class Degraded(Event, frozen=True, kw_only=True):
    """Something is not as safe as it was asked to be, and training goes on."""

    what: str
    reason: str
    tier: str = ""  # whose write failed, if it was one


class MetricsServed(Event, frozen=True, kw_only=True):
    """Prometheus may ask here, as long as this keeper lives."""

    address: str


class KeeperStarted(Event, frozen=True, kw_only=True):
    pid: int
    node: str


class KeeperEnded(Event, frozen=True, kw_only=True):
    pid: int
    reason: str


class Scavenged(Event, frozen=True, kw_only=True):
    step: int
    ranks: tuple[int, ...]


class Retired(Event, frozen=True, kw_only=True):
    step: int
    reason: str


class RanksLost(Event, frozen=True, kw_only=True):
    """A rank of a view is gone; the others are told to stop."""

    view: int
    rank: int
    node: str = ""  # that it was on
    how: str  # it was noticed


class Called(Event, frozen=True, kw_only=True):
    """All who were left stood still, and were called to the next view. A world of none: all are to start again."""

    view: int
    policy: str
    world: int
    lost: tuple[int, ...]
    lost_nodes: tuple[str, ...] = ()  # of which nobody is left
    waited_s: float  # from the loss until all stood still
    idle: tuple[int, ...] = ()  # left, but of a replica that is not whole: they stand by from now on
    reason: str  # why it is not what was wished for first


class WentOn(Event, frozen=True, kw_only=True):
    """A rank trains again, without having left its process."""

    view: int
    rank: int
    world: int
    policy: str
    step: int  # that it goes on from,
    left_at: int  # and that it was at
    exact: bool  # as if nothing had happened, bit for bit
    stopped_s: float  # from hearing of the loss until it stood still,
    met_s: float  # until all had met,
    restored_s: float  # and until the state was there
    buckets: int = 0  # of gradients that were averaged without those of the lost,
    samples: int = 0  # and samples that the lost had in them
    lost: str = ""  # who was, and how it was noticed; or why all stopped else
    reason: str = ""  # why it is not what was wished for first


class Stopping(Event, frozen=True, kw_only=True):
    """A signal asked the run to end at a step boundary."""

    rank: int
    signal: str
    step: int


class Halted(Event, frozen=True, kw_only=True):
    """The run ended before its end, because somebody wished so."""

    rank: int
    step: int
    why: str


class Tuned(Event, frozen=True, kw_only=True):
    """A number was chosen anew: the formula, what went into it, and the constraint that decided."""

    what: str
    value: int
    formula: str
    inputs: dict[str, float]
    bound: str
    assumed: tuple[str, ...]


class Chose(Event, frozen=True, kw_only=True):
    """How steps are kept from now on, and why."""

    step: int
    strategy: str
    reason: str
    inputs: dict[str, float]


class Closed(Event, frozen=True, kw_only=True):
    """The program ended the run before its end."""

    rank: int
    step: int


class Finished(Event, frozen=True, kw_only=True):
    rank: int
    step: int


AnyEvent = (
    Started
    | Rejected
    | ArenaMade
    | RingMade
    | ChainEnded
    | TapMoved
    | Logged
    | Replayed
    | ReplicaMade
    | Drift
    | Skipped
    | Persisted
    | Protected
    | Brought
    | Fetched
    | Sank
    | FlushCancelled
    | Joined
    | Degraded
    | MetricsServed
    | KeeperStarted
    | KeeperEnded
    | Scavenged
    | Retired
    | RanksLost
    | Called
    | WentOn
    | Stopping
    | Halted
    | Tuned
    | Chose
    | Closed
    | Finished
)
Sink = Callable[[Event], None]


def say(line: str) -> None:
    """For people, who look at what their program prints."""
    print(f"everstep: {line}", file=sys.stderr, flush=True)


def say_again(what: str, reason: str) -> None:
    """The same of something that may go on for long: now and then."""
    now = time.monotonic()
    if now - _SAID.get(what, -_AGAIN_S) >= _AGAIN_S:
        _SAID[what] = now
        say(f"{what}: {reason}")


class EventLog:
    """Appends events to one file, a line each; the file may vanish or fill up without hurting anyone.

    What could not be written is remembered, and written before the next event that can be.
    """

    def __init__(self, path: Path, *, speaks: bool = False) -> None:
        """`speaks`: of what is not as safe as it was asked to be people hear at once."""
        self.path, self._speaks = path, speaks
        self._lock = threading.Lock()
        self._unwritten: deque[bytes] = deque(maxlen=_REMEMBERED)

    @classmethod
    def of_rank(cls, directory: Path, rank: int, *, speaks: bool = False) -> EventLog:
        return cls(directory / f"events-rank-{rank:05d}.jsonl", speaks=speaks)

    def failures(self) -> int:
        """How many lives ended otherwise than by somebody's wish, if another begins now."""
        try:
            events = list(_events_in(self.path.read_bytes()))
        except OSError:  # there is none yet, or nobody can read it, which must not stop training either
            events = []
        ends = [event for event in events if isinstance(event, Started | Closed | Finished | Halted | Stopping)]
        return sum(isinstance(event, Started) for event in ends) - sum(
            isinstance(before, Started) and not isinstance(event, Started) for before, event in pairwise(ends)
        )

    def __call__(self, event: Event) -> None:
        if self._speaks and isinstance(event, Degraded) and event.what != NO_LOG:  # which not everybody has asked for
            say_again(event.what, event.reason)
        line = msgspec.json.encode(event) + b"\n"
        with self._lock:
            self._unwritten.append(line)
            try:
                descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                try:
                    while self._unwritten:
                        if os.write(descriptor, self._unwritten[0]) < len(self._unwritten[0]):
                            self._unwritten[0] = b"\n" + self._unwritten[0].lstrip()  # torn: once more, on a new line
                            return
                        self._unwritten.popleft()
                finally:
                    os.close(descriptor)
            except OSError:
                return  # a full disk must not stop training; the next event brings this one along


def read_events(directory: Path) -> list[AnyEvent]:
    """All events of a run in the order of their times; lines torn by a crash are left out."""
    return read_events_and_torn(directory)[0]


def read_events_and_torn(directory: Path) -> tuple[list[AnyEvent], int]:
    """The same, and how many lines were left out; of a file that cannot be read, one.

    Of a run that goes on: the line that is being written is none yet.
    """
    found: list[AnyEvent] = []
    lines = 0
    for path in sorted(directory.glob("events-*.jsonl")):
        try:
            data = path.read_bytes()
        except OSError:
            lines += 1
            continue
        lines += data.count(b"\n")
        found += _events_in(data)
    return sorted(found, key=lambda event: event.time), max(0, lines - len(found))


def _events_in(data: bytes) -> Iterator[AnyEvent]:
    decoder = msgspec.json.Decoder(AnyEvent)
    for line in data.splitlines():
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
