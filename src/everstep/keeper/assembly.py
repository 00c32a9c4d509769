"""After a loss: those who are left are told at once, come to a stop, and are called to the next view.

This is what the keeper that has the chair knows: of every node what its keeper last reported, and of the present view
who is in it, who is lost, and how it ended. Reports are whole and may come twice or late. What a worker is to hear
follows from what was reported of it, so whatever got lost on the way is said again.

A view is decided when all who are left stand still, and holds when enough nodes of the view before it have taken note
of it: only then is anybody called. A keeper that takes the chair after another learns from the others what that one had
decided, and goes on from there. Whoever of the view is not heard of in time is lost.

Knows no clock, process or socket.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from msgspec.structs import replace

from everstep.config import Policy
from everstep.events import Called, RanksLost, Sink
from everstep.keeper.lines import Gone, Here, Order
from everstep.keeper.protocol import Bye, Lost, Seat, Sitting, View
from everstep.keeper.views import SPARE, Decision, Standing, decide, is_quorum, next_seats
from everstep.types import Noun

_QUORUM_TIMES = 2  # detection times, until those who may not decide for all end what they have


class Call(Noun, frozen=True, kw_only=True):
    """A view as it was decided. No workers: all are to start again."""

    sitting: Sitting
    workers: tuple[str, ...]  # by rank
    before: tuple[tuple[str, ...], ...]  # groups of nodes; of each so many must take note that they speak for it
    wished: int  # how many ranks there were to be
    address: str
    policy: Policy
    lost: tuple[int, ...]
    idle: tuple[str, ...] = ()  # workers of the view before it that stand by from now on
    reason: str
    ended: str  # why the view before it did

    @property
    def number(self) -> int:
        return self.sitting.view


class Report(Noun, frozen=True, kw_only=True):
    """All that a node's keeper knows. `life`: of the keeper; `number`: grows with every report of that life."""

    node: str
    address: str
    life: str
    number: int
    workers: tuple[Here, ...]
    gone: tuple[Gone, ...]
    call: Call | None = None  # the newest that it has taken note of
    sitting: Sitting | None = None  # the newest that it knows


@dataclass(slots=True)
class _Node:
    report: Report
    heard_at: float


