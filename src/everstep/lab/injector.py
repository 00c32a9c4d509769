"""A scenario played on real processes: the command is started, followed, and things are done to it when they are due.

An act is made when its moment has come and its target is there: a rank that has just been killed cannot be killed again
before it is back. What was never made is said so. Whatever was stopped or limited here is let go before this ends.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from everstep.errors import BadConfig, EverstepError
from everstep.lab.connections import Connections
from everstep.lab.damage import find_files, flip
from everstep.lab.failures import Failure, draw
from everstep.lab.injections import ANY, Inject, Injection, Place
from everstep.lab.processes import Tree
from everstep.lab.scenario import Scenario
from everstep.lab.watching import Member, Reached, Watched
from everstep.signals import heard_by

_INTERRUPTED = "interrupted"
_TICK_S = 0.005
_PERIOD_S = 0.1  # of a slow process: it runs for a share of it
_GRACE_S = 30.0  # for a command that is asked to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """An act that was made."""

    act: Injection  # with whom it was about
    time: float
    reached: Reached | None  # by all ranks, when it was made
    ends_lives: bool  # whether ranks died of it
    met: str = ""  # what there was to be done something to


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What was done to a command, and how it ended."""

    began: float
    ended: float
    code: int | None  # of the command; None: it was ended from here
    why_ended: str  # from here, if it was
    made: tuple[Made, ...]
    unmade: tuple[tuple[Injection, str], ...]  # and why
    watched: Watched

    @property
    def is_interrupted(self) -> bool:
        return self.why_ended == _INTERRUPTED


@dataclass(slots=True)
class _Lasting:
    """Something that goes on for a while."""

    end: Callable[[], None]
    until: float
    tick: Callable[[float], None] = field(default=lambda now: None)


