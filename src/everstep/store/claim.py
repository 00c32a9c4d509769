"""A directory becomes a run's: made, named on the first day, and held by one job at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep import topology
from everstep.errors import EverstepError, RunHeld, TierFailed
from everstep.events import Degraded, Sink
from everstep.image import FORMAT
from everstep.store.disk import DiskTier
from everstep.store.manifest import RUN_RECORD, encode, read_record, run_name
from everstep.topology import Topology
from everstep.types import RunRecord

_LOCK_PATIENCE_S = 5.0


def hold(directory: Path, place: Topology) -> int | None:
    """Take the run for this job: rank 0 holds a lock that the kernel releases when it dies. All ranks hear of it."""
    lock, holder = None, b""
    if place.rank == 0:
        path = directory / "holder"
        me = f"{os.getpid()} {place.node}".encode()
        if _has_open(path):
            holder = me  # the kernel's lock keeps out other processes only
        else:
            lock, holder = _lock(path)
            if not holder:
                try:
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, me, 0)
                except OSError:
                    pass  # a full disk: the lock holds, only its holder's name is not to be had
    holder = topology.exchange(holder, place)[0]
    if holder:
        pid, _, host = holder.decode(errors="replace").partition(" ")
        raise RunHeld(str(directory), int(pid) if pid.isdigit() else 0, host)
    return lock


@contextmanager
def keep_away(directory: Path) -> Iterator[bool]:
    """Whether no job has this run; if so none can take it meanwhile."""
    path = directory / "holder"
    lock, holder = (-1, b"this process") if _has_open(path) else _lock(path, patience_s=0.0)
    try:
        yield not holder
    finally:
        if not holder:
            os.close(lock)


def _lock(path: Path, patience_s: float | None = None) -> tuple[int, bytes]:
    """The lock, and who has it if it is not ours. It goes with the process; a loader's workers do not inherit it."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise TierFailed(error.errno, f"a run must be able to write to its directory: {error.strerror}", path) from None
    deadline = time.monotonic() + (_LOCK_PATIENCE_S if patience_s is None else patience_s)
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock, b""
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise TierFailed(error.errno, f"the directory cannot be locked: {error.strerror}", path) from None
        if time.monotonic() > deadline:
            holder = os.pread(lock, 200, 0) or b"0 unknown"
            os.close(lock)
            return -1, holder
        time.sleep(0.1)


def _has_open(path: Path) -> bool:
    """Whether a run of this very process is in this directory."""
    try:
        wanted = path.stat()
    except OSError:
        return False
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.path.samestat(os.fstat(int(name)), wanted):
                return True
        except OSError:
            continue  # it was the one that listed them
    return False


def make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TierFailed(error.errno, f"the run's directory cannot be made: {error.strerror}", directory) from None


def identity(directory: Path, place: Topology, emit: Sink) -> str:
    """The run's name, made by rank 0 on the first day."""
    name, failure = b"", None
    if place.rank == 0:
        try:
            name = _name(DiskTier(directory), emit).encode()
        except EverstepError as error:
            failure = error
    name = topology.exchange(name, place)[0]
    if failure is not None:
        raise failure
    if not name:
        raise EverstepError(f"rank 0 cannot use {directory}; see its message")
    return name.decode()


def _name(tier: DiskTier, emit: Sink) -> str:
    is_new = False
    try:
        name = run_name(tier)
    except FileNotFoundError:
        name, is_new = uuid.uuid4().hex, True
    try:
        read_record(tier, RUN_RECORD, RunRecord)
    except (OSError, EverstepError) as error:
        if not is_new:
            emit(Degraded(what=f"{RUN_RECORD} was made anew from the commits", reason=str(error)))
        tier.delete(RUN_RECORD)
        tier.put(RUN_RECORD, memoryview(encode(RunRecord(format=FORMAT, run=name, created_time=time.time()))))
    return name
