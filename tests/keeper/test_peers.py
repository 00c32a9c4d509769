"""Keepers of different nodes: real processes, real sockets, on loopback."""

from __future__ import annotations

import hashlib
import mmap
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import psutil
import pytest

from everstep.errors import Damaged, PeerFailed, PeerLost
from everstep.keeper import peer_server, wire
from everstep.keeper.peer_server import Reply, Server
from everstep.keeper.peers import Answer, Ask, Peer
from everstep.keeper.rate import Limiter
from everstep.keeper.wire import Kind, zmq

SECRET = b"a secret of thirty-two bytes....."
MIB = 1 << 20


class Echo(Ask, frozen=True, kw_only=True):
    text: str


class Get(Ask, frozen=True, kw_only=True):
    seed: int
    size: int
    parts: int = 1


class Put(Ask, frozen=True, kw_only=True):
    pass


class Sleep(Ask, frozen=True, kw_only=True):
    seconds: float


class Fail(Ask, frozen=True, kw_only=True):
    reason: str


class Count(Ask, frozen=True, kw_only=True):
    pass


class Said(Answer, frozen=True, kw_only=True):
    text: str


AnyAsk = Echo | Get | Put | Sleep | Fail | Count
ASKS: msgspec.msgpack.Decoder[AnyAsk] = msgspec.msgpack.Decoder(AnyAsk)
ANSWERS = msgspec.msgpack.Decoder(Said)


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


class Handler:
    """What every server here can do. It counts, so that a question that came twice is seen."""

    def __init__(self) -> None:
        self.echoes = 0
        self.released = 0

    def __call__(self, ask: AnyAsk, payload: memoryview | None) -> Reply:
        match ask:
            case Echo(text=text):
                self.echoes += 1
                return Reply(Said(text=text))
            case Get(seed=seed, size=size, parts=parts):
                whole = memoryview(content(seed, size))
                cut = size // parts
                views = [whole[i * cut : size if i == parts - 1 else (i + 1) * cut] for i in range(parts)]
                return Reply(Said(text=""), views, self._release)
            case Put():
                return Reply(Said(text=hashlib.sha256(payload or b"").hexdigest()))
            case Sleep(seconds=seconds):
                time.sleep(seconds)
                return Reply(Said(text="awake"))
            case Fail(reason=reason):
                raise LookupError(reason)
            case Count():
                return Reply(Said(text=f"{self.echoes} {self.released}"))

    def _release(self) -> None:
        self.released += 1


def _serve(tell: Connection, node: str, secret: bytes, port: int, encrypt: bool, bind: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a keeper does
    server = Server(node, secret, ASKS, Handler(), advertise=bind, bind=bind, port=port, encrypt=encrypt)
    tell.send(server.address)
    threading.Event().wait()


@dataclass
class Node:
    name: str
    address: str
    pid: int
    encrypt: bool

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@contextmanager
def node(
    name: str = "b", *, secret: bytes = SECRET, port: int = 0, encrypt: bool = False, bind: str = "127.0.0.1"
) -> Iterator[Node]:
    """A keeper's server in a forked process of its own."""
    hear, tell = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_serve, args=(tell, name, secret, port, encrypt, bind), daemon=True
    )
    process.start()
    try:
        assert hear.poll(60), "the server does not start"
        yield Node(name, hear.recv(), int(process.pid or 0), encrypt)
    finally:
        process.kill()
        process.join()