class Assembly:
    def __init__(
        self, node: str, emit: Sink, now: float, sitting: Sitting | None = None, silent: Collection[str] = (), *,
        follows: bool = False,
    ) -> None:  # fmt: skip
        """`sitting`: None where the job has one node. `silent`: nodes of it that are known to be so for long enough.

        `follows`: another has had the chair before.
        """
        self._node, self._emit, self._silent = node, emit, frozenset(silent)
        self._followed_at = now if follows else float("-inf")
        self.version = 0  # grows whenever something may follow from what has changed
        self._nodes: dict[str, _Node] = {}
        self._index: dict[str, tuple[Here, str]] = {}  # worker -> as it was reported, and by which node
        self._looked_at = now
        self._ended_lives: set[str] = set()  # of keepers
        self._policies: tuple[Policy, ...] = ()
        self._detect_s, self._wished, self._unit = 0.0, 0, 1
        self._spares_since: float | None = None  # there are some, and places for them
        self.call: Call | None = None  # by which the present view was called, if that is known
        self._begin(sitting or Sitting(view=-1, seats=(Seat(node=node),), places=()), now)

    def _begin(self, sitting: Sitting, now: float) -> None:
        self.sitting, self._since = sitting, now
        self._members: dict[int, str] = {}  # rank -> worker
        self._missing_since: dict[int, float] = {}
        self._lost: dict[int, str] = {}  # and how it was noticed
        self._finished: set[int] = set()
        self._ended_at: float | None = None
        self._reason = ""
        self._is_agreed = True
        self.version += 1

    @property
    def _world(self) -> int:
        return len(self.sitting.places)

    @property
    def seats(self) -> list[Seat]:
        """Those of the present view, and all others who have reported."""
        reported = {name: Seat(node=name, address=node.report.address) for name, node in self._nodes.items()}
        return list(({seat.node: seat for seat in self.sitting.seats} | reported).values())

    def silent_for(self, node: str, now: float) -> float:
        known = self._nodes.get(node)
        if node == self._node:
            return 0.0
        return now - (known.heard_at if known is not None else self._since)

    # -- what is heard

    def hear(self, report: Report, now: float) -> None:
        known = self._nodes.get(report.node)
        if report.life in self._ended_lives:
            return
        if known is not None and known.report.life != report.life:
            self._ended_lives.add(known.report.life)
        elif known is not None and known.report.number >= report.number:
            return  # another came first
        self._nodes[report.node] = _Node(report, now)
        if known is not None and replace(known.report, number=report.number) == report:
            return
        self.version += 1
        for one in known.report.workers if known is not None else ():
            self._index.pop(one.enrolled.worker, None)
        self._index |= {one.enrolled.worker: (one, report.node) for one in report.workers}
        call, view = report.call, self.sitting.view
        if call is not None and (call.number > view or (call.number == view and self.call is None)):
            self._take(call, now)
        elif report.sitting is not None and report.sitting.view > self.sitting.view:
            self._begin(report.sitting, now)
        for here in report.workers:
            self._meet(here, report.node, now)
        for gone in report.gone:
            if gone.view == self.sitting.view and self._members.get(gone.rank, gone.worker) == gone.worker:
                self._miss(gone, now)
        self._go_on(now)

    def _take(self, call: Call, now: float) -> None:
        """What this keeper or another has decided is the present view, as soon as enough nodes have taken note."""
        self._begin(call.sitting, now)
        self.call, self._wished, self._is_agreed = call, call.wished, not call.workers
        self._members = dict(enumerate(call.workers))

    def _meet(self, here: Here, node: str, now: float) -> None:
        said = here.enrolled
        if said.rank == SPARE:
            return
        self._policies, self._detect_s, self._unit = said.on_loss, said.detect_s, said.unit
        if said.view > self.sitting.view:  # the only node, and it begins; or its keeper does
            self._begin(Sitting(view=said.view, seats=self.sitting.seats, places=(node,) * said.world), now)
        if said.view == self.sitting.view and self._members.get(said.rank, said.worker) == said.worker:
            self._members[said.rank] = said.worker
            self._wished = max(self._wished if said.view else 0, said.world)
            if here.standing is not None and self._ended_at is None:
                self._end({}, now)  # by a keeper before this one
            if here.stuck and self._ended_at is None:
                self._end({}, now, reason=f"rank {said.rank}: {here.stuck}")

    def _miss(self, gone: Gone, now: float) -> None:
        if not gone.how:
            self._finished.add(gone.rank)
        elif gone.rank not in self._lost:
            self._end({gone.rank: gone.how}, now)

    # -- now and then

    def look(self, now: float) -> None:
        slept_s, self._looked_at = now - self._looked_at, now
        for node in self._nodes.values() if slept_s > self._detect_s / 2 else ():
            node.heard_at += slept_s  # whoever slept cannot tell who was silent
        lost = {}
        for rank in range(self._world) if self._members else ():
            if rank in self._lost or rank in self._finished:
                continue
            how, since = self._absence(rank, now)
            if not how:
                self._missing_since.pop(rank, None)
                continue
            since = self._missing_since.setdefault(rank, since)
            if now - since > self._detect_s:
                lost[rank] = how
        if lost:
            self._end(lost, now)
        elif self._ended_at is None and self._may_grow(now):
            self._end({}, now, reason="a spare has come, and ranks are missing")
        self._go_on(now)

    def _absence(self, rank: int, now: float) -> tuple[str, float]:
        """What is wrong with a rank, and since when; nothing, if its worker is there."""
        node, worker = self.sitting.places[rank], self._members.get(rank)
        known = self._nodes.get(node)
        silent_s = self.silent_for(node, now)
        if node in self._silent and known is None:
            return f"its node {node} did not answer for {self._detect_s:g} s", float("-inf")
        if silent_s > self._detect_s:
            return f"its node {node} was not heard of for {self._detect_s:g} s", now - silent_s
        if worker in self._index:
            return "", 0.0
        return "it did not enrol", max(self._since, now if known is not None and worker is not None else self._since)

    def _may_grow(self, now: float) -> bool:
        """For all missing ranks at once; for some of them, if no more spares come."""
        spares, missing = self._spare_units, self._wished - self._world
        if "spare" not in self._policies or missing <= 0 or not spares or not self._is_agreed or self._finished:
            self._spares_since = None
            return False
        self._spares_since = self._spares_since or now
        return spares >= missing or now - self._spares_since > self._detect_s

    @property
    def _spare_units(self) -> int:
        """How many of those who stand by make whole units."""
        count = len(self._spares())
        return count - count % self._unit

    # -- views

    def _end(self, lost: dict[int, str], now: float, reason: str = "") -> None:
        if self._finished and not self._at_work(without=lost):
            self._finished |= lost.keys()  # the work is done, and nobody is left who could miss them
            return
        self._ended_at = now if self._ended_at is None else self._ended_at
        self._lost |= lost
        self.version += 1
        self._reason = reason or "; ".join(self._account(rank, how) for rank, how in sorted(self._lost.items()))
        for rank, how in lost.items():
            self._emit(RanksLost(view=self.sitting.view, rank=rank, node=self.sitting.places[rank], how=how))

    def _at_work(self, without: Collection[int] = ()) -> list[int]:
        """Ranks of the present view that are there and have not finished."""
        ranks = set(range(self._world)) - self._finished - self._lost.keys() - set(without)
        return [rank for rank in sorted(ranks) if self._members.get(rank) in self._index]

    def _account(self, rank: int, how: str) -> str:
        """How a rank was lost; where there are several nodes, with the name of its own."""
        node = self.sitting.places[rank]
        return f"rank {rank}: {how}" if len(self.sitting.seats) == 1 or node in how else f"rank {rank} on {node}: {how}"

    def _spares(self) -> list[Standing]:
        return [
            Standing(worker=one.enrolled.worker, rank=SPARE, address=one.standing.address, node=name)
            for name, node in self._nodes.items()
            for one in node.report.workers
            if one.enrolled.rank == SPARE and one.standing is not None
            and one.enrolled.worker not in self._members.values()
        ]  # fmt: skip

    def _left(self) -> list[Standing] | None:
        """Those who are left of the present view; None until all of them stand still."""
        left = []
        for rank in range(self._world):
            if rank in self._lost or rank in self._finished:
                continue
            here, node = self._index.get(self._members.get(rank, ""), (None, ""))
            if here is None or here.standing is None:
                return None
            worker = here.enrolled.worker
            left.append(Standing(worker=worker, rank=rank, address=here.standing.address, node=node))
        return left

    def _go_on(self, now: float) -> None:
        """Once all who are left stand still, call them to the next view, if those who are here may speak for all."""
        if not self._is_agreed and self.call is not None:
            calls = {name: node.report.call for name, node in self._nodes.items()}
            noted = [name for name, call in calls.items() if call is not None and call.number >= self.sitting.view]
            self._is_agreed = all(is_quorum(nodes, noted) for nodes in self.call.before)
            self.version += self._is_agreed
        left = self._left() if self._ended_at is not None else None
        if self._ended_at is None or not left:
            return
        world = self._world if self._lost else min(self._wished, self._world + self._spare_units)
        policies: tuple[Policy, ...] = ("spare",) if world > self._world else self._policies
        made = decide(world, left, self._spares(), policies, dict(enumerate(self.sitting.places)), self._unit)
        # whoever has finished is not there, and not lost; nor is a place that was empty before
        made = replace(made, lost=tuple(sorted(self._lost)))
        if made.policy != "spare" and "spare" in self._policies and now - self._followed_at < self._detect_s / 2:
            return  # spares may not have been heard of yet by who has just taken the chair
        heard = [node for node in self._nodes if self.silent_for(node, now) <= self._detect_s]
        unheard = next((nodes for nodes in self._groups() if not is_quorum(nodes, heard)), None)
        if unheard is not None:
            if now - self._ended_at <= _QUORUM_TIMES * self._detect_s:
                return
            count = sum(node in heard for node in unheard)
            reason = f"{count} of {len(unheard)} nodes are heard of, which may not go on without the others"
            made = Decision(policy="restart", lost=made.lost, reason=reason)
        self._call(made, now)

    def _groups(self) -> tuple[tuple[str, ...], ...]:
        """Nodes that must agree: those of the present view, and of the one before it until they agree to this one."""
        mine = tuple(seat.node for seat in self.sitting.seats)
        return (mine, *(self.call.before if self.call is not None and not self._is_agreed else ()))

    def _call(self, made: Decision, now: float) -> None:
        before = tuple(seat.node for seat in self.sitting.seats)
        # keepers that take the chair one after the other leave out the numbers that those before may have used
        number = self.sitting.view + 1 + (before.index(self._node) if self._node in before else len(before))
        nodes = next_seats(made.nodes, self._node, before)
        addresses = {node: known.report.address for node, known in self._nodes.items()}
        seats = tuple(Seat(node=node, address=addresses.get(node, "")) for node in nodes)
        left = {*made.nodes, *(self._index[worker][1] for worker in made.idle)}
        lost_nodes = tuple(node for node in before if node not in left) if made.workers else ()
        # whoever was to stand by and has not heard it yet still is
        idle = dict.fromkeys((*made.idle, *(self.call.idle if self.call is not None else ())))
        reason = made.reason or ("" if made.lost else self._reason)
        self._emit(
            Called(
                view=number, policy=made.policy, world=len(made.workers), lost=made.lost, lost_nodes=lost_nodes,
                waited_s=now - (self._ended_at or now), reason=reason,
                idle=tuple(rank for rank, worker in sorted(self._members.items()) if worker in made.idle),
            )
        )  # fmt: skip
        sitting = Sitting(view=number, seats=seats or self.sitting.seats, places=made.nodes)
        call = Call(
            sitting=sitting, workers=made.workers, before=self._groups(), wished=self._wished, address=made.address,
            policy=made.policy, lost=made.lost, reason=reason, ended=self._reason,
            idle=tuple(worker for worker in idle if worker not in made.workers),
        )  # fmt: skip
        self._take(call, now)

    # -- what is to be said

    @property
    def is_ending(self) -> bool:
        """Whether the work of somebody is done, and so that of all."""
        return bool(self._finished)

    @property
    def is_over(self) -> bool:
        """Whether the work is done, and nobody is left who does it."""
        return bool(self._finished) and not self._at_work()

    def orders(self, node: str, job: str) -> dict[str, Order]:
        """What the workers of a node are to hear, as they were last reported."""
        known = self._nodes.get(node)
        ranks = {worker: rank for rank, worker in self._members.items()}
        found = {}
        for here in known.report.workers if known is not None else ():
            order = self._order(here, ranks.get(here.enrolled.worker), job)
            if order is not None:
                found[here.enrolled.worker] = order
        return found

    def _order(self, here: Here, rank: int | None, job: str) -> Order | None:
        said, number = here.enrolled, self.sitting.view
        is_restart = self.call is not None and not self.call.workers
        if said.rank == SPARE and rank is None:
            return Bye(final=True) if self.is_over else None
        is_idle = self.call is not None and said.worker in self.call.idle
        if said.view < number and (is_restart or is_idle or rank is not None):
            assert self.call is not None
            if here.standing is None:
                return Lost(view=said.view, ranks=self.call.lost, reason=self.call.reason)
            if not self._is_agreed:
                return None
            return View(
                job=job, number=number, rank=SPARE if rank is None else rank, world=self._world,
                address=self.call.address, policy=self.call.policy, lost=self.call.lost, reason=self.call.reason,
                ended=self.call.ended,
            )  # fmt: skip
        if said.view < number:
            return Lost(view=said.view, ranks=(said.rank,), reason="it was taken for lost: the others went on")
        if said.view == number and self._ended_at is not None and here.standing is None:
            return Lost(view=number, ranks=tuple(sorted(self._lost)), reason=self._reason)
        return None