class Injector:
    def __init__(
        self, words: Sequence[str], inject: Inject, scenario: Scenario | None, directories: Sequence[Path], *,
        to_stderr: bool = False,
    ) -> None:  # fmt: skip
        self._inject, self._scenario = inject, scenario
        self._random = random.Random(inject.seed)
        self._waiting = list(inject.acts)
        self._made: list[Made] = []
        self._failed: list[tuple[Injection, str]] = []
        self._lasting: list[_Lasting] = []
        self._why_not: dict[int, str] = {}  # why an act that is due has not been made yet
        self._newest: Reached | None = None  # that is known of
        self._has_drawn = inject.speed is None
        self._is_interrupted = False
        self._began = time.time()
        self._tree = Tree(words, to_stderr=to_stderr)
        self._watched = Watched(directories, self._tree, self._began)

    def play(self) -> Played:
        """Until the command ends, nothing moves for too long, or somebody interrupts: then all of it is ended."""
        code, why = None, ""
        with heard_by(self._hear):
            try:
                why = self._follow()
            finally:
                for one in self._lasting:
                    one.end()
                code = self._tree.code
                if code is None:
                    self._tree.end(_GRACE_S)
        unmade = [(act, self._why_not.get(id(act), "it never came to that")) for act in self._waiting]
        return Played(
            began=self._began, ended=time.time(), code=code, made=tuple(self._made),
            why_ended=_INTERRUPTED if self._is_interrupted else why,
            unmade=tuple(self._failed + [one for one in unmade if not one[0].is_drawn]), watched=self._watched,
        )  # fmt: skip

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._is_interrupted = True  # what is being done is done first; whoever asks once more waits for the end, too

    def _follow(self) -> str:
        """Why the command is to be ended; empty if it ended by itself, or somebody interrupted."""
        seen, moved_at = None, time.monotonic()
        while self._tree.code is None and not self._is_interrupted:
            self._watched.look()
            reached = self._watched.reached()
            self._newest = reached or self._newest
            if reached != seen:
                seen, moved_at = reached, time.monotonic()
            if time.monotonic() - moved_at > self._inject.patience_s:
                return f"no step was finished for {self._inject.patience_s:g} s"
            self._draw()
            for act in [one for one in self._waiting if self._is_due(one, reached)]:
                self._make(act)
            self._go_on()
            time.sleep(_TICK_S)
        return ""

    # -- when

    def _draw(self) -> None:
        """The failures of the scenario, once it is known which nodes there are."""
        if self._has_drawn or self._watched.reached() is None:
            return
        assert self._scenario is not None and self._inject.speed is not None
        self._has_drawn = True
        nodes = sorted({member.node for member in self._watched.ranks.values()})
        if len(nodes) != self._scenario.cluster.nodes:
            raise BadConfig(
                f"{self._scenario.file}: cluster.nodes = {self._scenario.cluster.nodes}, and the command runs on "
                f"{len(nodes)}: {', '.join(nodes)}"
            )
        for failure in draw(self._scenario, self._inject.seed):
            for seat in failure.seats:
                act = self._drawn(failure, nodes[seat])
                self._waiting.append(replace(act, after_s=failure.time / self._inject.speed, is_drawn=True))

    def _drawn(self, failure: Failure, node: str) -> Injection:
        """A process is one of the node's ranks. A node takes all that it has along, and a cluster its memory."""
        if failure.kind == "process":
            ranks = [rank for rank, member in self._watched.ranks.items() if member.node == node]
            return Injection(do="kill", target="rank", who=str(self._random.choice(ranks)))
        lost: tuple[Place, ...] = ("memory",) if failure.kind == "cluster" else ("memory", "disk")
        return Injection(do="kill", target="node", who=node, wipe=lost)

    def _is_due(self, act: Injection, reached: Reached | None) -> bool:
        if act.after_s is not None:
            return time.time() >= self._began + act.after_s
        if reached is None or act.step is None or reached.step < act.step:
            return False
        return reached.step > act.step or time.time() >= reached.time + act.into_s

    # -- what

    def _make(self, act: Injection) -> None:
        whole = self._aim(act)
        if whole is None:
            return
        self._waiting.remove(act)
        try:
            self._made.append(self._do(whole))
        except (EverstepError, OSError) as error:
            self._failed.append((whole, str(error)))

    def _aim(self, act: Injection) -> Injection | None:
        """The act with whom it is about; None if nobody of that kind is there now."""
        if act.do == "flip" and not self._files(act):
            self._why_not[id(act)] = f"there was no {act.file} of {act.target} {act.who} when it was due"
            return None
        there = {
            "rank": [str(rank) for rank in self._watched.ranks], "keeper": list(self._watched.keepers),
            "node": sorted({member.node for member in self._watched.ranks.values()}),
        }[act.target]  # fmt: skip
        if act.do == "fill":
            there = [node for node in there if node in self._watched.keepers]
        if not there or act.who not in (ANY, *there):
            named = f"there were {', '.join(there)}" if there else "there was none"
            self._why_not[id(act)] = f"{act.target} {act.who} was not there when it was due; {named}"
            return None
        return replace(act, who=self._random.choice(there)) if act.who == ANY else act

    def _pids(self, act: Injection) -> set[int]:
        watched = self._watched
        if act.target == "rank":
            return {watched.ranks[int(act.who)].pid}
        if act.target == "keeper":
            return {watched.keepers[act.who].pid}
        members: list[Member] = [*watched.ranks.values(), *watched.keepers.values()]
        return self._tree.with_descendants([member.pid for member in members if member.node == act.who])

    def _do(self, act: Injection) -> Made:
        self._watched.look(now=True)
        pids, ranks = self._pids(act), dict(self._watched.ranks)
        folders = self._watched.folders(act.who, act.wipe) if act.wipe else []
        now, met = time.time(), ""
        if act.do == "kill":
            now = self._tree.kill(pids)
        elif act.do == "flip":
            flip(self._files(act), act.bits, self._random)
        elif act.do != "wipe":
            met = self._begin(act, pids)
            now = time.time()  # since then it has not moved
        self._watched.wipe(folders)
        self._newest = self._watched.reached(ranks) or self._newest  # by now: the dead had gone on meanwhile
        self._watched.look(now=True)
        ends_lives = act.do == "kill" and act.target != "keeper"
        return Made(act=act, time=now, reached=self._newest, ends_lives=ends_lives, met=met)

    def _files(self, act: Injection) -> list[Path]:
        """Those of the kind that an act is about, of the newest step that has any."""
        found: list[Path] = []
        for rank, member in self._watched.ranks.items():
            if act.who in (ANY, str(rank) if act.target == "rank" else member.node):
                memory = self._watched.memory_of(member.node)
                found += find_files(act.file, rank, member.directory, memory)
        return found

    # -- for how long

    def _begin(self, act: Injection, pids: set[int]) -> str:
        """What goes on for a while. What was met, if that is worth a word."""
        if act.do == "cut":
            return self._cut(act, Connections(pids, self._tree))
        if act.do == "fill":
            keepers = {self._watched.keepers[act.who].pid}
            self._tree.limit_files(keepers, 0)
            self._lasting.append(_Lasting(lambda: self._tree.limit_files(keepers, None), _until(act)))
            return ""
        self._tree.signal(pids, signal.SIGSTOP)
        lasting = _Lasting(lambda: self._tree.signal(pids, signal.SIGCONT), _until(act))
        if act.do == "slow":
            lasting.tick = _Slow(self._tree, pids, act.share).tick
        self._lasting.append(lasting)
        return ""

    def _cut(self, act: Injection, connections: Connections) -> str:
        try:
            count = connections.end() if act.for_s is None else connections.silence()
            if not count:
                raise EverstepError(f"{act.target} {act.who} has no connection to anybody else")
        except EverstepError:
            connections.let_go()
            raise
        if act.for_s is not None:
            self._lasting.append(_Lasting(connections.let_go, _until(act), lambda now: connections.look_again()))
        return f"{count} connection{'s' * (count > 1)}"

    def _go_on(self) -> None:
        now = time.time()
        for one in list(self._lasting):
            if now >= one.until:
                one.end()
                self._lasting.remove(one)
            else:
                one.tick(now)


def _until(act: Injection) -> float:
    return float("inf") if act.for_s is None else time.time() + act.for_s


class _Slow:
    """Stopped and let go again, many times a second."""

    def __init__(self, tree: Tree, pids: set[int], share: float) -> None:
        self._tree, self._pids, self._share, self._since, self._runs = tree, pids, share, time.time(), False

    def tick(self, now: float) -> None:
        may_run = (now - self._since) % _PERIOD_S >= (1 - self._share) * _PERIOD_S
        if may_run != self._runs:
            self._tree.signal(self._pids, signal.SIGCONT if may_run else signal.SIGSTOP)
            self._runs = may_run
