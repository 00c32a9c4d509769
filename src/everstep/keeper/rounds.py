"""Which step all nodes write next, to each deeper place: what one keeper decides for all, from what they tell it.

A base is worth something beyond its node only if all nodes have theirs of the same step. So one node, the first of
the roster, appoints steps: a step a little ahead of the newest, so that every node can hold its slots when it comes. A
round is over when all nodes have done their part; then the step is complete, and the next one may be appointed.

A lane is one such place: the disks, the partners or parity, a shared file system, an object store. Values that are too
large for every record have a lane of their own, for steps between bases. Every step has some and memory keeps few, so
a node takes exactly the step that was appointed, which nobody may have passed before all have heard of it.

Pure: it touches no clock, file or socket. Reports may come late, twice or never: a step is complete only if every node
has said so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import ceil

import msgspec

from everstep.cadence import Every
from everstep.types import Noun

STILL_S = 0.06  # a newest base that stays so for this long will be there a moment longer
SILENT_S = 5.0  # after which a node that tells nothing is named
AHEAD = 2  # steps: as far as one rank can be before another, and one to say so, where steps are shorter than that
NONE = -1
VALUES = "values"  # the lane of values on disks; see also values_of
_LEAD_S = 0.5  # until all have heard of a step whose values they are to save,
_LONGEST_LEAD_S = 8.0  # or longer, if it was missed before
_SHORTEST_S = 0.0005  # that a step is taken to last


class Lane(Noun, frozen=True, kw_only=True):
    """Where one node stands in a lane."""

    done: int = NONE  # the newest step of which it has done its part
    missed: int = NONE  # the newest appointed step that it cannot do any more
    reach: int = NONE  # the newest step that records lead to there, from the base that is complete
    seconds: float = 0.0  # what its last part took
    cancels: int = 0  # how often somebody there wanted what is under way to stop
    apart: int = 0  # of values: how many steps are to lie between two; 0: it is not known yet
    there: tuple[int, ...] = ()  # of disks: the steps of which it has its part


class Report(Noun, frozen=True, kw_only=True):
    """What a node tells."""

    node: str
    generation: str
    newest: int  # the newest step of which it has a base,
    newest_values: int = NONE  # and of which it has values
    is_alive: bool = True  # whether anybody trains there
    wanted: dict[str, int] = msgspec.field(default_factory=dict)  # lane -> a step that somebody there waits for,
    wanted_bases: dict[str, int] = msgspec.field(default_factory=dict)  # or for its base
    lanes: dict[str, Lane] = msgspec.field(default_factory=dict)


class Order(Noun, frozen=True, kw_only=True):
    """What all are told of a lane."""

    step: int = NONE  # do your part of the first base at or after this; of values, of this
    complete: int = NONE  # of this base all have done their parts,
    reach: int = NONE  # and records lead all of them to this step
    missed: int = NONE  # the newest appointed step that some node could not bring there
    everywhere: tuple[int, ...] = ()  # of disks: the steps of which all nodes have their parts


class Orders(Noun, frozen=True, kw_only=True):
    generation: str = ""
    lanes: dict[str, Order] = msgspec.field(default_factory=dict)
    silent: tuple[str, ...] = ()  # nodes that have not been heard of lately, or not at all


@dataclass(slots=True)
class _State:
    step: int = NONE
    complete: int = NONE
    cancelled: int = NONE  # the newest step that was called off
    ended_at: float | None = None  # when the last of both was
    lead_s: float = _LEAD_S
    lanes: dict[str, Lane] = field(default_factory=dict)  # by node
    everywhere: tuple[int, ...] = ()  # of those who were heard


@dataclass(slots=True)
class _Progress:
    """How far training is, by the newest bases or values that nodes have."""

    newest: dict[str, int] = field(default_factory=dict)  # by node
    changed_at: float = 0.0  # when one of them last did,
    rose_at: float = 0.0  # when the newest of all did,
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=8))  # and what a step took, by that

    def hear(self, node: str, newest: int, now: float) -> None:
        if self.newest.get(node) == newest:
            return
        rise = newest - max(self.newest.values(), default=newest)
        if rise > 0:
            self.steps_s.append((now - self.rose_at) / rise)
            self.rose_at = now
        self.newest[node], self.changed_at = newest, now

    @property
    def of_all(self) -> int:
        return min(self.newest.values(), default=NONE)

    @property
    def of_any(self) -> int:
        return max(self.newest.values(), default=NONE)

    def is_still(self, now: float) -> bool:
        return len(set(self.newest.values())) == 1 and now - self.changed_at >= STILL_S


class Rounds:
    """`share`: a lane without a cadence of its own takes at most this share of a node's time."""

    def __init__(self, nodes: Collection[str], cadences: Mapping[str, Every], generation: str, share: float) -> None:
        self._nodes, self._cadences, self._generation, self._share = set(nodes), dict(cadences), generation, share
        self._bases, self._values = _Progress(), _Progress()
        self._heard_at: dict[str, float] = {}
        self._wanted: dict[str, dict[str, int]] = {}
        self._wanted_bases: dict[str, dict[str, int]] = {}
        self._alive: dict[str, bool] = {}
        self._states = {lane: _State() for lane in cadences}
        self._told: dict[str, dict[str, int]] = {}  # node -> lane -> the complete step that it knows of

    @property
    def has_told_all(self) -> bool:
        """Whether every node knows what is complete."""
        known = {name: state.complete for name, state in self._states.items()}
        return all(self._told.get(node) == known for node in self._nodes)

    def hear(self, report: Report, now: float) -> Orders:
        """Take in what a node tells, and say what is to be done."""
        is_ours = report.generation == self._generation and report.node in self._nodes
        if is_ours:
            self._heard_at[report.node] = now
            self._bases.hear(report.node, report.newest, now)
            self._values.hear(report.node, report.newest_values, now)
            self._wanted[report.node], self._wanted_bases[report.node] = report.wanted, report.wanted_bases
            self._alive[report.node] = report.is_alive
            for name, lane in report.lanes.items():
                if name in self._states:
                    self._take_in(name, report.node, lane, now)
        for name, state in self._states.items():
            self._move(name, state, now)
        if is_ours:
            self._told[report.node] = {name: state.complete for name, state in self._states.items()}
        return self._orders(now)

    def _progress(self, name: str) -> _Progress:
        if _follows_disks(name):
            return _Progress(newest=dict.fromkeys(self._nodes, self._states[VALUES].complete))
        return self._values if name == VALUES else self._bases

    def _take_in(self, name: str, node: str, lane: Lane, now: float) -> None:
        state = self._states[name]
        is_new, before = node not in state.lanes, state.lanes.get(node, Lane())
        state.lanes[node] = lane
        if is_new or lane.there != before.there:
            everywhere = set.intersection(*(set(one.there) for one in state.lanes.values()))
            state.everywhere = tuple(sorted(everywhere))
        is_under_way = state.complete < state.step <= self._progress(name).of_any
        if lane.cancels > before.cancels and is_under_way:
            state.cancelled, state.step, state.ended_at = state.step, state.complete, now

    def _move(self, name: str, state: _State, now: float) -> None:
        progress, lanes = self._progress(name), state.lanes.values()
        has_heard_all = len(state.lanes) == len(progress.newest) == len(self._nodes)
        done = {lane.done for lane in lanes}
        if has_heard_all and len(done) == 1 and min(done) > state.complete and min(done) >= state.step:
            state.complete, state.ended_at = min(done), now
        is_lost = any(lane.missed >= state.step for lane in lanes) or (has_heard_all and min(done) >= state.step)
        is_in_vain = not any(self._alive.values()) and state.step > progress.of_all
        is_open = state.step > state.complete
        if is_open and not (is_lost or is_in_vain or self._is_waited_before(name, state.step)):
            return  # under way
        if has_heard_all and self._is_due(name, state, now):
            if is_open and is_lost:
                state.lead_s = min(2 * state.lead_s, _LONGEST_LEAD_S)
            state.step = self._next(name, state, now)

    def _waiting(self, name: str) -> int:
        """The newest step that somebody waits for."""
        return _newest(self._wanted, name)

    def _is_waited_before(self, name: str, step: int) -> bool:
        """Whether training stands still at an earlier step, until that one is safe."""
        newest = self._progress(name).of_any
        return newest < step and NONE < newest <= self._waiting(name)

    def _is_due(self, name: str, state: _State, now: float) -> bool:
        every = self._cadences[name]
        if _follows_disks(name) and self._progress(name).of_all <= state.complete:
            return False
        if not any(self._alive.values()):
            return self._progress(name).of_all > state.complete
        if name == VALUES:
            return self._are_values_due(state)
        if self._waiting(name) > self._reach(state) or _newest(self._wanted_bases, name) > state.complete:
            return True
        if state.ended_at is None or every.steps is not None:
            return True
        if every.seconds is not None:
            return now - state.ended_at >= every.seconds
        took = max((lane.seconds for lane in state.lanes.values()), default=0.0)
        return now - state.ended_at >= took / self._share

    def _are_values_due(self, state: _State) -> bool:
        """Enough steps have come since the last at which all could stop, be it a base; or somebody waits for one."""
        last = max(state.complete, self._states["disk"].complete if "disk" in self._states else NONE)
        if self._values.of_all <= last:
            return False  # not all have any that are newer
        apart = [lane.apart for lane in state.lanes.values()]
        return self._waiting(VALUES) > last or (min(apart) > 0 and self._values.of_any - last >= max(apart))

    def _next(self, name: str, state: _State, now: float) -> int:
        """The next step that no node can have passed yet; or the newest base, if training waits or stays there."""
        progress = self._progress(name)
        if _follows_disks(name) or not any(self._alive.values()):
            return progress.of_all  # all have it: nobody was more than a step ahead
        newest, steps = progress.of_any, self._cadences[name].steps or 1
        if self._waiting(name) >= newest:
            return newest if newest > state.complete else state.step  # from that one on records lead, or nothing does
        last = max(0, state.complete, state.cancelled)
        if progress.is_still(now) and newest // steps > last // steps and newest > max(last, state.step):
            return newest
        ahead = 1 if progress.steps_s and progress.steps_s[-1] >= STILL_S else AHEAD
        if name == VALUES:
            ahead = max(ahead, ceil(state.lead_s / max(min(progress.steps_s, default=STILL_S), _SHORTEST_S)))
        return -(-(newest + ahead) // steps) * steps

    def _reach(self, state: _State) -> int:
        if len(state.lanes) < len(self._nodes):
            return state.complete
        return max(state.complete, min(lane.reach for lane in state.lanes.values()))

    def _orders(self, now: float) -> Orders:
        heard = {node for node, at in self._heard_at.items() if now - at < SILENT_S}
        return Orders(
            generation=self._generation, silent=tuple(sorted(self._nodes - heard)),
            lanes={
                name: Order(
                    step=state.step, complete=state.complete, reach=self._reach(state),
                    missed=max((lane.missed for lane in state.lanes.values()), default=NONE),
                    everywhere=state.everywhere,
                )
                for name, state in self._states.items()
            },
        )  # fmt: skip


def values_of(lane: str) -> str:
    """The lane in which values that all disks have are brought to a deeper place."""
    return f"{lane} {VALUES}"


def _follows_disks(name: str) -> bool:
    return name != VALUES and name.endswith(VALUES)


def _newest(wanted: Mapping[str, Mapping[str, int]], lane: str) -> int:
    return max((one.get(lane, NONE) for one in wanted.values()), default=NONE)
