"""What trainer and keeper say to each other: typed messages over a Unix socket, one per packet, descriptors beside.

The trainer owns its slots while it lives. The keeper asks for a lease before it reads one for longer than a moment,
and the trainer may refuse. When either side dies the kernel closes the socket, and all leases are void.
"""

from __future__ import annotations

import array
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from everstep.capture.host import arena_root, open_root
from everstep.config import Policy
from everstep.errors import KeeperLost, KeeperSilent
from everstep.types import Level

OWNER_NOTE = "directory"  # beside the arenas of a run: where its disk is
_MAX_MESSAGE = 64 << 10
_MAX_DESCRIPTORS = 253
_PATIENCE_S = 20.0  # with whoever answers at once, on a machine that is busy


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the job, and where its keeper is to be found."""

    node: str
    domain: str
    address: str
    ranks: tuple[int, ...]


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A keeper in the council of a live job, and where the others find it."""

    node: str
    address: str = ""


class Sitting(msgspec.Struct, frozen=True, kw_only=True):
    """The council as it is in one view: the first of the seats has the chair, and each takes the place of those before
    it. `places`: the node of every rank."""

    view: int
    seats: tuple[Seat, ...]
    places: tuple[str, ...]


class Charter(msgspec.Struct, frozen=True, kw_only=True):
    """What a keeper must know to take part in the council of a job: whose it is, and who else is there."""

    run: str
    job: str
    secret: bytes
    encrypt: bool
    detect_s: float
    sitting: Sitting
    host: str = ""  # of this node, for others


# trainer to keeper


class Hello(Message, frozen=True, kw_only=True):
    """First word of a trainer. `local`: how many ranks of the world are on this node."""

    rank: int
    world: int
    local: int
    local_ranks: tuple[int, ...]  # which ones,
    ranks_here: tuple[int, ...]  # and whose parts lie on this node's disk: all, if every node sees it
    pid: int
    run: str
    directory: str
    generation: str
    resumed_from: int | None
    every_steps: int | None
    every_s: float | None
    every_capture: bool
    lose_steps: int | None  # how many records may be unwritten,
    lose_s: float | None  # or for how long
    keep_last: int
    keep_every: int | None
    linger_s: float
    torch: str
    tiers: str = ""  # what guard() was given, as it is written
    secret: bytes = b""  # of this life, where there are several nodes,
    address: str = ""  # and where others are to find this node's keeper; port 0: any
    began: float = 0.0  # when this life did,
    end_time: float | None = None  # and when its allocation will end, if that is known
    replica: str = ""  # the kind of device on which the state is that a replica is to follow; empty: there is none
    metrics: str = ""  # where the keeper is to answer Prometheus; empty: nowhere
    mtbf_s: float | None = None  # what the user knows of failures,
    failures: int = 0  # and how many have ended lives of this run


class Attach(Message, frozen=True, kw_only=True):
    """An arena, as descriptors: the control page, then the slots."""

    place: str


class Detach(Message, frozen=True, kw_only=True):
    """There are no more records; the rings are needed until bases have taken their place."""


class Join(Message, frozen=True, kw_only=True):
    """The nodes of this life, in the order in which all of them know them."""

    members: tuple[Member, ...]


class LeaseAnswer(Message, frozen=True, kw_only=True):
    step: int
    slot: int | None


class Persist(Message, frozen=True, kw_only=True):
    """Bring this step to a level as soon as it can be: somehow, or as a base."""

    step: int
    as_base: bool
    level: Level = Level.DURABLE


class StopAt(Message, frozen=True, kw_only=True):
    """Everybody leaves after this step (also passed on by the keeper). `halt`: why, unless a signal asked for it."""

    step: int
    halt: str = ""


class BaseAt(Message, frozen=True, kw_only=True):
    """One rank runs out of room for records: all take a base at this step (also passed on by the keeper)."""

    step: int


class Enrol(Message, frozen=True, kw_only=True):
    """First word of a line that lasts as long as its process: it goes on without those who are lost, or stands by.

    `worker`: a name that no other process has. `rank`: in view `view` of `world` ranks; SPARE: it has none yet.
    """

    worker: str
    job: str  # the same for all who were started together; empty: a spare that does not know it yet
    pid: int
    view: int
    rank: int
    world: int
    on_loss: tuple[Policy, ...]
    detect_s: float  # after which one who does not stop is taken for lost
    unit: int = 1  # how many ranks, one after the other, have the whole state together
    charter: Charter | None = None  # where the job has several nodes