def peer_of(to: Node, *, secret: bytes = SECRET, timeout_s: float = 60.0, limiter: Limiter | None = None) -> Peer[Said]:
    return Peer(to.name, to.address, secret, ANSWERS, encrypt=to.encrypt, timeout_s=timeout_s, limiter=limiter)


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def encrypt(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def other(encrypt: bool) -> Iterator[Node]:
    with node(encrypt=encrypt) as started:
        yield started


@pytest.fixture
def peer(other: Node) -> Iterator[Peer[Said]]:
    with peer_of(other) as made:
        yield made


# -- asking and answering


def test_an_ask_gets_its_answer(peer: Peer[Said]) -> None:
    for turn in range(20):
        answered = peer.ask(Echo(text=f"turn {turn}"))
        assert answered.answer == Said(text=f"turn {turn}")
        assert answered.payload is None


def test_payloads_arrive_whole_both_ways(peer: Peer[Said]) -> None:
    for size in (1, 100, 70_000, 3 * MIB + 17):
        sent = content(size, size)
        halves = [memoryview(sent)[: size // 2], memoryview(sent)[size // 2 :]]
        assert peer.ask(Put(), halves).answer.text == hashlib.sha256(sent).hexdigest()
        for parts in (1, 3):
            assert peer.ask(Get(seed=1, size=size, parts=parts)).payload == content(1, size)


def test_64_mib_in_chunks_arrive_where_they_belong(peer: Peer[Said]) -> None:
    target = memoryview(bytearray(64 * MIB))
    chunk = 4 * MIB
    for number in range(16):
        part = target[number * chunk : (number + 1) * chunk]
        answered = peer.ask(Get(seed=number, size=chunk, parts=2), into=part)
        assert answered.payload is not None and len(answered.payload) == chunk
    assert all(target[n * chunk : (n + 1) * chunk] == content(n, chunk) for n in range(16))


def test_a_payload_that_does_not_fit_is_refused_and_nothing_is_written(peer: Peer[Said]) -> None:
    target = memoryview(bytearray(1000))
    with pytest.raises(PeerFailed, match="2000 bytes do not fit into 1000"):
        peer.ask(Get(seed=1, size=2000), into=target)
    assert not any(target)
    with pytest.raises(ValueError, match="send it in several"):
        peer.ask(Put(), [memoryview(bytearray(wire.MAX_PAYLOAD_BYTES + 1))])
    assert peer.ask(Echo(text="on")).answer.text == "on"


def test_a_handler_that_raises_is_told_to_the_asker_and_the_server_goes_on(peer: Peer[Said]) -> None:
    for _ in range(20):  # more than it has workers
        with pytest.raises(PeerFailed, match="LookupError: no such step") as raised:
            peer.ask(Fail(reason="no such step"))
        assert (raised.value.node, raised.value.asked) == ("b", "Fail")
    assert peer.ask(Echo(text="on")).answer.text == "on"


def test_many_threads_ask_at_once_and_each_gets_its_own_answer(peer: Peer[Said]) -> None:
    wrong: list[object] = []

    def ask(number: int) -> None:
        for turn in range(15):
            text = f"{number} {turn}"
            size = 1000 * number + turn + 1
            if peer.ask(Echo(text=text)).answer.text != text:
                wrong.append(text)
            if peer.ask(Get(seed=number, size=size)).payload != content(number, size):
                wrong.append(size)

    in_threads(ask, 24)
    assert not wrong


def in_threads(work: Callable[[int], None], count: int) -> None:
    failed: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed, failed
    assert not any(thread.is_alive() for thread in threads)


def test_a_slow_handler_does_not_hold_up_the_others(peer: Peer[Said], other: Node) -> None:
    slow = threading.Thread(target=peer.ask, args=(Sleep(seconds=5),))
    slow.start()
    with peer_of(other) as second:
        for one in (peer, second):
            assert one.ask(Echo(text="quick")).answer.text == "quick"
    assert slow.is_alive()
    slow.join()


def test_payloads_are_released_once_when_they_are_sent_or_nobody_wants_them(peer: Peer[Said], other: Node) -> None:
    for _ in range(5):
        peer.ask(Get(seed=1, size=2 * MIB))
        peer.ask(Get(seed=1, size=10))
    with peer_of(other, timeout_s=0.05) as hasty:  # making the content takes longer than it waits
        assert hasty.ask(Echo(text=""), timeout_s=10.0)
        with pytest.raises(PeerLost):
            hasty.ask(Get(seed=1, size=60 * MIB))
    wait_until(lambda: peer.ask(Count()).answer.text == "1 11")


def test_an_asker_that_stops_does_not_keep_what_it_was_to_get(monkeypatch: pytest.MonkeyPatch, encrypt: bool) -> None:
    monkeypatch.setattr(peer_server, "_DEAD_MS", 2000)
    handler = Handler()
    with Server("b", SECRET, ASKS, handler, advertise="127.0.0.1", encrypt=encrypt) as server:

        def stop() -> None:
            peer = Peer("b", server.address, SECRET, ANSWERS, encrypt=encrypt)
            peer.ask(Echo(text="here"))
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()  # making the content takes longer
            peer.ask(Get(seed=1, size=60 * MIB))

        asker = multiprocessing.get_context("fork").Process(target=stop, daemon=True)
        asker.start()
        try:
            wait_until(lambda: handler.released == 1)
        finally:
            asker.kill()
            asker.join()


def test_no_more_is_taken_on_than_there_are_workers() -> None:
    go = threading.Event()
    working: list[str] = []

    def handle(ask: AnyAsk, payload: memoryview | None) -> Reply:
        working.append(type(ask).__name__)
        assert go.wait(60)
        return Reply(Said(text="done"))

    with Server("b", SECRET, ASKS, handle, advertise="127.0.0.1", workers=2) as server:
        with Peer("b", server.address, SECRET, ANSWERS) as one, Peer("b", server.address, SECRET, ANSWERS) as two:
            asking = threading.Thread(target=in_threads, args=(lambda n: (one, two)[n % 2].ask(Put()) and None, 8))
            asking.start()
            wait_until(lambda: len(working) == 2)
            time.sleep(0.3)
            assert len(working) == 2 and not server._work.qsize()
            go.set()
            asking.join()
            assert len(working) == 8


def wait_until(true: Callable[[], bool], within_s: float = 60.0) -> None:
    until = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.05)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_both_versions_of_ip_reach_a_server_on_all_interfaces(host: str, encrypt: bool) -> None:
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with Server("b", SECRET, ASKS, Handler(), advertise=host, encrypt=encrypt) as server:
        assert server.address.startswith("[::1]:" if host == "::1" else f"{host}:")
        with Peer("b", server.address, SECRET, ANSWERS, encrypt=encrypt) as peer:
            assert peer.ask(Echo(text=host)).answer.text == host


# -- who may talk


def test_a_wrong_secret_can_neither_ask_nor_answer(encrypt: bool) -> None:
    with node(encrypt=encrypt) as right, node(secret=b"x" * 32, encrypt=encrypt) as wrong:
        for to, secret in ((right, b"x" * 32), (wrong, SECRET)):
            with peer_of(to, secret=secret, timeout_s=0.7) as stranger, pytest.raises(PeerLost):
                stranger.ask(Echo(text="let me in"))
        with peer_of(right) as friend:
            assert friend.ask(Count()).answer.text.startswith("0 ")


def test_the_server_of_another_node_does_not_answer(other: Node) -> None:
    elsewhere = Node("c", other.address, other.pid, other.encrypt)
    with peer_of(elsewhere, timeout_s=0.7) as mistaken, pytest.raises(PeerLost, match="of the same run"):
        mistaken.ask(Echo(text="are you c?"))


def test_an_encrypted_server_lets_no_unencrypted_asker_in_and_the_other_way_round(other: Node, encrypt: bool) -> None:
    otherwise = Node(other.name, other.address, other.pid, not encrypt)
    with peer_of(otherwise, timeout_s=0.7) as peer, pytest.raises(PeerLost):
        peer.ask(Echo(text="hello"))
    with peer_of(other) as friend:
        assert friend.ask(Count()).answer.text.startswith("0 ")


@pytest.mark.parametrize("of_the_run", [True, False])
def test_only_the_keys_of_the_run_pass_the_handshake(of_the_run: bool) -> None:
    """A server's public key is no secret: whoever has it still needs that of the askers."""
    secret = wire.Secret(SECRET, "b")
    context: wire.Context = zmq.Context()
    with node(encrypt=True) as to, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.curve_publickey, dealer.curve_secretkey = secret.curve("asker") if of_the_run else zmq.curve_keypair()
        dealer.curve_serverkey, _ = secret.curve("server")
        dealer.connect(f"tcp://{to.address}")
        dealer.send(wire.write_head(Kind.HELLO, wire.nonce(), 0, secret.of_kind(Kind.HELLO)))
        assert bool(dealer.poll(60_000 if of_the_run else 700)) == of_the_run
    context.term()


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="16 random bytes"):
        Peer("b", "127.0.0.1:1", b"short", ANSWERS)


def test_garbage_does_not_disturb_the_server(peer: Peer[Said], other: Node) -> None:
    greeting = bytes.fromhex("ff00000000000000017f0300") + b"NULL".ljust(20, b"\0") + bytes(32)
    dice = random.Random(1)
    for turn in range(30):
        with socket.create_connection(("127.0.0.1", other.port)) as stranger:
            stranger.sendall((greeting if turn % 2 else b"") + dice.randbytes(dice.randrange(1, 3000)))
        assert peer.ask(Echo(text="still here")).answer.text == "still here"


@contextmanager
def raw_dealer(to: Node) -> Iterator[wire.Socket]:
    """Somebody who speaks ZeroMQ, and is past the handshake."""
    context: wire.Context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    if to.encrypt:
        secret = wire.Secret(SECRET, to.name)
        dealer.curve_publickey, dealer.curve_secretkey = secret.curve("asker")
        dealer.curve_serverkey, _ = secret.curve("server")
    dealer.connect(f"tcp://{to.address}")
    try:
        yield dealer
    finally:
        dealer.close()
        context.term()


def open_session(dealer: wire.Socket, secret: wire.Secret) -> wire.Session:
    mine = wire.nonce()
    dealer.send(wire.write_head(Kind.HELLO, mine, 0, secret.of_kind(Kind.HELLO)))
    assert dealer.poll(60_000)
    return secret.session(mine, wire.read_head(dealer.recv()).verify(secret.of_kind(Kind.WELCOME)).body)


def test_truncated_and_altered_heads_are_refused(peer: Peer[Said], other: Node) -> None:
    secret = wire.Secret(SECRET, other.name)
    with raw_dealer(other) as dealer:
        session = open_session(dealer, secret)
        head = wire.seal(Kind.ASK, session, 1, msgspec.msgpack.encode(Echo(text="once")), ())
        for cut in range(len(head)):
            dealer.send(head[:cut])
        for place in (0, *range(17, len(head))):  # all but the session's name, to which there is an answer: stale
            dealer.send(head[:place] + bytes([head[place] ^ 1]) + head[place + 1 :])
        dealer.send_multipart([b"", b"", b""])
        assert not dealer.poll(500)
        assert peer.ask(Count()).answer.text == "0 0"
        dealer.send(head)
        assert dealer.poll(60_000)


def test_a_repeated_request_is_refused_also_by_a_server_that_was_started_anew(encrypt: bool) -> None:
    secret = wire.Secret(SECRET, "b")
    with node(encrypt=encrypt) as first:
        with raw_dealer(first) as dealer:
            session = open_session(dealer, secret)
            head = wire.seal(Kind.ASK, session, 1, msgspec.msgpack.encode(Echo(text="once")), ())
            dealer.send(head)
            assert dealer.poll(60_000)
            assert wire.read_head(dealer.recv()).kind is Kind.ANSWER
            dealer.send(head)
            assert not dealer.poll(500)
        with raw_dealer(first) as elsewhere:
            elsewhere.send(head)
            assert not elsewhere.poll(500)
        with peer_of(first) as peer:
            assert peer.ask(Count()).answer.text.startswith("1 ")
    with node(encrypt=encrypt) as second, raw_dealer(second) as dealer:
        dealer.send(head)
        assert dealer.poll(60_000)
        assert wire.read_head(dealer.recv()).kind is Kind.STALE
        with peer_of(second) as peer:
            assert peer.ask(Count()).answer.text.startswith("0 ")


def test_an_answer_to_another_question_is_passed_over() -> None:
    """A false server that knows the secret, and first says what was not asked."""
    secret = wire.Secret(SECRET, "b")
    context: wire.Context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def answer() -> None:
        asker, hello = router.recv_multipart()
        head = wire.read_head(hello)
        session = secret.session(head.session, wire.nonce())
        key = secret.of_kind(Kind.WELCOME)
        router.send_multipart([asker, wire.write_head(Kind.WELCOME, head.session, 0, key, session.name)])
        asker, _ = router.recv_multipart()
        old = wire.seal(Kind.ANSWER, session, 7, msgspec.msgpack.encode(Said(text="to another question")), ())
        foreign = secret.session(wire.nonce(), session.name)
        false = wire.seal(Kind.ANSWER, foreign, 1, msgspec.msgpack.encode(Said(text="from another session")), ())
        mirrored = wire.seal(Kind.ASK, session, 1, msgspec.msgpack.encode(Said(text="the wrong way")), ())
        right = wire.seal(Kind.ANSWER, session, 1, msgspec.msgpack.encode(Said(text="right")), ())
        for frame in (old, false, mirrored, b"nonsense", right):
            router.send_multipart([asker, frame])

    thread = threading.Thread(target=answer)
    thread.start()
    with Peer("b", f"127.0.0.1:{port}", SECRET, ANSWERS) as peer:
        assert peer.ask(Echo(text="?")).answer.text == "right"
    thread.join()
    router.close()
    context.term()


class Flipper:
    """Stands between asker and server, and changes one byte of one direction, once."""

    def __init__(self, port: int, *, of_answers: bool, at: int) -> None:
        self._to, self._of_answers, self._at = port, of_answers, at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            for source, target, answers in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._carry, args=(source, target, answers), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        passed = 0
        try:
            while data := bytearray(source.recv(65536)):
                if answers == self._of_answers and passed <= self._at < passed + len(data):
                    data[self._at - passed] ^= 1
                    self._at = -1
                passed += len(data)
                target.sendall(data)
        except OSError:
            pass  # one end is gone, so the other goes too
        source.close()
        target.close()

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("of_answers", [False, True], ids=["of the question", "of the answer"])
def test_a_byte_of_a_payload_that_flips_on_its_way_is_found(other: Node, of_answers: bool) -> None:
    """libzmq itself finds it where it encrypts: then the connection breaks, and the peer is lost for this question."""
    flipper = Flipper(other.port, of_answers=of_answers, at=500_000)
    between = Node(other.name, f"127.0.0.1:{flipper.port}", other.pid, other.encrypt)
    with peer_of(between, timeout_s=2.0 if other.encrypt else 60.0) as peer:
        sent, target = content(1, MIB), memoryview(bytearray(MIB))
        expected = PeerLost if other.encrypt else Damaged if of_answers else PeerFailed
        with pytest.raises(expected, match="is lost" if other.encrypt else "changed on its way"):
            if of_answers:
                peer.ask(Get(seed=1, size=MIB), into=target)
            else:
                peer.ask(Put(), [memoryview(sent)])
        assert not any(target)
        assert peer.ask(Get(seed=1, size=MIB), into=target, timeout_s=60.0).payload == sent
    flipper.close()


# -- what dies, hangs and comes back


def test_asks_go_on_when_a_killed_server_is_back_on_its_port(encrypt: bool) -> None:
    with ExitStack() as stack:
        with node(encrypt=encrypt) as first:
            peer = stack.enter_context(peer_of(first, timeout_s=1.0))
            in_threads(lambda n: peer.ask(Sleep(seconds=0.2), timeout_s=60.0), 4)  # all connections have a session now
            os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"no answer within 1\.0 s|its connection was closed") as raised:
            peer.ask(Echo(text="anybody?"))
        assert (raised.value.node, raised.value.address, raised.value.asked) == ("b", first.address, "Echo")
        with node(encrypt=encrypt, port=first.port):
            assert peer.ask(Echo(text="back"), timeout_s=60.0).answer.text == "back"
            assert peer.ask(Count(), timeout_s=60.0).answer.text == "1 0"


