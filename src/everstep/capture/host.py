"""Where on this machine arenas may lie, and how much room there is for them."""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from everstep.errors import BadConfig, NotEnoughMemory
from everstep.topology import node_name

SHARED_MEMORY = Path("/dev/shm")
_MEMORY, _OVERCOMMIT = Path("/proc/meminfo"), Path("/proc/sys/vm/overcommit_memory")
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which the mmap module does not name
_PIECE_BYTES = 16 << 20  # that a thread maps at once: nobody else maps anything meanwhile
_libc = ctypes.CDLL(None, use_errno=True)


def arena_root(path: str | None, environment: Mapping[str, str] = os.environ) -> Path:
    """The private directory of this user's arenas, sockets and locks; without shared memory, of the latter only.

    `environment`: of another process, which may be of another node.
    """
    base = Path(path) if path else SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    if not base.is_dir():
        raise BadConfig(f"Memory(path={str(base)!r}) is not a directory")
    node = environment.get("EVERSTEP_NODE")  # several nodes on one machine have nothing in common
    return base / (f"everstep-{os.getuid()}-{node_name(environment)}" if node else f"everstep-{os.getuid()}")


def open_root(path: str | None) -> Path:
    """Make it if need be, and refuse one that somebody else could write to."""
    root = arena_root(path)
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or root.is_symlink():
        raise BadConfig(f"{root} is not private to this user (mode {status.st_mode & 0o777:o}); remove it or chmod 700")
    return root


def make_private(folder: Path) -> None:
    """With all above it that is missing, of which mkdir(parents=True) would make folders for everybody."""
    for one in (*reversed(folder.parents), folder):
        if not one.is_dir():
            one.mkdir(mode=0o700, exist_ok=True)


def free_memory(root: Path | None) -> int:
    """Bytes that an arena may still take: the least of mount, machine and control group."""
    limits = []
    if root is not None:
        mount = os.statvfs(root if root.exists() else root.parent)
        limits.append(mount.f_bavail * mount.f_frsize)
    if root is None or is_memory(root):
        lines = (line.split() for line in _MEMORY.read_text().splitlines())
        free = {name: int(kilobytes) * 1024 for name, kilobytes, *_ in lines}
        limits.append(free["MemAvailable:"])
        limits.extend(_left_to_promise(free))
        limits.extend(_control_group())
    return min(limits)


def is_memory(root: Path) -> bool:
    return str(root).startswith(str(SHARED_MEMORY))


def _left_to_promise(memory: Mapping[str, int]) -> list[int]:
    """Where the system promises no more memory than it has, used or not."""
    try:
        is_strict = _OVERCOMMIT.read_text().strip() == "2"
        return [max(0, memory["CommitLimit:"] - memory["Committed_AS:"])] if is_strict else []
    except (OSError, KeyError):
        return []


def _control_group() -> list[int]:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return []
    return [] if limit == "max" else [max(0, int(limit) - used)]


def choose_place(path: str | None, needed_bytes: int, slots: int) -> Path | None:
    """The directory for an arena of this size, or None for memfds; too little memory of any kind is refused here."""
    advice = f"Free some, lower Memory(slots={slots}), or put the arena elsewhere with Memory(path=...)."
    if path is not None:
        root = open_root(path)
        if free_memory(root) < needed_bytes:
            raise NotEnoughMemory(str(root), needed_bytes, free_memory(root), advice)
        return root
    if free_memory(None) < needed_bytes:
        raise NotEnoughMemory("memory", needed_bytes, free_memory(None), advice)
    if not SHARED_MEMORY.is_dir():
        return None
    root = open_root(None)
    return root if free_memory(root) >= needed_bytes else None


def most_files() -> int:
    """That a process may have open if it wants to. A slot of an arena is two: a descriptor, and that of its mapping."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def allow_many_files() -> None:
    """Shells often begin with 1,024, and the arenas of a node may need more. Where that is refused, those must do."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files(), most_files()))


def populate(spans: Sequence[tuple[int, int]], *, threads: int = 16) -> int:
    """Map all pages of some memory, address and size of each, by so many processors: 0, or the error of the kernel."""

    def touch(begin: int, size: int) -> int:  # mmap.madvise would stop all other threads meanwhile
        failed = _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _POPULATE_WRITE)
        return ctypes.get_errno() if failed else 0

    pieces = [
        (begin + at, min(_PIECE_BYTES, size - at)) for begin, size in spans for at in range(0, size, _PIECE_BYTES)
    ]
    with ThreadPoolExecutor(min(threads, len(os.sched_getaffinity(0)))) as pool:
        return max(pool.map(lambda piece: touch(*piece), pieces), default=0)
