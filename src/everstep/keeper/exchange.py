"""What keepers of different nodes ask each other: to hold blobs for one another, and to be read.

Another node's tier is a tier like any other (`RemoteTier`): a part is copied there by the very code that writes it to
a disk, and so is a log. `TierHost` is its other end.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import xxhash

from everstep.errors import BadConfig, EverstepError, NotEnoughSpace, PeerFailed, TierFailed
from everstep.image import CHUNK_BYTES
from everstep.keeper.peer_server import Reply
from everstep.keeper.peers import Answer, Ask, Peer
from everstep.keeper.rounds import Orders, Report
from everstep.store.blocks import room_for
from everstep.store.disk import DiskTier, Incoming
from everstep.store.tier import Arrived, Passing, freely, unseen
from everstep.types import Holding, ParityPart, Records, Room, Survives, Traits

# -- what is asked


class Tell(Ask, frozen=True, kw_only=True):
    """To the node that appoints steps; answered by Told."""

    report: Report


class Leave(Ask, frozen=True, kw_only=True):
    """All ranks leave after this step. `halt`: why, unless a signal asked for it."""

    step: int
    halt: str = ""


class TakeBase(Ask, frozen=True, kw_only=True):
    """All ranks take a base at this step."""

    step: int


class ReadImage(Ask, frozen=True, kw_only=True):
    """Bytes of a base that is held in memory for a round."""

    step: int
    rank: int
    offset: int
    length: int


class AskHeld(Ask, frozen=True, kw_only=True):
    """What a node holds of a step for a round; answered by HeldParts."""

    step: int


class AskSeals(Ask, frozen=True, kw_only=True):
    """What a node has in memory; answered by Seals."""


class TierAsk(Ask, frozen=True, kw_only=True):
    """One operation on a tier that another node keeps for us."""

    tier: str
    operation: str
    name: str = ""
    key: str = ""  # of a put that comes in many pieces
    offset: int = 0
    length: int = 0


# -- what is answered


class Done(Answer, frozen=True, kw_only=True):
    number: int = 0
    names: tuple[str, ...] = ()


class No(Answer, frozen=True, kw_only=True):
    """Why a tier refused, as the exception that it raised."""

    kind: str
    reason: str


class Told(Answer, frozen=True, kw_only=True):
    orders: Orders


class HeldParts(Answer, frozen=True, kw_only=True):
    parts: tuple[ParityPart, ...]


class Seals(Answer, frozen=True, kw_only=True):
    bases: tuple[Holding, ...]
    records: tuple[Records, ...]
    values: tuple[Holding, ...]


AnyAsk = Tell | Leave | TakeBase | ReadImage | AskHeld | AskSeals | TierAsk
AnyAnswer = Done | No | Told | HeldParts | Seals
ASKS: msgspec.msgpack.Decoder[AnyAsk] = msgspec.msgpack.Decoder(AnyAsk)
ANSWERS: msgspec.msgpack.Decoder[AnyAnswer] = msgspec.msgpack.Decoder(AnyAnswer)

_PIECE_BYTES = CHUNK_BYTES
_READING = ("read", "size", "names", "folders", "free bytes")
_IN_FLIGHT = 3  # pieces of one put
_REFUSALS: dict[str, type[Exception]] = {
    "FileNotFoundError": FileNotFoundError, "FileExistsError": FileExistsError, "BadConfig": BadConfig,
}  # fmt: skip


class TierHost:
    """Keeps tiers for others: one that they may write to, and some that they may read.

    Puts that are never finished are forgotten when the host is.
    """

    def __init__(self, tiers: Mapping[str, DiskTier], *, lent: str) -> None:
        self._tiers, self._lent = dict(tiers), lent
        self._incoming: dict[str, Incoming] = {}
        self._lock = threading.Lock()

    def answer(self, ask: TierAsk, payload: memoryview | None) -> Reply:
        try:
            if ask.tier != self._lent and ask.operation not in _READING:
                raise TierFailed(f"{ask.tier} is not for others to write to")
            return self._do(self._tiers[ask.tier], ask, payload or memoryview(b""))
        except (FileNotFoundError, FileExistsError, EverstepError) as error:
            return Reply(No(kind=type(error).__name__, reason=str(error)))

    def _do(self, tier: DiskTier, ask: TierAsk, payload: memoryview) -> Reply:
        match ask.operation:
            case "begin":
                incoming = tier.receive(ask.name, ask.length)
                with self._lock:
                    self._incoming[ask.key] = incoming
            case "piece":
                self._incoming[ask.key].write(ask.offset, payload)
            case "end":
                with self._lock:
                    incoming = self._incoming.pop(ask.key)
                incoming.finish()
            case "abandon":
                with self._lock:
                    gone = self._incoming.pop(ask.key, None)
                if gone is not None:
                    gone.abandon()
            case "append":
                if _size(tier, ask.name) != ask.offset:
                    raise TierFailed(f"{ask.name} does not end at byte {ask.offset}")
                tier.append(ask.name, [payload])
            case "cut":
                tier.cut(ask.name, ask.length)
            case "read":
                into = memoryview(bytearray(ask.length))
                count = tier.read(ask.name, ask.offset, into)
                return Reply(Done(number=count), [into[:count]])
            case "size":
                return Reply(Done(number=tier.size(ask.name)))
            case "names":
                return Reply(Done(names=tuple(tier.names(ask.name))))
            case "folders":
                return Reply(Done(names=tuple(tier.folders())))
            case "delete":
                tier.delete(ask.name)
            case "delete folder":
                tier.delete_folder(ask.name)
            case "rename folder":
                tier.rename_folder(ask.name, ask.key)
            case "sweep":
                return Reply(Done(number=tier.sweep(float(ask.length))))
            case "free bytes":
                return Reply(Done(number=tier.free_bytes()))
            case _:
                raise TierFailed(f"there is no operation {ask.operation!r}")
        return Reply(Done())

    def close(self) -> None:
        with self._lock:
            for incoming in self._incoming.values():
                incoming.abandon()
            self._incoming.clear()


def _size(tier: DiskTier, name: str) -> int:
    try:
        return tier.size(name)
    except FileNotFoundError:
        return 0


class RemoteTier:
    """A tier that another node keeps for this one."""

    before: Callable[[str], None] = staticmethod(lambda operation: None)

    def __init__(self, peer: Peer[AnyAnswer], tier: str, survives: Survives) -> None:
        self.name, self._peer, self._tier = f"{tier} of {peer.node}", peer, tier
        self.traits = Traits(survives=survives, shared=False, appends=True)

    def put(self, name: str, data: memoryview, passing: Passing = freely) -> tuple[int, ...]:
        data, key = data.cast("B"), uuid.uuid4().hex
        self._ask("begin", name, key=key, length=len(data))
        try:
            with ThreadPoolExecutor(_IN_FLIGHT) as pool:
                offsets = range(0, len(data), _PIECE_BYTES)
                found = tuple(pool.map(lambda at: self._put_piece(name, key, data, at, passing), offsets))
            self._ask("end", name, key=key)
        except BaseException:
            self._abandon(name, key)
            raise
        return found

    def _put_piece(self, name: str, key: str, data: memoryview, at: int, passing: Passing) -> int:
        piece = data[at : at + _PIECE_BYTES]
        passing(len(piece))
        self._ask("piece", name, [piece], key=key, offset=at)
        return int(xxhash.xxh3_64_intdigest(piece))

    def _abandon(self, name: str, key: str) -> None:
        try:
            self._ask("abandon", name, key=key)
        except (EverstepError, OSError):
            return  # the put's own error is the one to tell; the host forgets it when it ends

    def append(self, name: str, parts: Sequence[memoryview]) -> None:
        try:
            end = self.size(name)
        except FileNotFoundError:
            end = 0
        self._ask("append", name, [part.cast("B") for part in parts], offset=end)

    def cut(self, name: str, length: int) -> None:
        self._ask("cut", name, length=length)

    def get(self, name: str, *, room: Room = room_for, arrived: Arrived = unseen) -> memoryview:
        size = self.size(name)
        whole = room(size)[:size]
        for at in range(0, size, _PIECE_BYTES):
            piece = whole[at : at + _PIECE_BYTES]
            if self.read(name, at, piece) < len(piece):
                raise TierFailed(f"{self.name}: {name} became shorter while it was read")
            arrived(at, piece)
        return whole

    def view(self, name: str) -> memoryview:
        return self.get(name).toreadonly()

    def read(self, name: str, offset: int, into: memoryview) -> int:
        at = 0
        while at < len(into):
            piece = into[at : at + _PIECE_BYTES]
            answer, _ = self._ask("read", name, offset=offset + at, length=len(piece), into=piece)
            at += answer.number
            if answer.number < len(piece):
                break
        if not len(into):
            self.size(name)  # says so if it is not there
        return at

    def size(self, name: str) -> int:
        return self._ask("size", name)[0].number

    def names(self, folder: str = "") -> list[str]:
        return list(self._ask("names", folder)[0].names)

    def folders(self) -> list[str]:
        return list(self._ask("folders", "")[0].names)

    def delete(self, name: str) -> None:
        self._ask("delete", name)

    def delete_folder(self, folder: str) -> None:
        self._ask("delete folder", folder)

    def rename_folder(self, folder: str, to: str) -> None:
        self._ask("rename folder", folder, key=to)

    def sweep(self, age_s: float) -> int:
        return self._ask("sweep", "", length=int(age_s))[0].number

    def free_bytes(self) -> int:
        return self._ask("free bytes", "")[0].number

    def _ask(
        self, operation: str, name: str, payload: Sequence[memoryview] = (), *, into: memoryview | None = None,
        key: str = "", offset: int = 0, length: int = 0,
    ) -> tuple[Done, memoryview | None]:  # fmt: skip
        self.before(f"{operation} {name}")
        ask = TierAsk(tier=self._tier, operation=operation, name=name, key=key, offset=offset, length=length)
        heard = self._peer.ask(ask, payload, into=into)
        match heard.answer:
            case Done() as done:
                return done, heard.payload
            case No(kind="NotEnoughSpace"):
                raise NotEnoughSpace(self.name, length, 0)
            case No(kind=kind, reason=reason):
                raise _REFUSALS.get(kind, TierFailed)(reason)
            case other:
                raise PeerFailed(self._peer.node, self._peer.address, operation, f"answered {type(other).__name__}")
