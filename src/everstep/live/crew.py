"""The processes of a job on one node: started, watched, and made whole again when one of them dies.

The death of a worker is its own: the others are left alone, since they go on by themselves (`run.live()`). In its seat
a fresh process is started that stands by, so that the next loss finds a spare too. Only when nobody trains any more,
and not because the work is done, the whole job is started again.

Needs no torch, and knows nothing of what the workers do but how they end, and which rank each says that it has.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from everstep.errors import BadConfig, Restart
from everstep.signals import heard_by

STANDS_BY = -2  # the rank of one that had a place, and has none for now

_LOOK_S = 0.05  # between two looks at the processes
_GRACE_S = 60.0  # for processes that are asked to end
_TELL_S = 1.0  # that a process waits for its crew to listen
_VARIABLE = "EVERSTEP_CREW"  # where a process tells which rank it has, and under which number
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How many processes a job has, here and elsewhere. `master`: HOST:PORT; empty if this node is the only one."""

    workers: int  # of each node
    spares: int = 0  # of this node
    nodes: int = 1
    node_rank: int = 0
    master: str = ""
    max_restarts: int = 30
    stands_by: bool = False  # this node is not part of the job: all of its processes wait for places that become free

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--nproc", self.workers, 1), ("--spares", self.spares, 0), ("--nodes", self.nodes, 1),
            ("--max-restarts", self.max_restarts, 0),
        ):  # fmt: skip
            if value < least:
                raise BadConfig(f"{name} must be at least {least}, not {value}")
        if not 0 <= self.node_rank < self.nodes:
            raise BadConfig(f"--node-rank must be from 0 to {self.nodes - 1}, not {self.node_rank}")
        host, _, port = self.master.rpartition(":")
        if self.master and not (host and port.isascii() and port.isdigit()):
            raise BadConfig(f"--master must be HOST:PORT, not {self.master!r}")
        if self.nodes > 1 and not self.master:
            raise BadConfig("several nodes need --master HOST:PORT, the same on all of them: a free port of the first")
        if self.stands_by and (self.spares or self.nodes > 1 or not self.master):
            raise BadConfig("--stand-by needs --nproc and --master HOST:PORT, as the job has it, and nothing else")


@dataclass(slots=True)
class _Member:
    seat: int  # its LOCAL_RANK
    rank: int | None  # None: it stands by
    number: int  # that no other process of this crew has
    process: subprocess.Popen[bytes]

    def __str__(self) -> str:
        return f"{'a spare' if self.rank is None else f'rank {self.rank}'} (process {self.process.pid})"


