"""From the rings to the log, as records come: the keeper's thread for what the optimizers consumed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from everstep.capture.arena import Arena
from everstep.events import Sink
from everstep.keeper.logbook import Logbook
from everstep.keeper.pace import Pace
from everstep.keeper.protocol import Trouble
from everstep.keeper.roster import Roster, unwritten
from everstep.keeper.rounds import NONE
from everstep.keeper.session import TICK_S, Session
from everstep.timeline import Mark

_LOG_TICK_S = 0.02  # from one look at the rings to the next, if that one did not take longer
_BREATH_S = 50e-6  # enough for another thread to get hold of the logbook


class RecordWriter:
    def __init__(self, logbook: Logbook, roster: Roster, emit: Sink, announce: Callable[[], None], mark: Mark) -> None:
        """`announce`: tell everybody how far the medium is."""
        self._logbook, self._roster, self._emit, self._announce = logbook, roster, emit, announce
        self._pace = Pace(logbook, emit, mark)
        self.asked = threading.Event()  # somebody waits: do not rest, not even after a failure
        self.failures = 0  # in a row,
        self.trouble = ""  # and the last one

    @property
    def flush_s(self) -> float:
        """What an append and its flush take; -1: not known yet."""
        return self._pace.flush_s

    def work(self, ending: threading.Event) -> None:
        """Take records from the rings as they come. While one flush runs the next records gather: the group commit."""
        rest = TICK_S
        while not ending.is_set():
            self.asked.wait(rest)
            self.asked.clear()
            began = time.monotonic()
            try:
                more = self._take()
                rest = _BREATH_S if more else max(_BREATH_S, began + _LOG_TICK_S - time.monotonic())
                self.failures, self.trouble = 0, ""
            except Exception as error:  # whatever it is: rings hold the records, and nobody is left in the dark
                self.failures, self.trouble = self.failures + 1, str(error)
                rest = min(60.0, 0.5 * 2**self.failures)
                self._emit(unwritten("records are not durable yet", error, tier="disk"))
                self._roster.tell(Trouble(reason=str(error)))

    def _take(self) -> bool:
        """Whether there may be more to take."""
        before, sessions = self._logbook.reach(), self._roster.all()
        is_alive = self._roster.is_anybody_alive()
        is_urgent = self._roster.wanted > before or not is_alive
        with self._logbook.writing:
            rings = [session.ring for session in sessions if session.ring is not None]
            if self._logbook.hold_values(_values(sessions), rings, is_urgent=is_urgent, is_alive=is_alive):
                is_urgent = True  # they are worth something only behind all records up to theirs
        is_outpaced = not is_urgent and _are_all_here(sessions) and self._pace.is_outpaced(rings)
        base = self._roster.newest_base() if is_outpaced else None
        more = False
        for session in sessions:
            with self._logbook.writing:
                if session.ring is None:
                    continue
                if is_outpaced and not session.ring_is_spent:
                    self._logbook.pass_over(session.ring, NONE if base is None else base)
                else:
                    is_wanted = is_urgent or session.ring_is_spent
                    more |= self._pace.take(session.ring, session.hello, is_urgent=is_wanted)
        with self._logbook.writing:
            self._logbook.save_values(_values(sessions), torch_version=sessions[0].hello.torch if sessions else "")
        if self._logbook.reach() > before:
            self._announce()
        return more

    # -- the keeper's main thread

    def take_in(self, session: Session, ring: Arena | None) -> None:
        """Of a rank another ring is filled now, or none."""
        with self._logbook.writing:
            session.take_in(ring, self._logbook)

    def let_go_spent_rings(self) -> None:
        """A ring that nothing is recorded into any more is needed until all ranks have a base that is as new."""
        for session in [s for s in self._roster.all() if s.ring_is_spent]:
            newest = self._roster.newest_base()
            if session.ring is not None and newest is not None and newest >= session.ring.live().step:
                self.take_in(session, None)


def _values(sessions: list[Session]) -> list[Arena]:
    return [session.values for session in sessions if session.values is not None]


def _are_all_here(sessions: list[Session]) -> bool:
    """What ranks on other nodes have in memory nobody knows here, so they may need any record."""
    return all(session.hello.local == session.hello.world for session in sessions)