def test_a_server_killed_while_it_is_asked_is_lost_at_once(encrypt: bool) -> None:
    with node(encrypt=encrypt) as killed, peer_of(killed) as peer:
        took: list[float] = []

        def lose(_: int) -> None:
            with pytest.raises(PeerLost, match="its connection was closed before it answered"):
                peer.ask(Sleep(seconds=50))
            took.append(time.monotonic())

        losing = threading.Thread(target=in_threads, args=(lose, 4))
        losing.start()
        time.sleep(1.0)  # all of them are asked
        killed_at = time.monotonic()
        os.kill(killed.pid, signal.SIGKILL)
        losing.join()
        assert len(took) == 4 and max(took) - killed_at < 5.0, "nobody waits for a timeout of a minute"


def test_a_question_that_was_not_sent_yet_waits_for_the_server_to_come_back(encrypt: bool) -> None:
    with ExitStack() as stack:
        with node(encrypt=encrypt) as first:
            peer = stack.enter_context(peer_of(first))
            peer.ask(Echo(text="here"))
        time.sleep(0.3)  # the end of the connection has been noticed
        heard: list[str] = []
        asking = threading.Thread(target=lambda: heard.append(peer.ask(Echo(text="there?")).answer.text))
        asking.start()
        time.sleep(0.5)
        with node(encrypt=encrypt, port=first.port):
            asking.join()
        assert heard == ["there?"]


