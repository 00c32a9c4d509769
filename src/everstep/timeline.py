"""When each process did what: spans, in a file of its own, that survive it.

Whoever marks a span pays for a clock and an append to a list; a thread of the process writes what has gathered a few
times a second, so nobody ever waits for a medium. What a killed process had marked in its last quarter of a second is
lost with it. The file stays small: once it is full, of the steps in its older half every second one goes.
"""

from __future__ import annotations

import atexit
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Protocol

import xxhash

LIMIT_BYTES = 4 << 20
_REST_S = 0.25
_JUMP_S = 0.01  # by which somebody has set the clock of the node
_REMEMBERED = 50_000  # spans that could not be written yet
_MANY = 2048  # spans a block, when they are written anew
_VERSION = 1
_MAGIC = b"EVTL"
_BLOCK = struct.Struct("<4sHHIIQ")  # magic, version, bytes a span, pid, spans, checksum of them
_SPAN = struct.Struct("<dfHHQ")  # begin, seconds, kind, part, step
_DEVICE_PARTS = 128  # more than per cent there are


class Kind(IntEnum):
    """What a span is of. `part`: which bucket, optimizer or rank, where there are several."""

    STEP = 1  # from cut to cut
    DATA = 2  # until the loop had its batch
    COMPUTE = 3  # forward and backward, where they cannot be told apart
    FORWARD = 4  # until DDP had its first bucket of gradients
    BACKWARD = 5  # from there to the first update
    COMMUNICATION = 6  # from the first bucket until the last one was reduced
    GATE = 7  # an update waited for copies
    UPDATE = 8  # an optimizer's step
    RECORD = 9  # gradients were copied in front of it
    CUT = 10  # all that is done between two steps
    COPY = 11  # a base, from the cut to its seal
    BUCKET = 12  # a part of it
    DRAIN = 13  # a record, from a device to its seal
    PERSIST = 20  # a base to the disk
    APPEND = 21  # records to the log
    PROTECT = 22  # a base to other nodes
    FLUSH = 23  # a base to a deeper tier
    RECOVERY = 30  # all of a resume
    LOAD = 31  # finding, reading and checking a past
    REPLAY = 32  # repeating steps
    DEVICE = 40  # how busy one was: see device_part; `step` numbers such spans


_ONCE = (Kind.RECOVERY, Kind.LOAD, Kind.REPLAY)  # of a life: they stay however old they are


class Mark(Protocol):
    """Takes note of a span, in seconds of time.monotonic()."""

    def __call__(self, kind: Kind, step: int, begin: float, end: float, part: int = 0) -> None: ...


def unmarked(kind: Kind, step: int, begin: float, end: float, part: int = 0) -> None:
    """For whoever is not watched."""


class Span(NamedTuple):
    begin: float  # since the epoch
    seconds: float
    kind: int  # a Kind, or what a later version knows
    part: int
    step: int
    pid: int

    @property
    def end(self) -> float:
        return self.begin + self.seconds


