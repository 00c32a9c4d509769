"""How long a ring of records is, and when only a base can make room in it.

A ring has about the size of a base, and is longer where records are so large that a disk may be too slow for them, or
so small that many of them come while one flush lasts.
After it was full once bases are taken before it is full again: whatever the reason was, it may come back.
"""

from __future__ import annotations

from everstep.capture.arena import Arena
from everstep.capture.host import most_files
from everstep.capture.life import Life

FULL = "the ring is full: the keeper does not write records as fast as they come"
_MIN_SLOTS, _MAX_SLOTS = 4, 200
LARGE_BYTES = 16 << 20  # of a record for which a disk may be too slow
_LARGE_SLOTS = 12  # for such, if a quarter of the free memory has room for them
_LEAST_BYTES = 16 << 20  # of a ring: a moment's delay of the keeper should not end a chain


class Room:
    def __init__(self, life: Life) -> None:
        self._life, self._was_full = life, False

    def slots(self, base_bytes: int, record_bytes: int) -> int:
        room = max(base_bytes, _LEAST_BYTES)
        least = _MIN_SLOTS
        if record_bytes >= LARGE_BYTES and _LARGE_SLOTS * record_bytes <= self._life.free_memory() // 4:
            least = _LARGE_SLOTS
        openable = most_files() // (4 * len(self._life.topology.local_ranks))  # half of them for all rings of a node
        return max(least, min(_MAX_SLOTS, openable, room // record_bytes))

    def was_full(self) -> None:
        """No step waits for the medium, so one was not recorded."""
        self._was_full = True

    def needs_base(self, ring: Arena, newest: int) -> bool:
        """Whether a ring may soon be full, and the newest base has made room in it already."""
        if not self._was_full and self._life.topology.world == 1:
            return False
        return newest <= ring.taken() and not ring.has_room(len(ring.slots) // 2 if self._was_full else 1)
