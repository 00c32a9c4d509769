"""How the keepers of a live job talk: an endpoint and a secret of the job, apart from those of its lives.

Lives come and go with every loss; this stays from the job's first enrolment until its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from everstep.errors import EverstepError
from everstep.keeper.assembly import Call, Report
from everstep.keeper.lines import Order
from everstep.keeper.peer_server import Reply, Server
from everstep.keeper.peers import Answer, Ask, Peer
from everstep.keeper.protocol import Seat, Sitting

_WORKERS = 4


class Tell(Ask, frozen=True, kw_only=True):
    """To the keeper that has the chair; answered by Told, or Elsewhere."""

    report: Report


class Nudge(Ask, frozen=True, kw_only=True):
    """Report now; answered by Elsewhere."""


class Told(Answer, frozen=True, kw_only=True):
    """`orders`: what the workers of the node are to hear. `call`: to be noted before anybody is called by it."""

    orders: dict[str, Order]
    call: Call | None
    sitting: Sitting


class Elsewhere(Answer, frozen=True, kw_only=True):
    """To whom this keeper reports, and what it knows of the council."""

    chair: Seat
    sitting: Sitting


Question = Tell | Nudge
Reaction = Told | Elsewhere
_ASKS: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_ANSWERS: msgspec.msgpack.Decoder[Reaction] = msgspec.msgpack.Decoder(Reaction)


class Embassy:
    def __init__(
        self, node: str, secret: bytes, encrypt: bool, address: str, answer: Callable[[Question], Reaction]
    ) -> None:
        """`address`: where the others are to find it; port 0: any."""
        host, _, port = address.rpartition(":")
        self._secret, self._encrypt = secret, encrypt
        self._server: Server[Question] = Server(
            node, secret, _ASKS, lambda asked, _: Reply(answer(asked)), advertise=host.strip("[]"), port=int(port),
            encrypt=encrypt, workers=_WORKERS,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._peers: dict[Seat, Peer[Reaction]] = {}
        self._asking: set[Seat] = set()
        self._is_closed = False

    @property
    def address(self) -> str:
        return self._server.address

    def ask(self, seat: Seat, question: Question, timeout_s: float) -> Reaction | None:
        """None if there is no answer in time."""
        with self._lock:
            if self._is_closed:
                return None
            if seat not in self._peers:
                self._peers[seat] = Peer(seat.node, seat.address, self._secret, _ANSWERS, encrypt=self._encrypt)
            peer = self._peers[seat]
        try:
            return peer.ask(question, timeout_s=timeout_s).answer
        except (EverstepError, OSError):
            return None

    def nudge(self, seat: Seat, timeout_s: float, heard: Callable[[Seat, Elsewhere], None]) -> None:
        """By a thread of its own, one at a time for each: one that is lost holds up nobody."""
        with self._lock:
            if seat in self._asking or self._is_closed:
                return
            self._asking.add(seat)

        def work() -> None:
            answer = self.ask(seat, Nudge(), timeout_s)
            with self._lock:
                self._asking.discard(seat)
            if isinstance(answer, Elsewhere):
                heard(seat, answer)

        threading.Thread(target=work, name="everstep-nudge", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()
        self._server.close()
