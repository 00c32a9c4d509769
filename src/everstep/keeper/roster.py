"""Who is on this node: a session for every rank of it, what they wait for, and what all of them have sealed."""

from __future__ import annotations

import threading
import time

from everstep.capture.arena import Arena
from everstep.errors import NotEnoughSpace
from everstep.events import Degraded
from everstep.keeper.protocol import AnyMessage
from everstep.keeper.session import Session, give_back

_MANY_NODES_STRIDE = 50


class Roster:
    def __init__(self) -> None:
        self.lock = threading.Lock()  # for whoever changes sessions, or which arena is a session's
        self.sessions: dict[int, Session] = {}  # by rank
        self.overtaken: list[Arena] = []  # of ranks that the present life no longer has
        self.wanted = -1  # a step that somebody waits for,
        self.wanted_base = -1  # or for its base
        self.idle_since = time.monotonic()

    def all(self) -> list[Session]:
        return list(self.sessions.values())

    def ready(self) -> list[Session]:
        """The local ranks with arenas, if all of this node's are here."""
        with self.lock:
            sessions = self.all()
        complete = sessions and all(s.arena is not None for s in sessions)
        return sessions if complete and len(sessions) >= sessions[0].hello.local else []

    def is_anybody_alive(self) -> bool:
        return any(session.alive for session in self.all())

    def newest(self) -> int | None:
        """The newest step of which all local ranks have a base, be it their replicas'."""
        sessions = self.ready()
        found = (_newest_base(sessions, self.wanted), _newest_replica(sessions))
        return max((step for step in found if step is not None), default=None)

    def newest_of_life(self) -> int | None:
        """The newest step that all local ranks have sealed themselves, in the present life."""
        return max(self._bases_of_life(), default=None)

    def newest_values(self) -> int | None:
        """The newest step of which all local ranks have sealed values, in the present life."""
        sessions = self.ready()
        try:
            return max(_of_life(sessions, [session.values for session in sessions]), default=None)
        except ValueError:
            return None  # one was closed in this moment: another follows, or none

    def first_base(self, wanted: int) -> int | None:
        """The first step from `wanted` on that all local ranks have sealed themselves, in the present life."""
        return min((step for step in self._bases_of_life() if step >= wanted), default=None)

    def _bases_of_life(self) -> list[int]:
        sessions = self.ready()
        return _of_life(sessions, [session.arena for session in sessions])

    def newest_base(self) -> int | None:
        """The newest step that all local ranks have sealed themselves."""
        return _newest_base(self.ready(), self.wanted)

    def give_back(self, session: Session, slot: int) -> None:
        """To whoever holds that rank now: a lease may outlive the trainer that granted it."""
        give_back(self.sessions.get(session.hello.rank, session), slot)

    def want(self, step: int, *, as_base: bool) -> None:
        self.wanted = max(self.wanted, step)
        if as_base:
            self.wanted_base = max(self.wanted_base, step)

    def tell(self, message: AnyMessage) -> None:
        for session in self.all():
            session.tell(message)


def unwritten(what: str, error: Exception, *, tier: str) -> Degraded:
    """A write that failed: what only a keeper can promise is said here."""
    full = " Or lower keep=; training goes on, and the write is tried again."
    return Degraded(what=what, reason=f"{error}{full if isinstance(error, NotEnoughSpace) else ''}", tier=tier)


def _of_life(sessions: list[Session], arenas: list[Arena | None]) -> list[int]:
    """The steps that all of some ranks have sealed in the present life."""
    sealed = [_sealed(arena) if arena is not None else set() for arena in arenas]
    common = set.intersection(*sealed) if sealed else set()
    return [step for step, life in common if life == sessions[0].hello.generation]


def _newest_base(sessions: list[Session], wanted: int) -> int | None:
    """The newest step that every rank has sealed, in one generation.

    Among several keepers that do not know each other only the steps that all of them would choose: every so many, and
    what is waited for.
    """
    stride = 1
    sealed = []
    for session in sessions:
        if session.hello.local < session.hello.world and not session.hello.secret:
            stride = session.hello.every_steps or _MANY_NODES_STRIDE
        sealed.append(_followed(session))
    common = set.intersection(*sealed) if sealed else set()
    return max((step for step, _ in common if step % stride == 0 or step == wanted), default=None)


def _followed(session: Session) -> set[tuple[int, str]]:
    """The bases of a rank, without those of steps that its present life does again: it looks through them at first."""
    assert session.arena is not None
    life = session.hello
    began = -1 if life.resumed_from is None else life.resumed_from
    return {(step, which) for step, which in _sealed(session.arena) if step <= began or which == life.generation}


def _newest_replica(sessions: list[Session]) -> int | None:
    """The newest step of which the replicas of all ranks are sealed; only where all ranks are on this node."""
    if not sessions or len(sessions) < sessions[0].hello.world:
        return None
    sealed = [_sealed(session.replica) if session.replica is not None else set() for session in sessions]
    return max((step for step, _ in set.intersection(*sealed)), default=None)


def _sealed(arena: Arena) -> set[tuple[int, str]]:
    return {(seal.step, seal.generation) for seal in arena.seals().values()}