def test_a_session_outlives_a_restart_that_nobody_asked_during(encrypt: bool) -> None:
    with ExitStack() as stack:
        with node(encrypt=encrypt) as first:
            peer = stack.enter_context(peer_of(first))
            assert peer.ask(Echo(text="first")).answer.text == "first"
        with node(encrypt=encrypt, port=first.port):
            sent = content(5, MIB)
            assert peer.ask(Put(), [memoryview(sent)]).answer.text == hashlib.sha256(sent).hexdigest()


def test_a_stopped_server_is_lost_in_bounded_time_while_another_answers(encrypt: bool) -> None:
    with node("b", encrypt=encrypt) as stopped, node("c", encrypt=encrypt) as well:
        with peer_of(stopped, timeout_s=1.5) as hung, peer_of(well) as quick:
            hung.ask(Echo(text="before"), timeout_s=60.0)
            quick.ask(Echo(text="before"))
            os.kill(stopped.pid, signal.SIGSTOP)
            took: list[float] = []

            def lose(_: int) -> None:
                began = time.monotonic()
                with pytest.raises(PeerLost):
                    hung.ask(Put(), [memoryview(bytearray(8 * MIB))])
                took.append(time.monotonic() - began)

            losing = threading.Thread(target=in_threads, args=(lose, 12))  # more than it has connections
            losing.start()
            answered = 0
            while losing.is_alive():
                assert quick.ask(Echo(text="meanwhile")).answer.text == "meanwhile"
                answered += 1
                time.sleep(0.02)
            losing.join()
            assert len(took) == 12
            assert 1.4 < max(took) < 30, took
            assert answered > 2, "the other peer was held up"
            os.kill(stopped.pid, signal.SIGCONT)
            assert hung.ask(Echo(text="after"), timeout_s=60.0).answer.text == "after"


