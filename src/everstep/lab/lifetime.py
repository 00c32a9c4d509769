"""One strategy through one list of failures, on a virtual clock.

Between two failures a run is arithmetic (`rhythm`). At a failure it asks the code that a real run asks: `decide` of the
keepers for who goes on, the plan for the step and where it comes from, `times` for how long that takes. A failure that
strikes during a recovery begins it again. Every second is useful or has a cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf

from everstep.config import Policy
from everstep.keeper.views import SPARE, Standing, decide
from everstep.lab.failures import Failure
from everstep.lab.holdings import Holdings, Way, begin_life
from everstep.lab.outcome import CAUSES, Outcome
from everstep.lab.rhythm import Rhythm, rhythm_of
from everstep.lab.scenario import Scenario, Strategy

Phases = list[tuple[str, float]]  # cause and seconds, one after the other


def policy_after(world: int, lost: int, spares: int, policies: Sequence[Policy]) -> Policy:
    """How those who are left go on. One stands for all of them: how many they are makes no difference to it."""
    left = [Standing(worker="0", rank=0, address="")] if lost < world else []
    free = [Standing(worker=f"spare{number}", rank=SPARE, address="") for number in range(min(spares, lost))]
    return decide(lost + len(left), left, free, policies).policy


class Lifetime:
    def __init__(self, scenario: Scenario, strategy: Strategy, failures: Sequence[Failure], seed: int) -> None:
        self._scenario, self._strategy, self._seed = scenario, strategy, seed
        self._end, self._full_step_s = scenario.duration_s, scenario.training.step_s
        self._failures, self._at = failures, 0
        self._seats = list(range(scenario.cluster.nodes))
        self._spares, self._backs = scenario.cluster.spares, list[float]()  # when nodes are back, a heap
        self._missing: dict[int, str] = {}  # seats that the present incident has emptied, and how
        self._now, self._step, self._lives = 0.0, 0, 0
        self._begun_s = 0.0  # that the present step has taken so far
        self._useful_s, self._steps_lost, self._struck = 0.0, 0, 0
        self._wasted_s = dict.fromkeys(CAUSES, 0.0)
        self._recoveries, self._restored, self._bytes = Counter[str](), Counter[str](), Counter[str]()
        self._series: list[tuple[float, float]] = [(0.0, 0.0)]
        self._rhythms: dict[int, Rhythm] = {}
        self._members = frozenset[int]()  # those who sit there
        self._holdings = Holdings(scenario, strategy)
        self._begin_life()

    def run(self) -> Outcome:
        while self._now < self._end:
            until = min(self._next_failure, self._next_growth, self._end)
            self._train(until)
            if until >= self._end:
                break
            if self._next_failure <= until:
                self._recover()
            else:
                self._grow()
            self._series.append((self._now, self._useful_s))
        self._wasted_s["lost work"] += self._begun_s
        self._series.append((self._now, self._useful_s))
        cluster = self._scenario.cluster
        return Outcome(
            strategy=self._strategy.name, nodes=cluster.nodes, gpus=cluster.nodes * cluster.gpus_per_node,
            seed=self._seed, elapsed_s=self._end, useful_s=self._useful_s, wasted_s=self._wasted_s, steps=self._step,
            steps_lost=self._steps_lost, failures=self._struck, recoveries=dict(self._recoveries),
            restored_from=dict(self._restored), bytes=dict(self._bytes), series=tuple(self._series),
            decisions=self._rhythm_of(cluster.nodes).decisions,
        )  # fmt: skip

    # -- while nothing fails

    @property
    def _next_failure(self) -> float:
        return self._failures[self._at].time if self._at < len(self._failures) else inf

    @property
    def _next_growth(self) -> float:
        """When an empty seat can be taken."""
        if len(self._seats) == self._scenario.cluster.nodes:
            return inf
        return self._now if self._spares else max(self._now, self._backs[0]) if self._backs else inf

    @property
    def _rhythm(self) -> Rhythm:
        return self._rhythm_of(len(self._seats))

    def _rhythm_of(self, nodes: int) -> Rhythm:
        if nodes not in self._rhythms:
            self._rhythms[nodes] = rhythm_of(self._scenario, self._strategy, nodes)
        return self._rhythms[nodes]

    def _train(self, until: float) -> None:
        rhythm, first = self._rhythm, self._step
        seconds = until - self._now + self._begun_s
        last = rhythm.step_after(first, seconds)
        self._begun_s = seconds - rhythm.time_s(first, last)
        self._useful_s += (last - first) * self._full_step_s
        self._wasted_s["stall"] += rhythm.stall_s(first, last)
        self._wasted_s["fewer nodes"] += (last - first) * (rhythm.step_s - self._full_step_s)
        for way in rhythm.ways:
            whole = rhythm.whole(way, first, seconds, self._strategy.keep)
            if whole:
                self._holdings.add(way.source, whole, until)
            self._bytes[way.source] += (last // way.every - first // way.every) * way.bytes
        if rhythm.log is not None:
            for way in rhythm.ways:
                if way.source in ("disk", "partner", "shared"):
                    self._bytes[way.source] += (last - first) * rhythm.log.bytes
        self._now, self._step = until, last

    def _begin_life(self) -> None:
        self._lives += 1
        life = begin_life(self._scenario, self._strategy, self._seats, number=self._lives, step=self._step)
        self._members = life.protection.members
        ready = {way.source: self._now + way.write_s for way in self._rhythm.ways}
        self._holdings.begin(life, self._now, ready)

    # -- a failure

    def _recover(self) -> None:
        """Until training goes on. What strikes meanwhile begins it again."""
        if not self._strike():
            return
        while True:
            phases, finish = self._course()
            ends = self._now + sum(seconds for _, seconds in phases)
            while self._next_failure < min(ends, self._end) and not self._whom():
                self._at += 1
            if self._next_failure < min(ends, self._end):
                self._spend(phases, self._next_failure)
                self._strike()
                continue
            self._spend(phases, min(ends, self._end))
            if ends <= self._end:
                finish()
            return

    def _strike(self) -> bool:
        """The next failure; whether it meets anybody."""
        failure, seats = self._failures[self._at], self._whom()
        self._at += 1
        if not seats:
            return False
        self._struck += 1
        self._holdings.lose(failure.kind, seats)
        for seat in sorted(seats):
            self._missing[seat] = failure.kind
            if failure.kind in ("node", "rack"):
                repaired = failure.time + self._scenario.cluster.repair_s
                heappush(self._backs, repaired if failure.back_s is None else failure.back_s)
        return True

    def _whom(self) -> frozenset[int]:
        """Of those who are there, whom the next failure meets."""
        return self._members.intersection(self._failures[self._at].seats).difference(self._gone())

    def _gone(self) -> list[int]:
        """Seats whose nodes are gone; the others of an incident only start their processes again."""
        return [seat for seat, kind in self._missing.items() if kind in ("node", "rack")]

    def _course(self) -> tuple[Phases, Callable[[], None]]:
        """What follows the present incident, and what is done when it is over."""
        recovery, policies = self._scenario.recovery, self._strategy.on_loss
        self._take_back()
        policy = policy_after(len(self._seats), len(self._missing), self._spares, policies)
        live = policies[0] != "restart"
        phases: Phases = [("detection", recovery.detect_s if live else recovery.timeout_s)]
        if policy == "forward":
            return [*phases, ("restart", recovery.regroup_s)], lambda: self._go_on(policy, None)
        way = self._holdings.way_home(self._step, self._now, self._rhythm)
        if policy == "restart":
            phases += [("waiting", self._wait_s()), ("restart", recovery.restart_s)]
        else:
            phases.append(("restart", recovery.regroup_s))
        phases += [("load", way.load_s), ("replay", way.replay_s)]
        return phases, lambda: self._go_on(policy, way)

    def _wait_s(self) -> float:
        """Until there are nodes enough to start again: all, or one if those who are left may go on alone."""
        empty = self._gone()
        elastic = {"rollback", "forward"}.intersection(self._strategy.on_loss)
        needed = (1 if len(empty) == len(self._seats) else 0) if elastic else len(empty)
        if needed <= self._spares:
            return 0.0
        come = sorted(self._backs)[: needed - self._spares]
        return come[-1] - self._now if len(come) == needed - self._spares else inf

    def _go_on(self, policy: str, way: Way | None) -> None:
        self._take_back()
        gone = sorted(self._gone())
        if policy == "restart":
            filled, self._missing = gone[: self._spares], {}
            self._spares -= len(filled)
            self._leave(set(gone[len(filled) :]))
        else:
            alone = [seat for seat in self._missing if seat not in gone]  # their nodes start them again
            for _ in alone:
                heappush(self._backs, self._now + self._scenario.recovery.restart_s)
            if policy == "spare":
                self._spares -= len(self._missing)
            else:
                self._leave(set(self._missing))
            self._missing = {}
        if way is not None:
            lost = self._step - way.step
            self._useful_s -= lost * self._full_step_s
            self._wasted_s["lost work"] += lost * self._full_step_s + self._begun_s
            self._steps_lost += lost
            self._step, self._begun_s = way.step, 0.0
            self._restored[way.source] += 1
        self._recoveries[policy] += 1
        self._begin_life()

    def _leave(self, seats: set[int]) -> None:
        self._seats = [seat for seat in self._seats if seat not in seats]

    # -- nodes that come back

    def _take_back(self) -> None:
        while self._backs and self._backs[0] <= self._now:
            heappop(self._backs)
            self._spares += 1

    def _grow(self) -> None:
        """Those who came back take the empty seats, between two steps."""
        self._take_back()
        training, machine = self._scenario.training, self._scenario.machine
        empty = sorted(set(range(self._scenario.cluster.nodes)).difference(self._seats))[: self._spares]
        load_s = training.state / (len(self._seats) + len(empty)) / machine.network
        phases = [("restart", self._scenario.recovery.regroup_s), ("load", load_s)]
        ends = self._now + sum(seconds for _, seconds in phases)
        until = min(ends, self._next_failure, self._end)
        self._spend(phases, until)
        if until < ends:
            return  # it is tried again when that is over
        self._spares -= len(empty)
        self._seats = sorted([*self._seats, *empty])
        self._begin_life()

    def _spend(self, phases: Phases, until: float) -> None:
        """The clock moves on through phases, each charged to its cause."""
        for cause, seconds in phases:
            spent = min(seconds, until - self._now)
            self._wasted_s[cause] += spent
            self._now += spent
        self._now = until