class Crew:
    def __init__(self, words: Sequence[str], size: Size, environment: Mapping[str, str]) -> None:
        self._words, self._size, self._environment = words, size, environment
        self._members: list[_Member] = []
        self._codes: list[int] = []  # of workers of this start, in the order in which they ended
        self._started = 0  # processes, ever
        self._restarts = 0
        self._unheard: list[int] = []  # signals that are to be passed on
        self._ends_at = math.inf  # the latest; not before somebody asks for it
        self._name = f"everstep-crew-{uuid.uuid4().hex}"
        self._ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ear.bind(f"\0{self._name}")
        self._ear.setblocking(False)
        self._master = size.master
        self._stands_by = size.stands_by

    def work(self) -> int:
        """Until the work is done, or nobody is to start again. The exit code."""
        with self._ear, _free_port() as port, heard_by(self._hear):
            self._master = self._master or f"127.0.0.1:{port}"
            try:
                self._work(self._size)
            finally:
                self._end(signal.SIGKILL)
        return _outcome(self._codes)

    def _work(self, size: Size) -> None:
        while True:
            self._codes.clear()
            for seat in range(size.workers + size.spares):
                has_rank = seat < size.workers and not self._stands_by
                self._start(seat, size.node_rank * size.workers + seat if has_rank else None)
            while self._is_at_work():
                self._look()
                time.sleep(_LOOK_S)
            self._end(signal.SIGTERM)  # spares: there is nothing left that they could join
            if self._is_asked or not _is_to_be_started_again(self._codes, alone=self._is_alone):
                return None
            why = f"nobody trains any more ({', '.join(sorted({_how(code) for code in self._codes}))})"
            if self._restarts >= size.max_restarts:
                return _say(f"{why}; the job is not started again: {self._used_up()}")
            self._restarts += 1
            what = "all are started again to stand by" if self._stands_by else "the job is started again"
            _say(f"{why}: {what}, {self._count()}")

    @property
    def _is_alone(self) -> bool:
        """Whether nobody else could still go on with the job."""
        return self._size.nodes == 1 and not self._stands_by

    @property
    def _is_asked(self) -> bool:
        """Whether somebody wants all to end."""
        return self._ends_at < math.inf

    def _is_at_work(self) -> bool:
        if time.monotonic() > self._ends_at:
            return False
        if not self._is_alone and Restart.exit_code not in self._codes:
            return bool(self._members)  # a spare of this node may be needed by another
        return any(one.rank is not None for one in self._members)

    # -- processes

    def _start(self, seat: int, rank: int | None = None) -> _Member:
        self._started += 1
        host, _, port = self._master.rpartition(":")
        world = str(self._size.nodes * self._size.workers)
        if self._size.stands_by:
            world = self._environment.get("WORLD_SIZE", "1")  # it does not know it, unless it is told
        own = {
            "RANK": "0", "WORLD_SIZE": world, "EVERSTEP_SPARE": "1", "MASTER_ADDR": host, "MASTER_PORT": port,
            "LOCAL_RANK": str(seat), "LOCAL_WORLD_SIZE": str(self._size.workers),
            "OMP_NUM_THREADS": self._environment.get("OMP_NUM_THREADS", "1"),  # as under torchrun
            _VARIABLE: f"{self._name}:{self._started}",
        }  # fmt: skip
        if rank is not None:
            own |= {"RANK": str(rank), "EVERSTEP_SPARE": ""}
        us = os.getpid()
        try:
            process = subprocess.Popen(
                self._words, env={**self._environment, **own}, start_new_session=True,
                preexec_fn=lambda: _die_with(us),
            )  # fmt: skip
        except OSError as error:
            raise BadConfig(f"{self._words[0]} cannot be started: {error.strerror}") from None
        member = _Member(seat, rank, self._started, process)
        self._members.append(member)
        return member

    def _look(self) -> None:
        self._listen()
        while self._unheard:
            self._pass_on(self._unheard.pop(0))
        for one in list(self._members):
            if one.process.poll() is not None:
                self._members.remove(one)
                self._see_off(one, one.process.returncode)

    def _see_off(self, one: _Member, code: int) -> None:
        if one.rank is not None or (code == 0 and not self._is_alone):  # a spare leaves so when the run is over
            self._codes.append(code)
        if code != 0 and not self._is_asked:
            _say(f"{one} {_how(code)}: {self._make_good(one, code)}")

    def _make_good(self, one: _Member, code: int) -> str:
        """What is done about a loss."""
        if code == Restart.exit_code:
            return "the job is to be started again"
        if one.rank is None and code > 0:
            return "it is not replaced, since the next one would leave as well"
        if 0 in self._codes or not self._is_at_work():
            return "nobody needs a spare any more"
        if self._restarts >= self._size.max_restarts:
            return f"it is not replaced: {self._used_up()}"
        self._restarts += 1
        fresh = self._start(one.seat)
        return f"the others are left alone; process {fresh.process.pid} is started to stand by, {self._count()}"

    def _end(self, number: int) -> None:
        """Everybody who is still here; whoever does not end in time is killed."""
        for one in self._members:
            one.process.send_signal(number)
        deadline = min(self._ends_at, time.monotonic() + _GRACE_S)
        for one in self._members:
            try:
                one.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
            if one.rank is not None:
                self._codes.append(one.process.returncode)
        self._members.clear()

    # -- what is heard

    def _listen(self) -> None:
        """Which ranks processes have by now: spares take places, and ranks move together where nobody does."""
        while True:
            try:
                number, rank = map(int, self._ear.recv(64).split())
            except BlockingIOError:
                return
            if rank < 0 and rank != STANDS_BY:
                # the others of the job went on without those of this node, who must not be ranks of it again
                self._stands_by = not self._is_alone
                continue
            for one in self._members:
                if one.number == number:
                    one.rank = None if rank == STANDS_BY else rank

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._unheard.append(number)
        self._ends_at = min(self._ends_at, time.monotonic() + _GRACE_S)

    def _pass_on(self, number: int) -> None:
        self._codes.clear()  # of those who were lost before
        _say(f"{signal.Signals(number).name}: passed on to {len(self._members)} processes")
        for one in self._members:
            one.process.send_signal(number)

    # -- words

    def _count(self) -> str:
        return f"restart {self._restarts} of {self._size.max_restarts}"

    def _used_up(self) -> str:
        return f"the restarts are used up (--max-restarts {self._size.max_restarts})"


@contextmanager
def _free_port() -> Iterator[int]:
    """Bound here, for rank 0 to listen on: the kernel gives it to nobody who asks for any."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


def tell_crew(rank: int) -> None:
    """Say which rank this process has from now on, to the crew that it belongs to, if there is one.

    None of them (-1): the others went on without it, and whoever comes after it may only stand by. STANDS_BY: it does.
    """
    name, _, number = os.environ.get(_VARIABLE, "").partition(":")
    if not name:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
        mouth.settimeout(_TELL_S)
        try:
            mouth.sendto(f"{number} {rank}".encode(), f"\0{name}")
        except OSError:
            return  # there is no crew any more, and this process is about to end


def _is_to_be_started_again(codes: Sequence[int], *, alone: bool) -> bool:
    """After a loss, yes; an error of the program would only come again."""
    bad = _bad(codes)
    return Restart.exit_code in bad or (alone and any(code < 0 for code in bad))


def _outcome(codes: Sequence[int]) -> int:
    """0 if the work is done, else the code of the first that could not end it."""
    bad = _bad(codes)
    first = bad[0] if bad else 0
    return 128 - first if first < 0 else first


def _bad(codes: Sequence[int]) -> list[int]:
    """What was not lived through: whoever was lost before the first has done its work was done without."""
    since = codes.index(0) if 0 in codes else 0
    return [code for code in codes[since:] if code]


def _how(code: int) -> str:
    return f"left with code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def _die_with(parent: int) -> None:
    """In the child, before it becomes the program: whatever ends the crew ends it."""
    _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _say(line: str) -> None:
    print(f"everstep: {line}", file=sys.stderr, flush=True)