def test_a_late_answer_is_dropped(peer: Peer[Said]) -> None:
    for turn in range(3):
        with pytest.raises(PeerLost):
            peer.ask(Sleep(seconds=0.6), timeout_s=0.3)
        for _ in range(10):
            assert peer.ask(Echo(text=f"after {turn}")).answer.text == f"after {turn}"
            time.sleep(0.05)


def test_the_payload_is_let_go_when_the_peer_is_lost(other: Node) -> None:
    """A slot of shared memory is written again, and at last unmapped."""
    with peer_of(other) as peer:
        peer.ask(Echo(text="here"))
        os.kill(other.pid, signal.SIGSTOP)
        slot = mmap.mmap(-1, 60 * MIB)
        with memoryview(slot) as view, pytest.raises(PeerLost):
            peer.ask(Put(), [view], timeout_s=0.5)
        wait_until(lambda: unmapped(slot))


def unmapped(slot: mmap.mmap) -> bool:
    try:
        slot.close()
    except BufferError:
        return False  # pyzmq lets go of its reference a moment after it says so
    return True


def test_200_reconnects_leak_neither_threads_nor_descriptors(encrypt: bool) -> None:
    process = psutil.Process()
    with Server("b", SECRET, ASKS, Handler(), advertise="127.0.0.1", encrypt=encrypt) as server:
        with Peer("b", server.address, SECRET, ANSWERS, encrypt=encrypt) as peer:
            before = (0, 0)
            for turn in range(201):
                peer.ask(Put(), [memoryview(bytes(100_000))])
                if turn == 0:
                    before = (process.num_fds(), process.num_threads())
                with pytest.raises(PeerLost):
                    peer.ask(Sleep(seconds=0.03), timeout_s=0.0)
            peer.ask(Echo(text="all is well"))
            wait_until(lambda: process.num_fds() <= before[0] + 2 and process.num_threads() <= before[1])
    for _ in range(20):
        with Server("b", SECRET, ASKS, Handler(), advertise="127.0.0.1", encrypt=encrypt) as server:
            with Peer("b", server.address, SECRET, ANSWERS, encrypt=encrypt) as peer:
                peer.ask(Echo(text="short lives"))
    wait_until(lambda: process.num_fds() <= before[0] and process.num_threads() <= before[1])