class Convene(Message, frozen=True, kw_only=True):
    """A job with several nodes begins: be found by their keepers at this host. Answered by Convened."""

    job: str
    secret: bytes
    encrypt: bool
    address: str  # port 0: any


class Stand(Message, frozen=True, kw_only=True):
    """It has stopped, and waits for a view after this one. `address`: where others would meet it."""

    view: int
    address: str


class Stuck(Message, frozen=True, kw_only=True):
    """It is in a step for so long that somebody must hang, be it this one or another."""

    view: int
    reason: str


class Free(Message, frozen=True, kw_only=True):
    """It has heard that its view has ended, and comes when the program asks for its next step."""

    view: int


class Inherit(Message, frozen=True, kw_only=True):
    """What did earlier lives leave in memfds?"""


class Cancel(Message, frozen=True, kw_only=True):
    """What is on its way to deeper tiers stops, on all nodes; the next comes when it is due."""


class AskDurable(Message, frozen=True, kw_only=True):
    """How far is each level? Anybody may ask; the answer is Durable."""


class AskReplica(Message, frozen=True, kw_only=True):
    """How is the replica? Anybody may ask; the answer is Replicated, or Trouble if there is none."""


class Bye(Message, frozen=True, kw_only=True):
    """The trainer ends in good order. `final`: the run is finished and its arena is no longer needed."""

    final: bool


# keeper to trainer


class Welcome(Message, frozen=True, kw_only=True):
    leased: tuple[int, ...]
    address: str = ""  # where other nodes find this keeper


class Convened(Message, frozen=True, kw_only=True):
    """Where the keepers of other nodes find this one."""

    address: str


class Lost(Message, frozen=True, kw_only=True):
    """View `view` has ended, because these ranks of it are gone: stop, and stand."""

    view: int
    ranks: tuple[int, ...]
    reason: str


class View(Message, frozen=True, kw_only=True):
    """Who goes on, as what, and where they meet. No ranks: nobody goes on here."""

    job: str
    number: int
    rank: int
    world: int
    address: str
    policy: Policy
    lost: tuple[int, ...]
    reason: str
    ended: str = ""  # why the view before it did
    charter: Charter | None = None  # where the job has several nodes


class Halt(Message, frozen=True, kw_only=True):
    """A halt is due: appoint the last step."""

    why: str


class Lease(Message, frozen=True, kw_only=True):
    step: int


class Release(Message, frozen=True, kw_only=True):
    slot: int


class Flush(msgspec.Struct, frozen=True, kw_only=True):
    """What is on its way from this node to a deeper tier."""

    tier: str
    step: int
    bytes: int  # that are there, or about to be,
    of_bytes: int  # of so many


class Durable(Message, frozen=True, kw_only=True):
    step: int
    base: int  # the newest base on the disk; records lead from there to `step`
    base_write_s: float = -1.0  # what the last base and the last records took; -1: there were none
    record_write_s: float = -1.0
    protected: int = -1  # as far as a lost node would leave it,
    shared: int = -1  # and the loss of all of them,
    shared_base: int = -1  # and the newest base there
    shared_next: int = -1  # the step that goes to the deepest tier, now or when it comes
    protected_missed: int = -1  # the newest steps that were to be there, and are not
    shared_missed: int = -1
    flushes: tuple[Flush, ...] = ()
    silent: tuple[str, ...] = ()  # nodes that have not been heard of lately
    trouble: str = ""  # why the disk has not more, since the last try


class Trouble(Message, frozen=True, kw_only=True):
    reason: str


class Replicated(Message, frozen=True, kw_only=True):
    """Where the replica stands; from its process to the keeper, and from there to whoever cares."""

    pid: int
    step: int  # -1: none yet
    behind: int  # steps that trainers have recorded and it has not applied
    cpu_s_per_step: float
    exact: bool
    drift_step: int = -1  # of the last comparison with a true base,
    differing: int = 0
    largest: float = 0.0


