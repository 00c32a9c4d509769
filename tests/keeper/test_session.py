"""What a keeper borrows from trainers, and what it holds of them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from everstep.capture.arena import Arena, ArenaKind
from everstep.errors import Damaged, KeeperLost
from everstep.image import FORMAT, ImageLayout, lay_out
from everstep.keeper import client
from everstep.keeper import session as sessions
from everstep.keeper.keeper import Keeper
from everstep.keeper.lane import HeldBase
from everstep.keeper.logbook import Logbook
from everstep.keeper.process import keeper_log
from everstep.keeper.protocol import AnyMessage, Bye, Channel, Hello, Lease, LeaseAnswer, Release, Trouble
from everstep.keeper.session import Session, lease_all
from everstep.store.disk import DiskTier
from everstep.types import ImageInfo

RUN = "0" * 32


def layout(rank: int = 0, world: int = 1) -> ImageLayout:
    return lay_out([], ImageInfo(format=FORMAT, run=RUN, rank=rank, world=world), 4096)


def make_arena(kind: ArenaKind = "base", *, rank: int = 0, world: int = 1, slots: int = 3) -> Arena:
    return Arena.create(None, kind=kind, run=RUN, rank=rank, world=world, layout=layout(rank, world), slots=slots)


def hello(directory: Path, *, rank: int = 0, world: int = 1, generation: str = "1") -> Hello:
    return Hello(
        rank=rank, world=world, local=world, local_ranks=tuple(range(world)), ranks_here=tuple(range(world)),
        pid=os.getpid(), run=RUN,
        directory=str(directory), generation=generation, resumed_from=None, every_steps=None, every_s=None,
        every_capture=False, keep_last=1, keep_every=None, lose_steps=1, lose_s=None, linger_s=0.0, torch="",
    )  # fmt: skip


@dataclass
class Trainer:
    """The trainer's end of a session."""

    session: Session
    channel: Channel

    def heard(self) -> list[object]:
        self.channel.connection.setblocking(False)
        found: list[object] = []
        while (said := self.channel.receive()) is not None:
            found.append(said[0])
        return found


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[list[Trainer]]:
    """Two ranks with a base of step 5, none of which answers by itself."""
    found = []
    for rank in (0, 1):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        session = Session(hello(tmp_path, rank=rank, world=2), Channel(ours), arena=make_arena(rank=rank, world=2))
        assert session.arena is not None
        session.arena.seal(rank, step=5, cut_time=0.0, generation="1")
        found.append(Trainer(session, Channel(theirs)))
    yield found
    for one in found:
        one.channel.close()
        one.session.channel.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_LEASE_TIMEOUT_S", 0.2)


@pytest.mark.usefixtures("impatient")
def test_a_lease_that_is_granted_too_late_is_given_back(trainers: list[Trainer]) -> None:
    """Else the trainer would keep that slot for a reader that has long gone on, and run out of slots."""
    one = trainers[0]
    assert lease_all([one.session], 5) == [None]
    one.session.answers.put(LeaseAnswer(step=5, slot=0))  # it was busy for a while
    one.heard()
    lease_all([one.session], 5)
    assert one.heard() == [Release(slot=0), Lease(step=5)]