class Timeline:
    """The file of one process. It may vanish or fill its disk without hurting anyone."""

    def __init__(self, path: Path, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path, self._limit, self._pid = path, limit_bytes, os.getpid()
        self._since = time.time() - time.monotonic()  # all spans of a process are on one clock
        self._marked: deque[tuple[Kind, int, float, float, int]] = deque(maxlen=_REMEMBERED)
        self._writing = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="everstep-timeline", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def mark(self, kind: Kind, step: int, begin: float, end: float, part: int = 0) -> None:
        self._marked.append((kind, step, begin, end, part))

    def close(self) -> None:
        """Write what is left; a medium that does not answer is not waited for."""
        atexit.unregister(self.close)
        if os.getpid() == self._pid:  # a child of this process has nothing to say
            self._ending.set()
            self._thread.join(timeout=5.0)

    def _work(self) -> None:
        while not self._ending.wait(_REST_S):
            self.flush()
        self.flush()

    def flush(self) -> None:
        """Write what has gathered."""
        with self._writing:
            self._write()

    def _write(self) -> None:
        since = time.time() - time.monotonic()
        if abs(since - self._since) > _JUMP_S:
            self._since = since
        gathered = [self._marked[i] for i in range(len(self._marked))]
        if not gathered:
            return
        spans = b"".join(
            _SPAN.pack(self._since + begin, end - begin, kind, min(part, 0xFFFF), max(step, 0))
            for kind, step, begin, end, part in gathered
        )
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                block = _block(self._pid, spans)
                if os.write(descriptor, block) < len(block):
                    return  # torn: readers pass over it, and the next block brings the same again
                size = os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
            for _ in gathered:
                self._marked.popleft()
            if size >= self._limit:
                _thin(self.path)
        except OSError:
            return  # a full disk must not stop training; the next block brings these along


def _block(pid: int, spans: bytes) -> bytes:
    count = len(spans) // _SPAN.size
    return _BLOCK.pack(_MAGIC, _VERSION, _SPAN.size, pid, count, xxhash.xxh3_64_intdigest(spans)) + spans


def _blocks(data: bytes, problems: list[str]) -> Iterator[tuple[int, bytes]]:
    """The whole ones; what is torn between them, as a killed process leaves it, is passed over."""
    at = torn = 0
    while at < len(data):
        if len(data) - at >= _BLOCK.size and data.startswith(_MAGIC, at):
            _, version, size, pid, count, checksum = _BLOCK.unpack_from(data, at)
            if version > _VERSION or size != _SPAN.size:
                problems.append(f"from byte {at} on it was written by a newer everstep (version {version})")
                return
            spans = data[at + _BLOCK.size : at + _BLOCK.size + count * size]
            if len(spans) == count * size and xxhash.xxh3_64_intdigest(spans) == checksum:
                yield pid, spans
                at += _BLOCK.size + len(spans)
                continue
        following = data.find(_MAGIC, at + 1)
        torn += (len(data) if following < 0 else following) - at
        at = len(data) if following < 0 else following
    if torn:
        problems.append(f"{torn} bytes of it are torn or damaged")


def _thin(path: Path) -> None:
    """Of the steps in the older half of a file every second one goes."""
    import numpy as np  # readers do without

    form = np.dtype([("begin", "<f8"), ("seconds", "<f4"), ("kind", "<u2"), ("part", "<u2"), ("step", "<u8")])
    runs = [
        (pid, np.frombuffer(b"".join(spans for _, spans in blocks), form))
        for pid, blocks in groupby(_blocks(path.read_bytes(), []), lambda block: block[0])
    ]
    all_spans = np.concatenate([spans for _, spans in runs])
    older = np.arange(len(all_spans)) < len(all_spans) // 2
    kept = np.unique(all_spans["step"][older])[1::2]
    stays = ~older | np.isin(all_spans["step"], kept) | np.isin(all_spans["kind"], _ONCE)
    at = 0
    with open(path.with_suffix(".tmp"), "wb") as file:
        for pid, spans in runs:
            left = spans[stays[at : at + len(spans)]]
            file.writelines(_block(pid, part.tobytes()) for part in np.split(left, range(_MANY, len(left), _MANY)))
            at += len(spans)
    os.replace(path.with_suffix(".tmp"), path)


class Track(NamedTuple):
    """What one process, or several that followed each other as the same rank or keeper, did."""

    name: str  # "rank 3" or "keeper of node-a"
    spans: list[Span]  # in the order of their beginning
    problems: list[str]


def timeline_of_rank(directory: Path, rank: int) -> Path:
    return directory / f"timeline-rank-{rank:05d}.bin"


def timeline_of_keeper(directory: Path, node: str) -> Path:
    return directory / f"timeline-keeper-{node}.bin"


def timeline_of_devices(directory: Path, node: str) -> Path:
    """A file of its own: twenty spans a second would push out what the keeper did."""
    return directory / f"timeline-devices-{node}.bin"


def device_part(device: int, percent: int) -> int:
    return _DEVICE_PARTS * device + percent


def device_and_percent(span: Span) -> tuple[int, int]:
    return divmod(span.part, _DEVICE_PARTS)


def read_timeline(directory: Path, newest_bytes: int | None = None) -> list[Track]:
    """What all processes of a run did, as far as their files are in this directory: ranks first.

    `newest_bytes`: only the blocks that lie whole in so much of the end of a file.
    """
    ranks = sorted(directory.glob("timeline-rank-*.bin"))
    keepers = sorted(directory.glob("timeline-keeper-*.bin"))
    return [_read(path, newest_bytes) for path in (*ranks, *keepers)]


def read_devices(directory: Path) -> list[Track]:
    """How busy the accelerators of each node were, where a keeper could know."""
    return [_read(path, None) for path in sorted(directory.glob("timeline-devices-*.bin"))]


def _read(path: Path, newest_bytes: int | None) -> Track:
    whose, _, name = path.stem.removeprefix("timeline-").partition("-")
    problems: list[str] = []
    try:
        with open(path, "rb") as file:
            file.seek(0 if newest_bytes is None else max(0, path.stat().st_size - newest_bytes))
            data = file.read()
    except OSError as error:
        data, problems = b"", [f"it cannot be read: {error.strerror}"]
    spans = [
        Span(begin, seconds, kind, part, step, pid)
        for pid, block in _blocks(data, problems)
        for begin, seconds, kind, part, step in _SPAN.iter_unpack(block)
    ]
    title = f"rank {int(name)}" if whose == "rank" and name.isdigit() else f"{whose} of {name}"
    return Track(title, sorted(spans), problems)