class Hold(Message, frozen=True, kw_only=True):
    """Keeper to replica: put an image of the present step aside, of all ranks, and leave it alone until the next."""


class Held(Message, frozen=True, kw_only=True):
    """Replica to keeper: in slot HELD of every replica."""

    step: int


class Inherited(Message, frozen=True, kw_only=True):
    """How many of the descriptors that come along belong to each arena."""

    counts: tuple[int, ...]
    more: bool = False  # another such message follows: the kernel takes along only so many descriptors


AnyMessage = (
    Hello | Join | BaseAt | Attach | Detach | LeaseAnswer | Persist | StopAt | Inherit | Bye | Welcome | Lease | Release
    | Durable | Trouble | Inherited | Cancel | AskDurable | AskReplica | Replicated | Hold | Held | Halt | Enrol | Stand
    | Lost | View | Convene | Convened | Stuck | Free
)  # fmt: skip


class Channel:
    """One end of a conversation."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._decoder = msgspec.msgpack.Decoder(AnyMessage)

    def send(self, message: Message, descriptors: list[int] | None = None) -> None:
        data = [msgspec.msgpack.encode(message)]
        try:
            if descriptors:
                rights = array.array("i", descriptors)
                self.connection.sendmsg(data, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            else:
                self.connection.sendmsg(data)
        except OSError as error:
            raise KeeperLost(f"the other end is gone: {error}") from error

    def receive(self) -> tuple[AnyMessage, list[int]] | None:
        """The next message and its descriptors; None at the end of the conversation."""
        try:
            data, descriptors = self._take()
        except TimeoutError:
            raise KeeperSilent(self.peer, _PATIENCE_S) from None
        except OSError:
            return None
        if not data:
            return None
        try:
            return self._decoder.decode(data), list(descriptors)
        except (msgspec.DecodeError, UnicodeDecodeError):
            for descriptor in descriptors:
                os.close(descriptor)
            return None  # another Everstep, or nobody we know: there is nothing to say to each other

    def hear(self) -> tuple[AnyMessage, list[int]] | None:
        """The same of whoever answers a question at once, and of nobody else: KeeperSilent if it does not."""
        self.connection.settimeout(_PATIENCE_S)
        try:
            return self.receive()
        finally:
            self.connection.settimeout(None)

    @property
    def peer(self) -> int:
        """The process at the other end."""
        return int.from_bytes(self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)

    def _take(self) -> tuple[bytes, list[int]]:
        """The kernel tells first of an end that left without hearing all; what that one said comes behind it."""
        try:
            return socket.recv_fds(self.connection, _MAX_MESSAGE, _MAX_DESCRIPTORS)[:2]
        except ConnectionResetError:
            return socket.recv_fds(self.connection, _MAX_MESSAGE, _MAX_DESCRIPTORS)[:2]

    def close(self) -> None:
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was closed by the other end
        self.connection.close()


def runtime_folder(run: str, path: str | None = None) -> Path:
    """The private directory of a run on this node: the keeper's socket and lock. `path`: that of arenas elsewhere."""
    folder = open_root(path) / run
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def leave(folder: Path) -> None:
    """Remove a run's directory on this node, unless an arena is still in it.

    A new life may be moving in at this very moment, so nothing is removed that could be its own: the last move is one
    that the kernel refuses for a folder that is not empty.
    """
    note = folder / OWNER_NOTE
    try:
        if any(folder.glob("rank-*")):
            return
        said = note.read_bytes() if note.exists() else b""
        note.unlink(missing_ok=True)
        try:
            folder.rmdir()
        except OSError:
            if said and folder.is_dir() and not note.exists():
                note.write_bytes(said)
    except FileNotFoundError:
        return  # somebody else has just removed it


def find_runtime_folder(run: str) -> Path:
    """The same for readers, who make nothing."""
    return arena_root(None) / run


@contextmanager
def socket_address(folder: Path) -> Iterator[str]:
    """The address of the keeper's socket, however long its folder's name; the kernel takes some hundred letters."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/keeper.sock"
    finally:
        os.close(descriptor)


def connect(run: str) -> Channel | None:
    """A channel to the keeper of a run on this node, if there is one."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with socket_address(find_runtime_folder(run)) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        return None
    return Channel(connection)
