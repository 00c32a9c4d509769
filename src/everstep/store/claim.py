"""A directory becomes a run's: made, named on the first day, and held by one job at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep import topology
from everstep.errors import BadConfig, Damaged, EverstepError, RunHeld, TierFailed
from everstep.events import Degraded, Sink
from everstep.image import FORMAT
from everstep.store.disk import DiskTier
from everstep.store.manifest import RUN_RECORD, put_record, read_record, run_name
from everstep.store.places import Places
from everstep.store.tier import Tier
from everstep.topology import Topology
from everstep.types import RunRecord

_LOCK_PATIENCE_S = 5.0


@dataclass(slots=True)
class Claim:
    """A run that is this job's, until it is given back or the process ends."""

    run: str
    disk_is_common: bool  # all nodes see the same disk
    lock: int | None

    def give_back(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


def take(places: Places, place: Topology, emit: Sink) -> Claim:
    """Make a run this job's. All ranks must ask; RunHeld on all of them if it is another's."""
    directory = Path(places.directory)
    common = is_common(directory, place)
    disk_is_common = is_common(Path(places.disk), place) if places.disk else common
    lock = _hold(directory, place, common=common)
    with _given_back_on_error(lock):
        return Claim(_identity(places, place, emit, common=common), disk_is_common, lock)


@contextmanager
def _given_back_on_error(lock: int | None) -> Iterator[None]:
    """A rank may be lost while all of them ask: whoever is left asks again."""
    try:
        yield
    except BaseException:
        if lock is not None and lock >= 0:
            os.close(lock)
        raise


def is_common(directory: Path, place: Topology) -> bool:
    """Whether all nodes see the same directory: rank 0 leaves a note there, and the others look for it.

    Where it cannot leave one, because the directory is only to be read, each node is taken to have its own.
    """
    if not place.has_many_nodes:
        return True
    name = f".seen-{uuid.uuid4().hex[:12]}".encode() if place.rank == 0 else b""
    if place.rank == 0:
        with suppress(OSError):
            (directory / name.decode()).touch()
    name = topology.exchange(name, place)[0]
    note = directory / name.decode()
    seen = topology.exchange(b"1" if note.exists() else b"0", place)
    if place.rank == 0:
        note.unlink(missing_ok=True)
    return b"0" not in seen


def _hold(directory: Path, place: Topology, *, common: bool) -> int | None:
    """Take the run for this job: a rank holds a lock that the kernel releases when it dies. All ranks hear of it.

    Where every node has a directory of its own, one rank of each.
    """
    lock, holder = None, b""
    if place.rank == 0 or (place.is_leader and not common):
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
    with _given_back_on_error(lock):
        holder = next(filter(None, topology.exchange(holder, place)), b"")
        if holder:
            pid, _, host = holder.decode(errors="replace").partition(" ")
            number = int(pid) if pid.isdigit() else 0
            raise RunHeld(str(directory), number, host, is_own=(number, host) == (os.getpid(), place.node))
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
        needed = f"a run must be able to write to its directory: {error.strerror}"
        raise TierFailed(error.errno, needed, str(path)) from None
    deadline = time.monotonic() + (_LOCK_PATIENCE_S if patience_s is None else patience_s)
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock, b""
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                refused = f"the directory cannot be locked: {error.strerror}"
                raise TierFailed(error.errno, refused, str(path)) from None
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


def make(places: Places) -> None:
    for directory in filter(None, (places.directory, places.disk)):
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TierFailed(error.errno, f"the run's directory cannot be made: {error.strerror}", directory) from None


def _identity(places: Places, place: Topology, emit: Sink, *, common: bool) -> str:
    """The run's name, the same on every rank: what its directories say, else its deeper tiers, else a new one.

    A directory that was wiped is given the name again. A deeper tier that cannot be reached is done without, if a name
    is known nearer; keepers sign it when it is back. All ranks raise if no name can be agreed on.
    """
    writes = place.rank == 0 or (place.is_leader and not common)
    mine, failure = _Told(), None
    if writes:
        try:
            mine = _Told(name=_known(DiskTier(Path(places.directory))))
            if place.rank == 0:
                mine.deeper, mine.absent = _ask_deeper(places)
        except (EverstepError, OSError) as error:
            mine, failure = _Told(problem=f"{place.node}: {error}"), error
    told = [msgspec.json.decode(answer, type=_Told) for answer in topology.exchange(msgspec.json.encode(mine), place)]
    problems = [one.problem for one in told if one.problem]
    if failure is not None:
        raise failure
    if problems:
        raise _unknown_past(problems)
    name = _agree({place.nodes[rank]: one.name for rank, one in enumerate(told) if one.name}, told[0].deeper)
    if told[0].absent and not name:
        raise _unknown_past(told[0].absent.values())
    name = name or topology.exchange(uuid.uuid4().hex.encode(), place)[0].decode()
    problem, failure = "", None
    try:
        if writes:
            sign(DiskTier(Path(places.directory)), name, emit)
            places.write()
        if place.rank == 0:
            for source, reason in mine.absent.items():
                emit(Degraded(what=f"the run goes on without its {source} tier until that is back", reason=reason))
            for source, tier in places.deeper_tiers().items():
                if source not in mine.absent:
                    sign(tier, name, emit)
        if place.is_leader and places.disk:
            sign(places.disk_tier(), name, emit)
    except (EverstepError, OSError) as error:
        problem, failure = f"{place.node}: {error}", error
    problems = [answer.decode() for answer in topology.exchange(problem.encode(), place) if answer]
    if failure is not None:
        raise failure
    if problems:
        raise TierFailed(errno.EIO, "the run cannot be written down: " + "; ".join(problems))
    return name


def _unknown_past(problems: Iterable[str]) -> TierFailed:
    return TierFailed(errno.EIO, "it cannot be told whether this run has a past: " + "; ".join(problems))


class _Told(msgspec.Struct):
    """What one rank knows of the run's name."""

    name: str = ""
    deeper: dict[str, str] = {}
    absent: dict[str, str] = {}  # deeper tiers that cannot be reached, and why
    problem: str = ""


def _ask_deeper(places: Places) -> tuple[dict[str, str], dict[str, str]]:
    """What each deeper tier says whose it is, and why others say nothing."""
    names, absent = dict[str, str](), dict[str, str]()
    for source, tier in places.deeper_tiers().items():
        try:
            if source == "shared":
                Path(places.shared).mkdir(parents=True, exist_ok=True)
            names[source] = _known(tier)
        except OSError as error:
            absent[source] = str(error)
    return names, absent


def _known(tier: Tier) -> str:
    try:
        return run_name(tier)
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _agree(of_nodes: dict[str, str], deeper: dict[str, str]) -> str:
    """The name on which all that is there agrees; empty if nothing is there."""
    known = {**of_nodes, **{source: name for source, name in deeper.items() if name}}
    if len(set(known.values())) > 1:
        said = ", ".join(f"{where} has run {name[:8]}" for where, name in sorted(known.items()))
        raise BadConfig(f"these directories are of different runs: {said}; give the run places of its own")
    return next(iter(known.values()), "")


def sign(tier: Tier, name: str, emit: Sink) -> None:
    """Say on a tier whose it is. BadConfig if it is another run's."""
    known = _known(tier)
    if known not in ("", name):
        raise BadConfig(f"{tier.name} is another run's ({known[:8]}); give the run places of its own")
    try:
        read_record(tier, RUN_RECORD, RunRecord)
        return
    except FileNotFoundError:
        pass  # it is written below
    except Damaged as error:
        emit(Degraded(what=f"{RUN_RECORD} was made anew from the commits", reason=str(error)))
        tier.delete(RUN_RECORD)
    try:
        put_record(tier, RUN_RECORD, RunRecord(format=FORMAT, run=name, created_time=time.time()))
    except FileExistsError:
        sign(tier, name, emit)  # another node that sees this tier was a moment earlier, or another run