@pytest.mark.usefixtures("impatient")
def test_a_lease_of_another_step_that_comes_while_one_waits_is_given_back(
    trainers: list[Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, tell = trainers[0], Session.tell

    def answer_twice(session: Session, message: AnyMessage) -> None:
        tell(session, message)
        if isinstance(message, Lease):
            session.answers.put(LeaseAnswer(step=4, slot=2))
            session.answers.put(LeaseAnswer(step=5, slot=0))

    monkeypatch.setattr(Session, "tell", answer_twice)
    assert lease_all([one.session], 5) == [0]
    assert one.heard() == [Lease(step=5), Release(slot=2)]


@pytest.mark.usefixtures("impatient")
def test_one_rank_does_not_answer_for_another(trainers: list[Trainer]) -> None:
    first, second = trainers
    first.session.answers.put(LeaseAnswer(step=5, slot=0))
    assert lease_all([second.session], 5) == [None]


def test_values_that_were_followed_by_others_hold_no_memory(tmp_path: Path) -> None:
    book = Logbook(DiskTier(tmp_path), lambda event: None)
    ours, _theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    session = Session(hello(tmp_path), Channel(ours))
    first, second = make_arena("values"), make_arena("values")
    session.take_in(first, book)
    session.take_in(second, book)
    assert session.values is second
    assert first.descriptors == []


def test_all_that_a_rank_left_is_given_up_when_the_next_life_has_fewer_ranks(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, lambda event: None, inline=True)
    ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    for rank in (0, 1):
        keeper._welcome(Channel(ends[rank][0]), hello(tmp_path, rank=rank, world=2))
    gone = keeper._roster.sessions[1]
    gone.arena, gone.ring, gone.values, gone.replica = (
        make_arena(kind, rank=1, world=2) for kind in ("base", "log", "values", "replica")
    )
    gone.outgrown.append(make_arena(rank=1, world=2))
    keeper._welcome(Channel(ends[2][0]), hello(tmp_path, generation="2"))
    assert len(keeper._roster.overtaken) == 5


def test_more_memory_than_fits_one_message_is_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where arenas are memfds, a few rings have more descriptors than the kernel takes along at once."""
    keeper = Keeper(tmp_path, lambda event: None, inline=True)
    for rank in (0, 1):
        ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keeper._welcome(Channel(ours), hello(tmp_path, rank=rank, world=2))
        session = keeper._roster.sessions[rank]
        session.arena = make_arena(rank=rank, world=2)
        session.ring = make_arena("log", rank=rank, world=2, slots=150)
    theirs, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(10)
    asked = Channel(mine)
    monkeypatch.setattr(client, "connect", lambda run: asked)
    answering = threading.Thread(target=keeper._hear, args=(Channel(theirs),))
    answering.start()
    found = client.inherited(RUN)
    answering.join()
    assert sorted((arena.rank, arena.kind, len(arena.slots)) for arena in found) == [
        (0, "base", 3), (0, "log", 150), (1, "base", 3), (1, "log", 150),
    ]  # fmt: skip


def test_what_is_held_for_others_to_read_is_not_another_base(tmp_path: Path) -> None:
    """The state changed its shape while a base was held: the slots of its new arena are others."""
    ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    session = Session(hello(tmp_path), Channel(ours), arena=make_arena())
    assert session.arena is not None
    session.arena.seal(1, step=5, cut_time=0.0, generation="1")
    held = HeldBase(5, [session], [1])
    assert [seal.step for _, _, seal in held.images()] == [5]
    session.arena = make_arena()
    with pytest.raises(Damaged):
        held.images()
    session.arena.seal(1, step=6, cut_time=0.0, generation="1")
    with pytest.raises(Damaged):
        held.images()


def hung_up(_: str) -> Channel:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    return Channel(ours)


@pytest.mark.parametrize("words", ["", "Traceback\n  File\nBadConfig: keepers of several nodes need zmq\n\n"])
def test_the_trainer_says_what_a_keeper_died_of_that_hung_up(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper_log(tmp_path).write_text(words)
    monkeypatch.setattr(client, "connect", hung_up)
    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    with pytest.raises(KeeperLost, match="after 5 attempts") as found:
        client.KeeperClient("process", RUN, tmp_path, lambda _: None).open(hello(tmp_path))
    assert ("BadConfig: keepers of several nodes need zmq" in str(found.value)) == bool(words)
    assert (str(keeper_log(tmp_path)) in str(found.value)) == bool(words)


def test_what_was_said_before_leaving_is_heard_though_the_other_end_left_without_listening() -> None:
    """The kernel tells of an end with unread messages before it hands out what that end has said."""
    ours, theirs = map(Channel, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    ours.send(Trouble(reason="nobody reads this"))
    theirs.send(Bye(final=True))
    theirs.close()
    assert ours.receive() == (Bye(final=True), [])
    assert ours.receive() is None
    ours.close()
