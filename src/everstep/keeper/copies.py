"""Records on other nodes: with copies of them there, every step survives the loss of a node, not only its bases.

A log is copied by the code that writes it to a disk, onto the memory that others lend, and so are the values of the
steps that all nodes save. Records stay in their ring until all who take them have them; a node that cannot be reached
is not waited for, and begins again behind the gap.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from everstep.capture.arena import Arena
from everstep.errors import EverstepError
from everstep.events import Degraded, Sink
from everstep.keeper.logbook import Logbook
from everstep.keeper.protocol import Hello
from everstep.keeper.roster import Roster
from everstep.keeper.rounds import NONE, Lane, Order
from everstep.keeper.session import SOON_S, longer
from everstep.store.tier import Tier

_REST_S = 2.0  # after a node could not be reached
_Taken = tuple[Arena, Arena | None, Hello]  # a rank's ring, and its values


class Takers:
    """Who takes records from the rings of this node, and how far each is: a slot is free when all are past it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._far: dict[int, dict[object, int]] = {}  # rank -> who -> step

    def join(self, who: object, ring: Arena) -> None:
        with self._lock:
            self._far.setdefault(ring.rank, {})[who] = ring.taken()

    def has_taken(self, who: object, ring: Arena, step: int) -> None:
        """What was free once stays so: the trainer may be overwriting it."""
        with self._lock:
            far = self._far.setdefault(ring.rank, {})
            far[who] = step
            ring.set_taken(max(ring.taken(), min(far.values())))

    def leave(self, who: object) -> None:
        with self._lock:
            for far in self._far.values():
                far.pop(who, None)


class _Copy:
    """The log of this node's ranks on one other node. Of values only the newest stay that all nodes have copied."""

    def __init__(self, tier: Tier, takers: Takers, emit: Sink, appointed: Callable[[], Order]) -> None:
        self.name = tier.name
        self._takers = takers
        self._book = Logbook(tier, emit, lambda ring, step: takers.has_taken(self, ring, step), kept_values=1)
        self._book.appointed = appointed
        self._open: set[int] = set()
        self.rests_until = 0.0
        self.is_lost = False

    def take(self, sessions: Sequence[_Taken], *, is_alive: bool) -> bool:
        for ring, _, hello in sessions:
            if hello.rank not in self._open:
                self._book.open(hello, hello.local_ranks)
                self._open.add(hello.rank)
            self._takers.join(self, ring)
        values = [values for _, values, _ in sessions if values is not None]
        has_values = self._book.hold_values(values, [ring for ring, _, _ in sessions], is_alive=is_alive)
        has_taken = False
        for ring, _, _ in sessions:
            while self._book.take(ring):
                has_taken = True  # every call takes as far as there is no gap
        self._book.save_values(values, torch_version=sessions[0][2].torch)
        return has_taken or has_values

    def lose(self) -> None:
        """It cannot be reached: nobody waits for it, and what it has is looked at again when it can be."""
        self._takers.leave(self)
        self._open.clear()
        self.rests_until, self.is_lost = time.monotonic() + _REST_S, True

    @property
    def values_done(self) -> int:
        return self._book.values_done

    def reach(self, base: int) -> int:
        self._book.base = base
        return self._book.reach()

    def forget(self, before: int) -> None:
        self._book.rotate()
        self._book.forget(before)


class Copies:
    def __init__(
        self, tiers: Sequence[Tier], roster: Roster, takers: Takers, emit: Sink, appointed: Callable[[], Order]
    ) -> None:  # fmt: skip
        """`appointed`: of which step all nodes save values next."""
        self._roster, self._emit = roster, emit
        self._copies = [_Copy(tier, takers, emit, appointed) for tier in tiers]
        self._lock = threading.Lock()

    def work(self, ending: threading.Event) -> None:
        rest = SOON_S
        while not ending.wait(rest):
            sessions = [(one.ring, one.values, one.hello) for one in self._roster.all() if one.ring is not None]
            ready = [copy for copy in self._copies if sessions and time.monotonic() >= copy.rests_until]
            taken = [self._try(copy, sessions) for copy in ready]
            rest = SOON_S if any(taken) else longer(rest)
        for copy in self._copies:
            copy.lose()  # another life has copies of its own, and its rings wait for none of these

    def _try(self, copy: _Copy, sessions: Sequence[_Taken]) -> bool:
        """Whether there was anything to take."""
        try:
            with self._lock:
                has_taken = copy.take(sessions, is_alive=self._roster.is_anybody_alive())
            copy.is_lost = False
            return has_taken
        except (EverstepError, OSError, ValueError) as error:
            rings = [arena for ring, values, _ in sessions for arena in (ring, values) if arena is not None]
            if any(arena.control.closed for arena in rings):
                return False  # in this moment: another one follows, or none
            if not copy.is_lost:
                self._emit(
                    Degraded(what=f"records are not copied to the {copy.name}", reason=str(error), tier="partner")
                )
            copy.lose()
        return False

    def reach(self, base: int) -> int:
        """The newest step that copies of records lead to everywhere, from a base that is there."""
        if base == NONE or not self._copies or not any(one.ring is not None for one in self._roster.all()):
            return base
        return min(copy.reach(base) for copy in self._copies)

    def values_status(self, on_disk: Callable[[], Lane]) -> Lane:
        """How far the values of this node are, on its disk and on all others that can be reached."""
        lane = on_disk()
        done = min([lane.done, *(copy.values_done for copy in self._copies if not copy.is_lost)])
        return msgspec.structs.replace(lane, done=done)

    def forget(self, before: int) -> None:
        """A base is complete: segments begin anew, and what only older ones need goes."""
        for copy in self._copies:
            if not copy.is_lost:
                with self._lock:
                    copy.forget(before)