ENDS = """
import os, sys, threading
sys.path.insert(0, {tests!r})
from test_peers import *
server = Server("b", SECRET, ASKS, Handler(), advertise="127.0.0.1", encrypt={encrypt})
peer = Peer("b", server.address, SECRET, ANSWERS, encrypt={encrypt})
lost = Peer("c", "127.0.0.1:1", SECRET, ANSWERS, encrypt={encrypt})
peer.ask(Put(), [memoryview(bytes(1 << 20))])
for ask in (lambda: peer.ask(Sleep(seconds=60)), lambda: lost.ask(Echo(text="?"), timeout_s=60)):
    threading.Thread(target=ask, daemon=True).start()
import time; time.sleep(0.3)
print("ending", flush=True)
"""


def test_an_interpreter_ends_at_once_with_questions_in_flight(encrypt: bool) -> None:
    script = ENDS.format(tests=str(Path(__file__).parent), encrypt=encrypt)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "ending\n"


def test_without_pyzmq_one_sentence_names_the_extra() -> None:
    script = "import sys; sys.modules['zmq'] = None\nimport everstep.keeper.peer_server"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "BadConfig: keepers of several nodes need zmq" in ended.stderr
    assert "pip install 'everstep[nodes]'" in ended.stderr.splitlines()[-1]


