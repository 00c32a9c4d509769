"""The keeper's part in a live job: its own workers, and the keepers of the other nodes.

One keeper of the job has the chair: its assembly decides. With one node that is the only one, and there is nobody to
talk to. With several, the others report to it all they know: at once when something has changed, else now and then, so
that silence means something. Its answers say what workers are to hear; it nudges whom it has something to say to.

A chair that does not answer for the detection time is followed by the next in the order of seats; whoever has lost
sight of it is told by others where it is. A keeper that alone died is back sooner than that, and learns from its own
workers whose they are.
"""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from everstep.errors import BadConfig
from everstep.events import Degraded, Sink
from everstep.keeper.assembly import Assembly, Call, Report
from everstep.keeper.lines import Lines, Order
from everstep.keeper.note import forget_charter, write_charter
from everstep.keeper.protocol import (
    Channel,
    Charter,
    Convene,
    Convened,
    Enrol,
    Free,
    Lost,
    Seat,
    Sitting,
    Stand,
    Stuck,
    View,
)
from everstep.keeper.views import SPARE
from everstep.topology import node_name

if TYPE_CHECKING:
    from everstep.keeper.embassy import Elsewhere, Embassy, Question, Reaction, Told

_BEATS = 5  # reports within the detection time when nothing has changed
_FAREWELL_S = 10.0  # until other nodes must have heard that work is done here, and spares that the run is over


