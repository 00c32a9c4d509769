"""The memory of an arena's slots: taken from the system all at once, and mapped; with names, or without any yet."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everstep.capture.host import populate
from everstep.mapped import Mapped


@dataclass(slots=True, weakref_slot=True)
class Taken:
    """Open files of one length, and their mappings, until an arena takes both, or nobody refers to it any more."""

    files: list[int] = field(default_factory=list)
    buffers: list[Mapped] = field(default_factory=list)

    def __post_init__(self) -> None:
        weakref.finalize(self, close_all, self.files).atexit = False

    @classmethod
    def nameless(cls, root: Path | None, count: int) -> Taken:
        """Files that are gone when nobody has them open: memfds, or such as can still be given a name under `root`."""
        taken = cls()
        for _ in range(count):
            if root is None:
                taken.files.append(os.memfd_create("everstep-reserve", os.MFD_CLOEXEC))
            else:
                taken.files.append(os.open(root, os.O_RDWR | os.O_TMPFILE, 0o600))
        return taken

    def map(self, size: int) -> None:
        for file in self.files:
            os.ftruncate(file, size)
            self.buffers.append(Mapped(file, size))

    def take(self, size: int, *, in_memory: bool) -> None:
        """Map the files with all that they need taken, or raise OSError.

        Pages of memory are best taken by touching them all at once, where they stay mapped: to allocate them first, or
        to map them again, takes half as long once more.
        """
        self.map(size)
        spans = [buffer.span for buffer in self.buffers]
        problem = populate(spans) if in_memory else errno.EINVAL
        if problem not in (0, errno.EINVAL):  # which is the word of kernels that are too old for that
            raise OSError(problem, os.strerror(problem))
        if problem:
            for file in self.files:
                os.posix_fallocate(file, 0, size)
            populate(spans)  # where the kernel does not, they are mapped as they are touched

    def name(self, folder: Path, names: Sequence[str]) -> None:
        """Give files that have no name theirs."""
        into = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            for file, name in zip(self.files, names, strict=True):
                os.link(f"/proc/self/fd/{file}", name, dst_dir_fd=into)  # without dst_dir_fd it would link the link
        finally:
            os.close(into)

    def cut(self, size: int) -> None:
        """Give back all that lies behind this size. What is pinned stays so if it is just that."""
        for file, buffer in zip(self.files, self.buffers, strict=True):
            if buffer.pinned_bytes != size:
                buffer.unpin()
            os.ftruncate(file, size)  # other threads run meanwhile, which resize() alone would not let them
            buffer.resize(size)

    def unpin(self) -> None:
        """Else a device would hold the memory, whatever becomes of the files."""
        for buffer in self.buffers:
            buffer.unpin()

    def empty(self) -> None:
        """Give back all of the memory, whoever else has inherited the files: a page behind their end cannot be had."""
        for file in self.files:
            os.ftruncate(file, 0)

    def let_go(self) -> None:
        unmap(self.buffers)
        self.buffers.clear()
        close_all(self.files)


def close_all(files: list[int]) -> None:
    """Whoever has this very list finds them closed."""
    while files:
        os.close(files.pop())


def unmap(buffers: Iterable[mmap.mmap]) -> None:
    for buffer in buffers:
        try:
            buffer.close()
        except BufferError:
            pass  # tensors still look into it; the mapping goes with the last of them