# -- a link that is cut

IN_NAMESPACE = """
import sys
sys.path.insert(0, {tests!r})
from test_peers import *
"""
ANSWER_THERE = """
server = Server("b", SECRET, ASKS, Handler(), advertise="10.77.0.2", encrypt={encrypt})
print(server.address, flush=True)
sys.stdin.read()
"""
ASK_HERE = """
with Peer("b", {address!r}, SECRET, ANSWERS, encrypt={encrypt}, timeout_s=1.0) as peer:
    for line in sys.stdin:
        began = time.monotonic()
        try:
            answered = peer.ask(Get(seed=1, size=MIB))
            said = "answered" if answered.payload == content(1, MIB) else "wrong"
        except PeerLost:
            said = "lost"
        print(said, time.monotonic() - began, flush=True)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_namespaces() -> Iterator[tuple[str, str]]:
    here, there = (f"everstep-{os.getpid()}-{side}" for side in "ab")
    try:
        ip("netns", "add", here)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here (iproute2, root): {error}")
    try:
        ip("netns", "add", there)
        ip("-n", here, "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", there)
        for name, address in ((here, "10.77.0.1/24"), (there, "10.77.0.2/24")):
            ip("-n", name, "address", "add", address, "dev", "link0")
            ip("-n", name, "link", "set", "link0", "up")
        yield here, there
    finally:
        for name in (here, there):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextmanager
def script_in(namespace: str, script: str, **values: object) -> Iterator[subprocess.Popen[str]]:
    text = (IN_NAMESPACE + script).format(tests=str(Path(__file__).parent), **values)
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", text]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def test_while_the_link_is_cut_asks_fail_in_bounded_time_and_then_go_on(encrypt: bool) -> None:
    with ExitStack() as stack:
        here, there = stack.enter_context(two_namespaces())
        server = stack.enter_context(script_in(there, ANSWER_THERE, encrypt=encrypt))
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        asker = stack.enter_context(script_in(here, ASK_HERE, address=address, encrypt=encrypt))

        def ask() -> tuple[str, float]:
            assert asker.stdin is not None and asker.stdout is not None
            asker.stdin.write("\n")
            asker.stdin.flush()
            said, took = asker.stdout.readline().split()
            return said, float(took)

        wait_until(lambda: ask()[0] == "answered")
        ip("-n", there, "link", "set", "link0", "down")
        for _ in range(4):
            said, took = ask()
            assert said == "lost"
            assert took < 30.0
        ip("-n", there, "link", "set", "link0", "up")
        wait_until(lambda: ask()[0] == "answered")
        assert [ask()[0] for _ in range(5)] == ["answered"] * 5


# -- how fast at most


def test_the_rate_holds_and_can_be_changed_while_asks_run(encrypt: bool) -> None:
    with node(encrypt=encrypt) as to:
        limiter = Limiter(None)
        with peer_of(to, limiter=limiter) as peer, peer_of(to, limiter=limiter) as another:
            chunk = memoryview(bytes(256 << 10))

            def seconds(bytes_per_s: float | None) -> float:
                limiter.change(bytes_per_s)
                began = time.monotonic()
                in_threads(lambda n: [(peer, another)[n].ask(Put(), [chunk]) for _ in range(8)] and None, 2)
                return time.monotonic() - began

            total = 16 * len(chunk)
            slow, slower = seconds(total / 1.0), seconds(total / 2.0)
            assert slow >= 0.9 and slower >= 1.8  # all but the first chunk had to wait
            assert seconds(None) < slow


def test_what_is_received_counts_too(encrypt: bool) -> None:
    with node(encrypt=encrypt) as to, peer_of(to, limiter=Limiter(4.0 * MIB)) as peer:
        began = time.monotonic()
        for _ in range(5):
            peer.ask(Get(seed=1, size=MIB), into=memoryview(bytearray(MIB)))
        assert time.monotonic() - began >= 0.9


def test_small_talk_is_not_delayed_by_what_waits_for_its_turn_and_closing_ends_the_waiting() -> None:
    with node() as to, ThreadPoolExecutor(4) as pool:
        peer, chunk = peer_of(to, limiter=Limiter(0.01 * MIB)), memoryview(bytes(MIB))
        waiting = [pool.submit(peer.ask, Put(), [chunk]) for _ in range(4)]
        time.sleep(0.2)
        began = time.monotonic()
        assert peer.ask(Echo(text="halt")).answer.text == "halt"
        peer.close()
        lost = [one.exception(timeout=60) for one in waiting]
        assert time.monotonic() - began < 20.0, "at this rate a chunk takes more than a minute"
        assert sum(isinstance(one, PeerLost) for one in lost) == 3, "all but the first"


def test_a_limiter_is_arithmetic_on_its_clock() -> None:
    now = 100.0
    limiter = Limiter(10.0, clock=lambda: now)
    first, second, third = limiter.book(20), limiter.book(30), limiter.book(1)
    assert [limiter.wait_s(ticket) for ticket in (first, second, third)] == [0.0, 2.0, 5.0]
    now += 1.0
    assert limiter.wait_s(third) == 4.0
    limiter.change(80.0)
    assert limiter.wait_s(third) == 0.5
    now += 1000.0  # nothing is saved up
    fourth, fifth = limiter.book(160), limiter.book(1)
    assert (limiter.wait_s(fourth), limiter.wait_s(fifth)) == (0.0, 2.0)
    limiter.change(None)
    assert limiter.wait_s(fifth) == 0.0
    limiter.change(1.0)
    assert limiter.wait_s(fifth) == 0.0
    with pytest.raises(ValueError, match="lets nothing through"):
        limiter.change(0)
