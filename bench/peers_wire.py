"""How much of a socket is left for keepers of different nodes: ask() in chunks against sendall() and recv_into().

Two processes over loopback, the same bytes, turn by turn in one run; each way is compared with the raw socket of its
own turn. The asker pulls (chunks are payload of answers, into memory that is there) or pushes (payload of questions).
The MAC of payloads is exchanged for others in both processes, to see what it costs; with `none` nothing is checked.
Processor time is that of both processes: on a machine that others load it says more than the clock.

    python bench/peers_wire.py [--quick]
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import psutil
import xxhash
from common import MB, Report, Stat, Table, Target, machine, timed
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.poly1305 import Poly1305

from everstep.keeper import wire
from everstep.keeper.peer_server import Reply, Server
from everstep.keeper.peers import Answer, Ask, Peer

HERE = Path(__file__).parent
SECRET = os.urandom(32)
CHUNK = 4 << 20
HELD = memoryview(bytearray(os.urandom(1 << 20) * 64))  # what either side has
RAW = "raw socket"
PULL = "pull, 2 threads"
PUSH = "push, 2 threads"

Way = Callable[[], None]
Tag = Callable[[wire.Keys, int, Iterable[memoryview]], bytes]


class Get(Ask, frozen=True, kw_only=True):
    offset: int


class Put(Ask, frozen=True, kw_only=True):
    pass


class Done(Answer, frozen=True, kw_only=True):
    pass


def piece(number: int) -> memoryview:
    at = number * CHUNK % len(HELD)
    return HELD[at : at + CHUNK]


def handle(ask: Get | Put, payload: memoryview | None) -> Reply:
    return Reply(Done(), [piece(ask.offset)] if isinstance(ask, Get) else ())


def _blake2b(keys: wire.Keys, sequence: int, views: Iterable[memoryview]) -> bytes:
    maker = hashlib.blake2b(key=keys.payload)
    for view in views:
        maker.update(view)
    return maker.digest()


def _sha256(keys: wire.Keys, sequence: int, views: Iterable[memoryview]) -> bytes:
    maker = hmac.new(keys.payload, digestmod="sha256")
    for view in views:
        maker.update(view)
    return maker.digest()


def _poly1305(keys: wire.Keys, sequence: int, views: Iterable[memoryview]) -> bytes:
    maker = Poly1305(keys.payload)  # in earnest its key may be used once; the cost is the same
    for view in views:
        maker.update(view)
    return maker.finalize()


def _xxh3(keys: wire.Keys, sequence: int, views: Iterable[memoryview]) -> bytes:
    maker = xxhash.xxh3_128()
    for view in views:
        maker.update(view)
    return maker.digest()


MACS: dict[str, Tag] = {
    "none": lambda keys, sequence, views: b"",
    "xxh3_128 (no key)": _xxh3,
    "Poly1305": _poly1305,
    "HMAC-SHA256": _sha256,
    "BLAKE2b, keyed": _blake2b,
}


def _serve(tell: Connection, encrypt: bool) -> None:
    asks: msgspec.msgpack.Decoder[Get | Put] = msgspec.msgpack.Decoder(Get | Put)
    server = Server("b", SECRET, asks, handle, advertise="127.0.0.1", bind="127.0.0.1", encrypt=encrypt)
    tell.send(server.address)
    threading.Event().wait()


def _serve_raw(tell: Connection, count: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    tell.send(listener.getsockname()[1])
    connection, _ = listener.accept()
    while connection.recv(1):
        for number in range(count):
            connection.sendall(piece(number))


@contextmanager
def child(target: Callable[..., None], *given: object) -> Iterator[str]:
    hear, tell = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=target, args=(tell, *given), daemon=True)
    process.start()
    try:
        yield hear.recv()
    finally:
        process.kill()
        process.join()


@contextmanager
def raw(count: int, target: memoryview) -> Iterator[Way]:
    with child(_serve_raw, count) as port, socket.create_connection(("127.0.0.1", int(port))) as connection:

        def way() -> None:
            connection.send(b"g")
            for number in range(count):
                at = number * CHUNK % len(target)
                place, got = target[at : at + CHUNK], 0
                while got < CHUNK:
                    got += connection.recv_into(place[got:])

        yield way


@contextmanager
def asking(
    count: int, target: memoryview, *, threads: int, push: bool = False, encrypt: bool = False, tag: Tag | None = None
) -> Iterator[Way]:
    ours = wire.Keys.tag

    def exchange(tag: Tag | None) -> None:
        wire.Keys.tag = tag or ours  # type: ignore[method-assign, assignment]

    def part(peer: Peer[Done], first: int) -> None:
        for number in range(first, count, threads):
            at = number * CHUNK % len(target)
            if push:
                peer.ask(Put(), [piece(number)])
            else:
                peer.ask(Get(offset=number), into=target[at : at + CHUNK])

    exchange(tag)  # the server is a fork, so it has the same
    try:
        with (
            child(_serve, encrypt) as address,
            Peer("b", address, SECRET, msgspec.msgpack.Decoder(Done), encrypt=encrypt, timeout_s=60) as peer,
        ):

            def way() -> None:
                exchange(tag)
                askers = [threading.Thread(target=part, args=(peer, first)) for first in range(threads)]
                for asker in askers:
                    asker.start()
                for asker in askers:
                    asker.join()
                exchange(None)

            exchange(None)
            yield way
    finally:
        exchange(None)


def primitives() -> Table:
    """What each costs by itself, on one core, over a chunk that is in memory."""
    keys = wire.Secret(SECRET, "b").session(bytes(16), bytes(16)).asks
    box, view, out = AESGCM(keys.payload), piece(0), bytearray(CHUNK + 16)
    ways: dict[str, Way] = {"GMAC (AES-256-GCM)": lambda: keys.tag(1, [view])}
    ways |= {name: lambda tag=tag: tag(keys, 1, [view]) for name, tag in MACS.items() if name != "none"}  # type: ignore[misc]
    ways["AES-256-GCM, encrypting"] = lambda: box.encrypt_into(bytes(12), view, None, out)
    rows = []
    for name, way in ways.items():
        rates = Stat()
        for _ in range(25):
            with timed() as timer:
                way()
            rates.values.append(CHUNK / timer.seconds)
        rows.append([name, rates.text(1e-9)])
    return Table("Primitives by themselves", ["over 4 MiB", "GB/s, median (range)"], rows)


def processor_s() -> float:
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer bytes and turns")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    count, turns = (32, 3) if given.quick else (128, 9)
    target = memoryview(bytearray(len(HELD)))
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        ways = {RAW: stack.enter_context(raw(count, target))}
        for threads in (1, 2, 4):
            name = f"pull, {threads} thread{'s' if threads > 1 else ''}"
            ways[name] = stack.enter_context(asking(count, target, threads=threads))
        ways[PUSH] = stack.enter_context(asking(count, target, threads=2, push=True))
        ways["pull, 2 threads, CURVE"] = stack.enter_context(asking(count, target, threads=2, encrypt=True))
        for name, tag in MACS.items():
            ways[f"{PULL}, MAC: {name}"] = stack.enter_context(asking(count, target, threads=2, tag=tag))
        seconds, busy = {name: Stat() for name in ways}, {name: Stat() for name in ways}
        for turn in range(turns + 1):  # the first one opens sessions and touches memory
            for name, way in ways.items():
                before = processor_s()
                with timed() as timer:
                    way()
                if turn:
                    seconds[name].values.append(timer.seconds)
                    busy[name].values.append(processor_s() - before)
    if target != HELD:
        raise SystemExit("the bytes that arrived are not those that were sent")
    size = count * CHUNK
    rates = {name: Stat([size / s for s in stat.values]) for name, stat in seconds.items()}
    shares = {
        name: Stat([100 * b / a for a, b in zip(seconds[name].values, seconds[RAW].values, strict=True)])
        for name in ways
    }
    report = Report("Between keepers: the wire", f"python bench/peers_wire.py{' --quick' * given.quick}", machine())
    note = (
        f"{size / MB:.0f} MB in chunks of 4 MiB over loopback, {turns} turns, GMAC unless another MAC is named. "
        "Share: of the raw socket in the same turn. Processor: seconds of both processes for a GB. "
        f"Load average before: {load:.1f}."
    )
    rows = [[name, rates[name].text(1e-9), shares[name].text(), busy[name].text(1e9 / size)] for name in ways]
    headers = ["way", "GB/s, median (range)", "% of raw, median (range)", "processor s/GB"]
    report.tables.append(Table("Bulk", headers, rows, note))
    report.tables.append(primitives())
    # A copy for a partner is pushed; parity and restarts pull.
    share = shares[PUSH].median
    quiet = load < len(os.sched_getaffinity(0)) / 2  # else more threads get more of the machine, and win by that
    verdict = share >= 70 if quiet else None
    report.targets.append(Target("a copy for a partner, of a raw socket", ">= 70 %", f"{share:.0f} %", verdict))
    report.targets.append(
        Target("bytes that are pulled, of a raw socket", "none set", f"{shares[PULL].median:.0f} %", None)
    )
    report.data = {"bytes": size} | {
        what: {name: stat.values for name, stat in stats.items()}
        for what, stats in (("seconds", seconds), ("processor_s", busy))
    }
    report.save(given.out, "wire")
    print(report.markdown())


if __name__ == "__main__":
    main()
