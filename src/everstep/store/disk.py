"""A directory as a tier: O_DIRECT where the file system takes it, several threads, fsync, rename.

A blob is written under a temporary name that no reader lists, made durable, renamed without overwriting, and the
directory is made durable. Chunks are checksummed on their way out by the threads that write them.

A growing blob is written at its end, by one thread: O_DIRECT where it grows by whole blocks.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import xxhash

from everstep.errors import BadConfig, NotEnoughSpace, TierFailed
from everstep.image import BLOCK, CHUNK_BYTES, round_up
from everstep.store.blocks import chunks, publish, read_all, room_for, whole_blocks, write_all, write_padded
from everstep.store.tier import NAME, Arrived, Passing, freely, unseen
from everstep.types import Room, Survives, Traits

_THREADS = 4  # that write
_READERS = 6  # some look at what has arrived while the others wait for the disk
_TEMPORARY = ".tmp-"  # no blob is called so: names begin with a letter
_SPARE_BYTES = 16 << 20  # never fill a disk to its last byte


class DiskTier:
    before: Callable[[str], None] = staticmethod(lambda operation: None)
    direct = True
    durable = True

    def __init__(self, root: Path, *, name: str = "disk", survives: Survives = Survives.REBOOT) -> None:
        self.root, self.name = root, name
        self.traits = Traits(survives=survives, shared=False, appends=True)
        self.wrote_direct = False  # whether the last large put went past the page cache
        self._rooted: set[str] = set()  # growing blobs whose names are durable; whoever made them may have died before

    # -- writing

    def put(self, name: str, data: memoryview, passing: Passing = freely) -> tuple[int, ...]:
        path = self._path(name)
        if path.exists():
            raise FileExistsError(errno.EEXIST, "a name never changes its content", str(path))
        data = data.cast("B")
        if not self.has_room(len(data)):
            raise self._full(len(data))
        with self._failing(f"writing {name}", len(data)):
            self._make_folder(path.parent)
            temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex[:12]}-{path.name}")
            try:
                checksums = self._write(temporary, data, passing)
                self.before(f"rename {name}")
                publish(temporary, path)
            finally:
                self.before(f"unlink temporary {name}")
                temporary.unlink(missing_ok=True)
            self._sync_folder(path.parent)
            return checksums

    def _write(self, path: Path, data: memoryview, passing: Passing) -> tuple[int, ...]:
        self.before(f"create {path.name}")
        descriptor, direct = self._open_for_writing(path, len(data))
        try:
            offsets = range(0, len(data), CHUNK_BYTES)

            def write_chunk(offset: int) -> int:
                chunk = data[offset : offset + CHUNK_BYTES]
                passing(len(chunk))
                checksum = int(xxhash.xxh3_64_intdigest(chunk))  # before the write: the disk does not wait for the last
                self.before(f"write {path.name} at {offset}")
                if direct and len(chunk) % BLOCK:
                    write_padded(descriptor, chunk, offset)
                else:
                    write_all(descriptor, chunk, offset)
                return checksum

            if len(offsets) > 1:
                with ThreadPoolExecutor(_THREADS) as pool:
                    checksums = tuple(pool.map(write_chunk, offsets))
            else:
                checksums = tuple(map(write_chunk, offsets))
            if direct and len(data) % BLOCK:
                os.ftruncate(descriptor, len(data))
            if self.durable:
                self.before(f"fsync {path.name}")
                os.fsync(descriptor)
            if len(data) >= CHUNK_BYTES:
                self.wrote_direct = direct
            return checksums
        finally:
            os.close(descriptor)

    def _open_for_writing(self, path: Path, size: int) -> tuple[int, bool]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        if self.direct and size >= BLOCK:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o644), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                path.unlink(missing_ok=True)  # some file systems create the file before they refuse
        return os.open(path, flags, 0o644), False

    def receive(self, name: str, size: int) -> Incoming:
        """A blob that comes in pieces, in any order. FileExistsError if it is there."""
        path = self._path(name)
        if path.exists():
            raise FileExistsError(errno.EEXIST, "a name never changes its content", str(path))
        if not self.has_room(size):
            raise self._full(size)
        with self._failing(f"writing {name}", size):
            self._make_folder(path.parent)
            return Incoming(self, path)

    # -- growing

    def append(self, name: str, parts: Sequence[memoryview]) -> None:
        path = self._path(name)
        parts = [part.cast("B") for part in parts]
        size = sum(map(len, parts))
        if not self.has_room(size):
            raise self._full(size)
        with self._failing(f"appending to {name}", size):
            self._make_folder(path.parent)
            is_new = not path.exists()
            self.before(f"append {name}")
            descriptor, end, direct = self._open_for_appending(path, size)
            try:
                self._extend(name, descriptor, parts, end, direct)
                if name not in self._rooted:
                    self._sync_folder(path.parent)
                    self._sync_folder(path.parent.parent)
                    self._rooted.add(name)
            except OSError:
                self._undo(name, descriptor, end, is_new)
                raise
            finally:
                os.close(descriptor)

    def _extend(self, name: str, descriptor: int, parts: Sequence[memoryview], end: int, direct: bool) -> None:
        for piece in whole_blocks(parts) if direct else chunks(parts):
            self.before(f"write {name} at {end}")
            write_all(descriptor, piece, end)
            end += len(piece)
        if self.durable:
            self.before(f"fsync {name}")
            os.fdatasync(descriptor)

    def _undo(self, name: str, descriptor: int, end: int, is_new: bool) -> None:
        """Take back what a failed append wrote; what this leaves is a torn end."""
        try:
            self.before(f"cut {name}")
            os.ftruncate(descriptor, end)
            if is_new:
                self._path(name).unlink(missing_ok=True)
            elif self.durable:
                os.fsync(descriptor)
        except OSError:
            return  # the append's own error is the one to tell

    def _open_for_appending(self, path: Path, size: int) -> tuple[int, int, bool]:
        """A descriptor, where the file ends, and whether writes must be whole blocks."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o644)
        end = os.fstat(descriptor).st_size
        if not self.direct or size % BLOCK or end % BLOCK:
            return descriptor, end, False
        try:
            direct = os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return descriptor, end, False
            os.close(descriptor)
            raise
        os.close(descriptor)
        return direct, end, True

    def cut(self, name: str, length: int) -> None:
        path = self._path(name)
        with self._failing(f"cutting {name}"):
            if self.size(name) <= length:
                return
            self.before(f"cut {name}")
            descriptor = os.open(path, os.O_WRONLY)
            try:
                os.ftruncate(descriptor, length)
                if self.durable:
                    self.before(f"fsync {name}")
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)

    # -- reading

    def get(self, name: str, *, room: Room = room_for, arrived: Arrived = unseen) -> memoryview:
        path = self._path(name)
        size = self.size(name)
        with self._failing(f"reading {name}"):
            if size == 0:
                return memoryview(b"")
            buffer = room(round_up(size, BLOCK))
            descriptor, direct = self._open_for_reading(path, size)
            try:

                def read_chunk(offset: int) -> None:
                    end = min(offset + CHUNK_BYTES, round_up(size, BLOCK) if direct else size)
                    read_all(descriptor, buffer[offset:end], offset, size)
                    arrived(offset, buffer[offset : min(end, size)])

                offsets = range(0, size, CHUNK_BYTES)
                if len(offsets) > 1:
                    with ThreadPoolExecutor(_READERS) as pool:
                        list(pool.map(read_chunk, offsets))
                else:
                    read_chunk(0)
            finally:
                os.close(descriptor)
            return buffer[:size]

    def _open_for_reading(self, path: Path, size: int) -> tuple[int, bool]:
        if self.direct and size >= CHUNK_BYTES:
            try:
                return os.open(path, os.O_RDONLY | os.O_DIRECT), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return os.open(path, os.O_RDONLY), False

    def read(self, name: str, offset: int, into: memoryview) -> int:
        with self._failing(f"reading {name}"):
            descriptor = os.open(self._path(name), os.O_RDONLY)
            try:
                at = 0
                while at < len(into) and (count := os.preadv(descriptor, [into[at:]], offset + at)):
                    at += count
                return at
            finally:
                os.close(descriptor)

    def view(self, name: str) -> memoryview:
        path = self._path(name)
        with self._failing(f"reading {name}"), path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return memoryview(b"")  # nothing cannot be mapped
            return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))

    def size(self, name: str) -> int:
        return self._path(name).stat().st_size

    def names(self, folder: str = "") -> list[str]:
        base = self.root / folder if folder else self.root
        prefix = f"{folder}/" if folder else ""
        try:
            found = [entry.name for entry in os.scandir(base) if entry.is_file(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(prefix + name for name in found if NAME.fullmatch(name))

    def folders(self) -> list[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def free_bytes(self) -> int:
        base = self.root
        while not base.exists():
            base = base.parent
        status = os.statvfs(base)
        return status.f_bavail * status.f_frsize

    def has_room(self, size: int) -> bool:
        return self.free_bytes() >= size + _SPARE_BYTES

    def _full(self, size: int) -> NotEnoughSpace:
        return NotEnoughSpace(str(self.root), size, self.free_bytes(), _SPARE_BYTES)

    # -- removing

    def delete(self, name: str) -> None:
        path = self._path(name)
        with self._failing(f"deleting {name}"):
            self.before(f"delete {name}")
            self._rooted.discard(name)
            if path.is_dir() and not path.is_symlink():  # nobody of ours has made it, and it would stay in the way
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            if path.parent.exists():
                self._sync_folder(path.parent)

    def delete_folder(self, folder: str) -> None:
        with self._failing(f"deleting {folder}"):
            self.before(f"delete {folder}")
            self._rooted = {name for name in self._rooted if not name.startswith(f"{folder}/")}
            while (self.root / folder).exists():
                try:
                    shutil.rmtree(self.root / folder)
                except FileNotFoundError:
                    continue  # the keeper of another rank lets go of the same

    def rename_folder(self, folder: str, to: str) -> None:
        with self._failing(f"renaming {folder}"):
            self.before(f"rename {folder}")
            os.rename(self.root / folder, self.root / to)
            self._sync_folder(self.root)

    def sweep(self, age_s: float) -> int:
        removed = 0
        folders = [self.root, *(self.root / folder for folder in self.folders())]
        for path in (path for folder in folders for path in folder.glob(f"{_TEMPORARY}*")):
            try:
                if time.time() - path.stat().st_mtime >= age_s:
                    path.unlink()
                    removed += 1
            except FileNotFoundError:
                continue
        return removed

    # -- small things

    def _path(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise BadConfig(f"{name!r} is not a name that a tier can hold")
        return self.root / name

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            self.before(f"mkdir {folder.name}")
            self._new_folder(folder)
            self._sync_folder(folder.parent)

    def _new_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def _sync_folder(self, folder: Path) -> None:
        if not self.durable:
            return
        self.before(f"fsync folder {folder.name}")
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def _failing(self, what: str, needed_bytes: int = 0) -> Iterator[None]:
        """Name the tier in whatever the operating system complains about."""
        try:
            yield
        except (FileExistsError, FileNotFoundError, TierFailed):
            raise
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._full(needed_bytes) from error
            raise TierFailed(error.errno, f"{self.name} failed {what}: {error.strerror}", str(self.root)) from error


class Incoming:
    """A blob on its way in: nothing of it is listed before it is finished."""

    def __init__(self, tier: DiskTier, path: Path) -> None:
        self._tier, self._path = tier, path
        self._temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex[:12]}-{path.name}")
        self._descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, offset: int, data: memoryview) -> None:
        with self._tier._failing(f"writing {self._path.name}", len(data)):
            self._tier.before(f"write {self._path.name} at {offset}")
            write_all(self._descriptor, data.cast("B"), offset)

    def finish(self) -> None:
        with self._tier._failing(f"writing {self._path.name}"):
            try:
                if self._tier.durable:
                    self._tier.before(f"fsync {self._path.name}")
                    os.fsync(self._descriptor)
                self._tier.before(f"rename {self._path.name}")
                publish(self._temporary, self._path)
            finally:
                self.abandon()
            self._tier._sync_folder(self._path.parent)

    def abandon(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._temporary.unlink(missing_ok=True)