class Council:
    def __init__(self, directory: Path, emit: Sink) -> None:
        self._directory, self._emit, self._node = directory, emit, node_name()
        self._lock = threading.RLock()
        self._lines = Lines()
        self._assembly: Assembly | None = None
        self._job = ""  # that the assembly is of
        self._life, self._number = uuid.uuid4().hex, 0
        self._charter: Charter | None = None
        self._call: Call | None = None  # the newest that this node has taken note of
        self._embassy: Embassy | None = None
        self._embassy_job = ""
        self._chair: Seat | None = None  # to whom this node reports; None: to nobody
        self._heard_at: dict[str, float] = {}
        self._is_failing = False  # to reach the chair
        self._settled = (-1, -1)  # versions of what everything was derived from
        self._unheard: list[Seat] = []  # nodes that are to hear something
        self._said: dict[str, object] = {}  # what other nodes were last answered,
        self._nudged: dict[str, tuple[object, float]] = {}  # and what for they were last nudged, and when
        self._told = -1  # the version of the lines that the chair has heard of
        self._parted_at = 0.0  # when the last line was closed
        self._woken = threading.Event()
        self._ending = threading.Event()

    # -- what workers say

    def convene(self, channel: Channel, said: Convene) -> None:
        """Before anybody enrols: be found by the others."""
        with self._lock:
            if self._embassy_job != said.job:
                self._open(said.job, said.secret, said.encrypt, said.address)
            assert self._embassy is not None
            channel.send(Convened(address=self._embassy.address))

    def enrol(self, channel: Channel, said: Enrol) -> None:
        with self._lock:
            self._lines.enrol(channel, said)
            if said.charter is not None and (said.rank != SPARE or self._job in ("", said.charter.job)):
                self._take_part(said.charter)
            elif said.rank != SPARE and said.job != self._job:
                self._leave()
                self._job = said.job
                self._assembly = Assembly(self._node, self._emit, time.monotonic())
            self._settle()

    def stand(self, channel: Channel, said: Stand) -> None:
        with self._lock:
            self._lines.stand(channel, said)
            self._settle()

    def stuck(self, channel: Channel, said: Stuck) -> None:
        with self._lock:
            self._lines.stuck(channel, said)
            self._settle()

    def free(self, channel: Channel, said: Free) -> None:
        with self._lock:
            self._lines.free(channel, said)

    def part(self, channel: Channel, *, final: bool) -> None:
        """It leaves in good order. `final`: the loop is over, and nobody is missed."""
        with self._lock:
            self._lines.part(channel, "" if final else "it was asked to leave")
            self._parted_at = time.monotonic()
            self._settle()

    def closed(self, channel: Channel) -> None:
        """A line was closed by the kernel."""
        with self._lock:
            self._lines.closed(channel)
            self._parted_at = time.monotonic()
            self._settle()

    # -- now and then

    def look(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._lines.end_the_hung(now)
            if self._assembly is not None:
                self._assembly.look(now)
                if self._settled != (self._assembly.version, self._lines.version):
                    self._settle()

    @property
    def is_needed(self) -> bool:
        """Whether spares wait here for a job of several nodes, or others for what only this keeper can tell them."""
        with self._lock:
            if self._charter is None:
                return False
            has_told = self._told == self._lines.version
            if self._assembly is not None:
                has_told = (self._assembly.is_over or not self._assembly.is_ending) and not self._unheard
            return bool(self._lines) or (not has_told and time.monotonic() - self._parted_at < _FAREWELL_S)

    def close(self) -> None:
        with self._lock:
            if self._assembly is not None and self._charter is not None:
                forget_charter(self._directory)
            self._leave()

    # -- the council of a job

    def _open(self, job: str, secret: bytes, encrypt: bool, address: str) -> None:
        from everstep.keeper.embassy import Embassy  # needs a package that one node alone does not

        self._leave()
        self._embassy = Embassy(self._node, secret, encrypt, address, self._answer)
        self._embassy_job = job
        self._ending = threading.Event()
        threading.Thread(target=self._talk, args=(self._ending,), name="everstep-council", daemon=True).start()

    def _leave(self) -> None:
        self._ending.set()
        self._woken.set()
        embassy, self._embassy, self._embassy_job = self._embassy, None, ""
        self._charter, self._call, self._assembly, self._chair, self._job = None, None, None, None, ""
        self._said.clear()
        if embassy is not None:
            threading.Thread(target=embassy.close, name="everstep-embassy-close", daemon=True).start()

    def _take_part(self, charter: Charter) -> None:
        if self._charter is None or self._charter.job != charter.job:
            is_first = self._embassy_job == charter.job
            if not is_first:
                self._open(charter.job, charter.secret, charter.encrypt, self._own_address(charter))
            self._charter, self._job = charter, charter.job
            now = time.monotonic()
            self._heard_at = {seat.node: now for seat in charter.sitting.seats}
            self._turn_to(charter.sitting.seats[0], follows=not is_first)
        else:
            self._sit(charter.sitting)

    def _own_address(self, charter: Charter) -> str:
        """Where a keeper of this node was before; else wherever there is room."""
        known = next((seat.address for seat in charter.sitting.seats if seat.node == self._node), "")
        return known or f"{charter.host}:0"

    def _sit(self, sitting: Sitting) -> None:
        """The council is this one from now on, if it is newer than what is known."""
        assert self._charter is not None
        if sitting.view <= self._charter.sitting.view:
            return
        self._charter = replace(self._charter, sitting=sitting)
        self._write_down()
        self._heard_at, self._is_failing = {seat.node: time.monotonic() for seat in sitting.seats}, False
        is_member = any(seat.node == self._node for seat in sitting.seats)
        if self._assembly is None or self._assembly.sitting.view < sitting.view or not is_member:
            self._turn_to(sitting.seats[0])

    def _turn_to(self, seat: Seat, silent: tuple[str, ...] = (), *, follows: bool = True) -> None:
        """Report to this one; or take the chair. `follows`: another has had it before."""
        assert self._charter is not None
        self._chair = seat
        if seat.node != self._node:
            self._assembly = None
        else:
            sitting = self._charter.sitting
            self._assembly = Assembly(self._node, self._emit, time.monotonic(), sitting, silent, follows=follows)
            self._said.clear()
            self._write_down()
        self._woken.set()

    def _write_down(self) -> None:
        """For those who stand by where the job is not: where it is."""
        if self._assembly is None or self._charter is None:
            return
        try:
            write_charter(self._directory, self._charter)
        except OSError as error:
            self._emit(Degraded(what="spares of other nodes may not find the job", reason=str(error)))

    # -- reports and orders

    def _report(self) -> Report:
        self._number += 1
        return Report(
            node=self._node, address=self._embassy.address if self._embassy is not None else "", life=self._life,
            number=self._number, workers=self._lines.here, gone=self._lines.gone, call=self._call,
            sitting=self._charter.sitting if self._charter is not None else None,
        )  # fmt: skip

    def _settle(self) -> None:
        """Something may have changed: see what follows from it."""
        if self._assembly is None:
            self._woken.set()
            return
        is_news = True
        while is_news:
            now = time.monotonic()
            self._assembly.hear(self._report(), now)
            is_news = self._note(self._assembly.call)
            is_news |= self._lines.deliver(self._orders(), self._charter, now)
            if not self._has_chair:
                return  # this node is not part of what was decided: another has it
        self._settled = (self._assembly.version, self._lines.version)
        self._see_who_is_to_hear(self._assembly)

    @property
    def _has_chair(self) -> bool:
        return self._assembly is not None

    def _orders(self) -> dict[str, Order]:
        return self._assembly.orders(self._node, self._job) if self._assembly is not None else {}

    def _note(self, call: Call | None) -> bool:
        """Take note of a view that was decided, before anybody is called by it. Whether it is new."""
        if call is None or (self._call is not None and call.number <= self._call.number):
            return False
        self._call = call
        if self._charter is not None:
            self._sit(call.sitting)
        return True

    def _see_who_is_to_hear(self, assembly: Assembly) -> None:
        others = [seat for seat in assembly.seats if seat.node != self._node]
        self._unheard = [seat for seat in others if self._said.get(seat.node) != self._saying(assembly, seat.node)]
        if self._unheard:
            self._woken.set()

    def _saying(self, assembly: Assembly, node: str) -> tuple[dict[str, Order], int]:
        return assembly.orders(node, self._job), assembly.sitting.view

    # -- a thread of its own: talking

    def _talk(self, ending: threading.Event) -> None:
        beat_s = 0.05
        last = time.monotonic()
        while not ending.is_set():
            self._woken.wait(beat_s)
            self._woken.clear()
            with self._lock:
                if ending.is_set() or self._charter is None or self._embassy is None:
                    continue
                beat_s = self._charter.detect_s / _BEATS
                now = time.monotonic()
                if now - last > 2 * beat_s + self._charter.detect_s / 2:  # whoever slept cannot tell who was silent
                    self._heard_at = dict.fromkeys(self._heard_at, now)
                last = now
                if self._assembly is not None:
                    self._remind(beat_s)
                    continue
                chair, embassy = self._find_chair(now), self._embassy
                report, version = self._report(), self._lines.version
            if chair is None:
                continue
            if self._tell(embassy, chair, report, 2 * beat_s):
                self._told = version
            else:
                ending.wait(beat_s / 2)  # a connection is refused at once

    def _tell(self, embassy: Embassy, chair: Seat, report: Report, timeout_s: float) -> bool:
        """Whether it was heard by whoever has the chair."""
        from everstep.keeper.embassy import Tell, Told

        answer = embassy.ask(chair, Tell(report=report), timeout_s)
        with self._lock:
            if embassy is not self._embassy or self._charter is None:
                return False
            now = time.monotonic()
            if isinstance(answer, Told):
                self._heard_at[chair.node], self._is_failing = now, False
                self._obey(answer, now)
            elif answer is not None:
                self._redirect(answer, now)
            else:
                self._fail(embassy, chair, now, timeout_s)
        return isinstance(answer, Told)

    def _obey(self, told: Told, now: float) -> None:
        self._sit(told.sitting)
        is_news = self._note(told.call)
        is_news |= self._lines.deliver(told.orders, self._charter, now)
        if is_news:
            self._woken.set()

    def _redirect(self, answer: Elsewhere, now: float) -> None:
        """To the one that others report to, unless this node knows that it is silent: then they soon will."""
        self._sit(answer.sitting)
        chair = answer.chair
        if chair != self._chair and chair.node != self._node and not self._is_silent(chair, now):
            self._heard_at.setdefault(chair.node, now)
            self._turn_to(chair)

    def _fail(self, embassy: Embassy, chair: Seat, now: float, timeout_s: float) -> None:
        """The chair did not answer: see who of those who would follow it is there."""
        assert self._charter is not None
        others = [seat for seat in self._charter.sitting.seats if seat.node not in (self._node, chair.node)]
        if not self._is_failing:
            self._is_failing = True
            self._heard_at |= {seat.node: now for seat in others}
        for seat in others:
            embassy.nudge(seat, timeout_s, self._is_there)

    def _is_silent(self, seat: Seat, now: float) -> bool:
        """For so long that it is not waited for."""
        assert self._charter is not None
        return seat.node != self._node and now - self._heard_at.get(seat.node, now) > self._charter.detect_s

    def _is_there(self, seat: Seat, answer: Elsewhere) -> None:
        with self._lock:
            self._heard_at[seat.node] = time.monotonic()
            if self._charter is not None and answer.sitting.view > self._charter.sitting.view:
                self._sit(answer.sitting)

    def _find_chair(self, now: float) -> Seat | None:
        """Whoever has it, while it answers; then the first that is there. That may be this node."""
        assert self._charter is not None
        seats = self._charter.sitting.seats
        if self._chair is not None and not self._is_silent(self._chair, now):
            return self._chair
        found = next((seat for seat in seats if not self._is_silent(seat, now)), None)
        if found is None:
            self._give_up()
            return None
        before = tuple(seat.node for seat in seats if self._is_silent(seat, now))
        if self._chair is not None:
            reason = f"it did not answer for {self._charter.detect_s:g} s: {found.node} takes the chair"
            self._emit(Degraded(what=f"node {self._chair.node} is not heard of", reason=reason))
        self._turn_to(found, before)
        if self._assembly is not None:
            self._settle()
            return None
        return found

    def _give_up(self) -> None:
        """No keeper of the job is there any more, and this node is not part of it: nobody here goes on."""
        reason = "no keeper of the job is to be found"
        orders: dict[str, Order] = {}
        for here in self._lines.here:
            said = here.enrolled
            orders[said.worker] = Lost(view=said.view, ranks=(said.rank,), reason=reason)
            if here.standing is not None:
                orders[said.worker] = View(
                    job=said.job, number=said.view + 1, rank=SPARE, world=0, address="", policy="restart", lost=(),
                    reason=reason,
                )  # fmt: skip
        self._lines.deliver(orders, None, time.monotonic())

    def _remind(self, beat_s: float) -> None:
        """As the chair: nudge those who are to hear something, and those who are silent."""
        assert self._assembly is not None and self._embassy is not None
        now = time.monotonic()
        for seat in self._assembly.seats:
            is_to_hear = seat in self._unheard
            if not is_to_hear and self._assembly.silent_for(seat.node, now) <= 2 * beat_s:
                continue
            saying = self._saying(self._assembly, seat.node) if is_to_hear else None
            before, at = self._nudged.get(seat.node, (None, 0.0))
            if (is_to_hear and saying != before) or now - at > beat_s:
                self._nudged[seat.node] = (saying, now)
                self._embassy.nudge(seat, 2 * beat_s, self._is_there)

    # -- being asked

    def _answer(self, asked: Question) -> Reaction:
        from everstep.keeper.embassy import Elsewhere, Tell, Told

        with self._lock:
            charter, now = self._charter, time.monotonic()
            if charter is None:
                raise BadConfig(f"the workers of {self._node} have not enrolled yet")
            if isinstance(asked, Tell):
                self._note(asked.report.call)
            if isinstance(asked, Tell) and self._assembly is not None:
                self._assembly.hear(asked.report, now)
                self._settle()
            if isinstance(asked, Tell) and self._assembly is not None:
                saying = self._said[asked.report.node] = self._saying(self._assembly, asked.report.node)
                self._see_who_is_to_hear(self._assembly)
                return Told(orders=saying[0], call=self._assembly.call, sitting=self._assembly.sitting)
            self._woken.set()
            return Elsewhere(chair=self._chair or charter.sitting.seats[0], sitting=charter.sitting)
