"""Records from a disk to a tier that outlives all nodes: what came after its newest base can be had there too.

They are taken from the log on the disk, so that no ring waits for a slow tier: a few groups of them for every base that
goes there, all at once when somebody waits for them or everybody is gone. The disk keeps what is still to be taken,
unless the tier fails or falls far behind; then the log there has a gap, and goes on behind the next base.

Records of a life follow its first base on the tier: what other lives left beyond the step that it went on from is
gone by then, so records of two lives never stand side by side. Values that records need beside them follow these.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import xxhash

from everstep.cadence import Every
from everstep.errors import Damaged
from everstep.events import Degraded, Sink
from everstep.keeper.book import Book, forget, grouped
from everstep.keeper.logbook import Logbook
from everstep.keeper.protocol import Hello
from everstep.keeper.rounds import NONE, Order
from everstep.keeper.sunk_values import SunkValues
from everstep.store.frame import Record
from everstep.store.log import LogRead, ranks_of, scan, starts
from everstep.store.tier import Tier
from everstep.types import Frame

_TICK_S = 0.02
_REST_S = 2.0  # after a failure
_GROUPS = 10  # of records, for every base
_SHARE = 0.1  # of its time, that this takes at most
_LONGEST_S = 900.0  # between two groups, if a base goes there less often than that,
_BEHIND_S = 2 * _LONGEST_S  # and until a tier that has not caught up is not waited for


class Sinking:
    def __init__(
        self, tier: Tier, disk: Logbook, hello: Hello, every: Every, emit: Sink, is_urgent: Callable[[], bool], *,
        rate: float | None = None, appointed: Callable[[], Order] | None = None,
    ) -> None:  # fmt: skip
        """`every`: how often a base goes there. `is_urgent`: somebody waits, or nobody is left to wait for.

        `rate` and `appointed`: see `SunkValues`.
        """
        self.values = SunkValues(tier, disk, hello, rate, appointed)
        self._tier, self._disk, self._hello, self._emit, self._is_urgent = tier, disk, hello, emit, is_urgent
        self._every = every
        self._lock = threading.Lock()
        self._books: dict[int, Book] = {}
        self._base = NONE  # the newest that all nodes have brought there
        self._pinned: int | None = None
        self._took_at = self._even_at = time.monotonic()  # when it was last looked at, and last had all
        self._took_s = 0.0
        self._retry_at = 0.0
        self._is_lost = self._retires = False
        self._ending = threading.Event()

    # -- the lane's thread

    def hold(self, base: int) -> None:
        """A base goes there: the disk keeps what follows it."""
        if self._pinned is None and not self._is_lost:
            self._pinned, self._even_at = base, time.monotonic()

    def let_go(self) -> None:
        """The base did not get there, so nothing can follow it."""
        if self._base == NONE:
            self._pinned = None

    def follow(self, base: int, *, oldest: int | None) -> None:
        """A base is there, and records lead on from it. `oldest`: of all bases that stay, if this node sees to it."""
        with self._lock:
            self._base = self.values.base = base
            for book in self._books.values():
                book.rotate()
            self._retires = oldest is not None
            if oldest is not None:
                forget(self._tier, ranks_of(self._tier), oldest)

    # -- its own thread

    def work(self, ending: threading.Event) -> None:
        self._ending = ending
        while not ending.wait(_TICK_S):
            if self._base != NONE and time.monotonic() >= self._retry_at and self._is_due():
                self._try()

    def _is_due(self) -> bool:
        if self._is_urgent():
            return True
        rested_s = time.monotonic() - self._took_at
        if rested_s < self._took_s / _SHARE:
            return False
        if self.values.due != NONE:
            return True
        if self._every.seconds is not None:
            return rested_s >= min(self._every.seconds / _GROUPS, _LONGEST_S)
        return rested_s >= _LONGEST_S or self._behind() >= max(1, (self._every.steps or 1) // _GROUPS)

    def _behind(self) -> int:
        """How many steps the disk has that are not there yet."""
        return max(self._disk.last(rank) - self._last(rank) for rank in self._hello.local_ranks)

    def _last(self, rank: int) -> int:
        book = self._books.get(rank)
        return max(self._base, -1 if book is None else book.last)

    def _try(self) -> None:
        began = time.monotonic()
        try:
            with self._lock:
                for rank in self._hello.local_ranks:
                    self._take(rank)
            self.values.bring(self._ending)
            if self._retires:
                self.values.forget()
        except Exception as error:  # whatever it is: it is tried again, and nobody is left in the dark
            if not self._is_lost:
                self._emit(Degraded(what=f"records do not get to {self._tier.name}", reason=str(error)))
            self._books.clear()  # what is there is looked at again
            self._pinned, self._is_lost, self._retry_at = None, True, time.monotonic() + _REST_S
            return
        self._is_lost, self._took_at, self._took_s = False, time.monotonic(), time.monotonic() - began
        if self._behind() <= 0:
            self._even_at = time.monotonic()
        self._pinned = min(self._last(rank) for rank in self._hello.local_ranks)

    def _take(self, rank: int) -> None:
        if self._disk.last(rank) <= self._last(rank):
            return
        if rank not in self._books:
            self._books[rank] = Book(self._tier, rank, self._hello.run)
        book = self._books[rank]
        for log in self._written(rank, book.last if book.last >= 0 else self._base):
            after = book.last if book.last >= 0 else self._base
            assert log.layout is not None and log.info is not None
            for group in grouped((r for r in log.records if r.frame.step > after), lambda record: record.length):
                if self._ending.is_set():
                    return
                book.write(log.layout.header, log.layout.digest, [self._read(log, one) for one in group])
                book.has_values = log.info.has_values

    def _written(self, rank: int, after: int) -> Iterator[LogRead]:
        """What the disk has of a rank's log beyond a step."""
        begins = starts(self._disk.tier, rank)
        for start, following in zip(begins, [*begins[1:], None], strict=True):
            if following is not None and following <= after:
                continue
            try:
                log = scan(self._disk.tier, start, rank, self._hello.run)
            except FileNotFoundError:
                continue  # it was let go in this moment
            if log.last > after and log.info is not None:
                yield log

    def _read(self, log: LogRead, record: Record) -> tuple[Frame, list[memoryview]]:
        """A record, its bytes checked and in memory of their own: the file may go, or be cut, at any time."""
        data = memoryview(bytearray(record.length))
        self._disk.tier.read(log.name, record.offset, data)
        if xxhash.xxh3_64_intdigest(data) != record.checksum:
            reason = "the bytes do not match their checksum"
            raise Damaged(reason, tier=self._disk.tier.name, file=log.name, step=record.frame.step)
        return record.frame, [data]

    # -- whoever asks

    def pinned(self) -> int | None:
        """The step up to which records are there, if those after it are still to be taken from the disk."""
        has_all = self._base != NONE and self._behind() <= 0
        return None if has_all or time.monotonic() - self._even_at > _BEHIND_S else self._pinned

    def reach(self, base: int) -> int:
        """The newest step that records there lead to from a base that is there."""
        books = [self._books.get(rank) for rank in self._hello.local_ranks]
        last = min(book.last if book is not None and book.leads_from(base) else base for book in books)
        if not any(book is not None and book.has_values for book in books):
            return last
        return self.values.complete if base <= self.values.complete <= last else base

    @property
    def is_even(self) -> bool:
        """Whether it has all that the disk has, or cannot have it now."""
        return self._base == NONE or self._is_lost or (self._behind() <= 0 and self.values.due == NONE)
