"""One rank's log on a medium: an unbroken run of records, over one or more segments.

A gap (a step that could not be recorded, or was let go before it came here) begins a new run, and only a base at or
after it can be followed by it. Where blobs do not grow every group of records is a segment of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

from everstep.errors import Damaged, EverstepError, Mismatch
from everstep.store.log import LogWriter, log_folder, log_name, scan, segments, starts
from everstep.store.retain import spent_segments
from everstep.store.tier import Tier
from everstep.types import Frame

_T = TypeVar("_T")
_GROUP_BYTES = 64 << 20


class Book:
    def __init__(self, tier: Tier, rank: int, run: str) -> None:
        """What is on the medium stays as it is, and is gone on with."""
        self._tier, self._rank, self._run = tier, rank, run
        self.first = self.last = -1  # the unbroken run: the step after which it begins, and its newest
        self.has_values = False
        self._writer: LogWriter | None = None
        for start in starts(tier, rank):
            try:
                found = scan(tier, start, rank, run)
            except EverstepError:
                self.first = self.last = -1
                continue
            self.first, self.last = (self.first, found.last) if start == self.last else (start, found.last)
            self.has_values = found.info is not None and found.info.has_values

    def write(self, header: bytes, layout: int, records: Sequence[tuple[Frame, Sequence[memoryview]]]) -> bool:
        """Add records of steps that follow each other, with one flush; whether they began a segment.

        `header`: of the images that they are, and `layout` its digest.
        """
        start = records[0][0].step - 1
        writer = self._writer
        if writer is None or not self._is_followed(writer, start, layout):
            writer = self._writer = self._begin(start, header)
        writer.append(records)
        if start != self.last:
            self.first = start
        self.last = records[-1][0].step
        return writer.start == start

    def _is_followed(self, writer: LogWriter, start: int, layout: int) -> bool:
        """Whether what is next belongs into the file that was written last."""
        may_grow = self._tier.traits.appends or writer.last == writer.start
        return may_grow and writer.last == start and writer.layout == layout

    def _begin(self, start: int, header: bytes) -> LogWriter:
        """A segment of its own: the first, after a gap, after a base, or after a file that cannot be gone on with."""
        try:
            return LogWriter(self._tier, start, self._rank, self._run, header)
        except (Damaged, Mismatch):
            self._tier.delete(log_name(start, self._rank))  # nobody can read what is there, or it was overtaken
            return LogWriter(self._tier, start, self._rank, self._run, header)

    def rotate(self) -> None:
        """A base is on the medium: what follows begins a new segment, so that old ones can go."""
        self._writer = None

    def leads_from(self, base: int) -> bool:
        """Whether its records follow a base."""
        return self.first <= base <= self.last


def forget(tier: Tier, ranks: Collection[int], oldest_base: int) -> None:
    """Let go the segments that no kept base needs."""
    for rank in ranks:
        for start in spent_segments(starts(tier, rank), oldest_base):
            tier.delete(log_name(start, rank))
    for start in segments(tier)[:-1]:
        if not tier.names(log_folder(start)):
            tier.delete_folder(log_folder(start))


def grouped(records: Iterable[_T], size: Callable[[_T], int]) -> Iterator[list[_T]]:
    """As many at once as memory is used for: each is in memory before it is written."""
    group: list[_T] = []
    for record in records:
        if group and sum(map(size, group)) + size(record) > _GROUP_BYTES:
            yield group
            group = []
        group.append(record)
    if group:
        yield group
