"""The keeper's eye on `halt.json`: when a halt is due it tells a trainer of its node, and notes when it was obeyed.

That trainer appoints the last step, as if it had received a signal, and through the keepers all ranks hear of it.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from everstep.errors import EverstepError
from everstep.events import Degraded, Event, Persisted, Sink, read_events
from everstep.halt import due
from everstep.keeper.protocol import Halt, Hello
from everstep.keeper.roster import Roster
from everstep.store import halts
from everstep.types import HaltRecord

_LOOK_S = 0.5  # the directory may be one that a thousand nodes look at


class Halting:
    def __init__(self, directory: Path, roster: Roster, emit: Sink) -> None:
        self._directory, self._roster, self._emit = directory, roster, emit
        self._looked_at = 0.0
        self._version: tuple[int, ...] | None = None
        self._halt: HaltRecord | None = None
        self._durable: set[int] = set()  # steps that became so since the halt was asked for
        self._why = ""  # of the halt that trainers were told of
        self._complained = False

    def begin_life(self) -> None:
        self._why, self._halt, self._version = "", None, None

    def overhear(self, event: Event) -> None:
        """Passes events on, and counts checkpoints."""
        self._emit(event)
        if isinstance(event, Persisted):
            self._durable.add(event.step)

    def look(self, *, leaving_s: float, alone: bool) -> None:
        """Now and then: tell the first trainer of this node that a halt is due. `alone`: it cannot tell the others."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S or not self._roster.is_anybody_alive():
            return
        self._looked_at = now
        if (version := halts.version(self._directory)) != self._version:
            self._version = version
            self._read()
        if self._halt is None or self._why:
            return
        first = min((s for s in self._roster.all() if s.alive), key=lambda session: session.hello.rank)
        self._why = self._due(self._halt, first.hello, leaving_s) or ""
        if self._why and alone and first.hello.world > 1:
            self._complain("a halt is due", "ranks that each have a keeper of their own cannot leave together")
        elif self._why:
            first.tell(Halt(why=self._why))

    def _read(self) -> None:
        self._halt, self._complained = None, False
        try:
            self._halt = halts.read(self._directory)
        except (EverstepError, OSError) as error:
            self._complain("a halt was asked for", str(error))
            return
        asked = self._halt.set_time if self._halt is not None and self._halt.after is not None else None
        past = read_events(self._directory) if asked is not None else []
        self._durable = {one.step for one in past if isinstance(one, Persisted) and one.time > (asked or 0.0)}

    def _due(self, halt: HaltRecord, hello: Hello, leaving_s: float) -> str | None:
        if halt.seconds is not None and hello.end_time is None:
            self._complain("halt --seconds", "nobody says when the allocation ends; set EVERSTEP_END_TIME")
        return due(
            halt, now=time.time(), began=hello.began, checkpoints=len(self._durable), end_time=hello.end_time,
            leaving_s=leaving_s,
        )  # fmt: skip

    def _complain(self, what: str, reason: str) -> None:
        if not self._complained:
            self._complained = True
            self._emit(Degraded(what=what, reason=reason))

    def obeyed(self, step: int) -> None:
        """A trainer left in good order. If it was told to, that is written down, so that the next life goes on."""
        if not self._why or self._halt is None:
            return
        try:
            if halts.version(self._directory) == self._version:  # else somebody has asked for something else since
                now = time.time()
                halt = msgspec.structs.replace(self._halt, obeyed_time=now, obeyed_step=step, why=self._why)
                halts.write(self._directory, halt)
        except OSError as error:
            self._complain("that a halt was obeyed is not written down", str(error))
        self._halt = None
