"""What one rank consumed, step by step, for whoever applies it at his own pace.

From the ring while it is there; a record that was overwritten meanwhile is in the log, or a newer base has made it
needless: then that base is gone on from. A record is copied before it is used, and the copy counts only if the seal is
still the same.
"""

from __future__ import annotations

import xxhash

from everstep import image
from everstep.capture.arena import Arena
from everstep.errors import EverstepError
from everstep.image import ImageLayout
from everstep.keeper.protocol import Hello
from everstep.keeper.replica_image import Lost, Record, View
from everstep.store.frame import Bad, check_payload
from everstep.store.log import LogRead, log_folder, log_name, scan, segments
from everstep.store.tier import Tier
from everstep.types import ImageInfo


class Records:
    """Of one rank."""

    def __init__(self, tier: Tier, hello: Hello) -> None:
        self._tier, self._hello = tier, hello
        self._ring: Arena | None = None
        self._log: LogRead | None = None  # that the last record came from
        self._view: View | None = None  # the copy
        self._missed = -1

    def add_ring(self, ring: Arena) -> None:
        """Another ring follows; what is left in the one before goes to the log."""
        if self._ring is not None:
            self._ring.close()
        self._ring = ring

    def newest(self) -> int:
        return self._ring.live().step if self._ring is not None else -1

    def fetch(self, step: int) -> Record | None:
        """The record of a step; None if it is not there yet. Lost if it will never be."""
        if self._ring is None:
            return None
        later = any(seal.step > step for seal in self._ring.seals().values())
        found = self._from_ring(self._ring, step) or self._from_log(step)
        if found is None and later:
            if self._missed == step:  # twice: it was not just being written while we looked
                raise Lost(f"there is no record of step {step}")
            self._missed = step
        return found

    def _from_ring(self, ring: Arena, step: int) -> Record | None:
        slot = ring.slot_of(step)
        seal = ring.seals().get(slot) if slot is not None else None
        if slot is None or seal is None or seal.step != step:
            return None
        data = ring.image(slot)
        header = bytes(data[: image.header_bytes(data)])
        if xxhash.xxh3_64_intdigest(header) != seal.layout_digest:
            return None
        layout, info = image.parse_cached(header, len(data), ring.place)
        view = self._room(layout, info)
        begin = len(header)
        view.memory[begin:] = data[begin:]
        if ring.seals().get(slot) != seal:
            return None
        return Record(step, seal.generation, seal.cut_time, view)

    def _from_log(self, step: int) -> Record | None:
        try:
            log = self._find(step)
            if log is None or log.layout is None or log.info is None:
                return None
            record = log.records[step - log.start - 1]
            check_payload(self._tier, log.name, record)
            payload = log.payload(record)
        except (EverstepError, OSError, Bad):
            return None  # it has just been removed, or cannot be read
        view, at = self._room(log.layout, log.info), 0
        for begin, length in record.frame.ranges:
            view.memory[begin : begin + length] = payload[at : at + length]
            at += length
        return Record(step, record.frame.generation, record.frame.cut_time, view)

    def _find(self, step: int) -> LogRead | None:
        if self._log is not None and self._log.start < step <= self._log.last:
            return self._log
        for start in reversed(segments(self._tier)):
            if start < step and log_name(start, self._hello.rank) in self._tier.names(log_folder(start)):
                self._log = scan(self._tier, start, self._hello.rank, self._hello.run)
                return self._log if step <= self._log.last else None
        return None

    def _room(self, layout: ImageLayout, info: ImageInfo) -> View:
        if info.codec is not None or info.has_values:
            what = "gradients are compressed" if info.codec is not None else "the loop writes state by itself"
            raise EverstepError(f"{what}, and a replica cannot follow that")
        if self._view is None or self._view.layout.digest != layout.digest:
            self._view = View(memoryview(bytearray(layout.total_bytes)), layout)
        return self._view
