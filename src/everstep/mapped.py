"""Memory that is mapped, and that a device may know by its address: it is told before the address is free again.

Else the next mapping there would be taken for this one, and a device would copy into pages that nobody sees. So what is
pinned belongs to its mapping, from before it is pinned until it is let go, whoever forgets it and whatever happens.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable


class Mapped(mmap.mmap):
    """What a device copies into or from is let go by whoever has waited for that, or else when nobody refers to it."""

    pinned_bytes = 0  # from its beginning on
    _let_go: Callable[[], None]
    _pinned_by: int  # a forked child has the mapping, and not the device

    @property
    def span(self) -> tuple[int, int]:
        """Address and size."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self)), len(self)

    def pin(self, size: int, register: Callable[[], int], let_go: Callable[[], None]) -> int:
        """Have its first bytes registered, unless they are: 0, or what is wrong."""
        if self.pinned_bytes == size:
            return 0
        self.unpin()
        self._let_go, self._pinned_by, self.pinned_bytes = let_go, os.getpid(), size  # first: we may be interrupted
        try:
            status = register()
        except Exception:
            self.unpin()  # it may have been done before it failed
            raise
        if status != 0:
            self.pinned_bytes = 0
        return status

    def unpin(self) -> None:
        if self.pinned_bytes and self._pinned_by == os.getpid():
            self._let_go()
        self.pinned_bytes = 0

    def resize(self, newsize: int) -> None:
        if newsize < self.pinned_bytes:
            self.unpin()
        super().resize(newsize)

    def close(self) -> None:
        try:
            self.unpin()
        finally:
            super().close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_ending():  # else all of it ends with the process
            self.unpin()
