"""Memory for the bases of a life that is still reading its past from something slow.

The system has to find and clear every page of an arena, which takes as long as reading such a state from a disk. How
large the arena will be is known once it is known which part of a checkpoint this rank had: the same program has the
same state again. So other threads take the memory meanwhile, and pin it where a device will copy into it, and the first
cut finds it there.

It is only a guess. What is taken has no name, so that nothing is left of it if the process is killed; if it is not what
the first cut needs it is let go at once, and the cut takes memory as if there had been none.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Self

from everstep.capture.host import choose_place, free_memory, is_memory, populate
from everstep.capture.taken import Taken
from everstep.config import Settings
from everstep.errors import EverstepError
from everstep.image import BLOCK, round_up
from everstep.topology import Topology

if TYPE_CHECKING:
    import torch

_SPARE_BYTES = 1 << 20  # of a slot: what is not a tensor may have grown since
_THREADS = 4  # that take it: more are not faster beside those who read, and keep them waiting (bench/LOG.md)
_SHARE = 0.9  # of the free memory that may be in use at the peak


def newest_kept(topology: Topology) -> int:
    """How many of the newest steps are never overwritten: a rank can be one ahead of another that dies."""
    return 1 if topology.world == 1 else 2


def base_slots(settings: Settings, topology: Topology) -> int:
    """What was asked for; else one is written, the newest stay, and everybody who reads one for long has one.

    Protection has two: of the step that is protected, and of the next one.
    """
    tiers = settings.tiers
    is_protected = tiers.protection is not None and topology.has_many_nodes
    readers = 1 + len(tiers.deeper) + (2 if is_protected else 0)
    return tiers.memory.slots or 1 + newest_kept(topology) + readers


class Reserve:
    """Empty until it is known what will be needed, and again once that was given away or let go."""

    def __init__(self, settings: Settings, topology: Topology) -> None:
        self._path, self._slots = settings.tiers.memory.path, base_slots(settings, topology)
        self._ranks = len(topology.local_ranks)
        self._root: Path | None = None
        self._taken = Taken()
        self._taking: Future[int] | None = None
        self._slot_bytes = 0  # of the life before, so most likely of this one
        self._devices: Collection[torch.device] = ()  # for which slots are pinned as soon as they are taken
        self._pinning = Lock()

    def begin(self, slot_bytes: int, read_bytes: int, devices: Collection[torch.device] = ()) -> None:
        """Take slots of about this size, if there is memory for them beside what the caller is going to read.

        `devices`: that will copy into them.
        """
        if self._taking is not None:
            return
        self._slot_bytes, self._devices = slot_bytes, devices
        size = round_up(slot_bytes + _SPARE_BYTES, BLOCK)
        # At the peak all is read and none of it is gone: every rank of this node has its slots, what it has read, and
        # as much again where the state is restored to the host. Without a reserve what was read is gone before slots
        # are taken, so this is memory that nobody has asked for, and there must be more than enough of it.
        peak = self._ranks * (self._slots * size + 2 * read_bytes)
        try:
            if peak > _SHARE * free_memory(None):
                return
            self._root = choose_place(self._path, self._slots * size, self._slots)
            if self._root is not None and not is_memory(self._root):
                return  # file systems give room without clearing it
            self._taken = Taken.nameless(self._root, self._slots)
            self._taken.map(size)
            pool = ThreadPoolExecutor(1, "everstep-reserve")
            self._taking = pool.submit(self._take)
            pool.shutdown(wait=False)  # its thread ends with this
        except (EverstepError, OSError, RuntimeError):  # no memory, no such files, no thread
            self.close()  # if it is still so at the first cut, that will say it

    def _take(self) -> int:
        """0, or the error of the kernel."""
        from everstep.capture.pinned import pin_first  # not by a keeper, which starts without torch and knows of slots

        for buffer in self._taken.buffers:
            problem = populate([buffer.span], threads=_THREADS)
            if problem:
                return problem
            with self._pinning:
                if self._devices and pin_first(self._slot_bytes, buffer, self._devices) != 0:
                    self._devices = ()  # the first cut will try, and say so
        return 0

    def end_pinning(self) -> None:
        """No thread of ours calls a driver from now on, which other threads may not do beside one that records a graph.

        What is not pinned yet is pinned by the first cut.
        """
        with self._pinning:
            self._devices = ()

    def give(self, slots: int, slot_bytes: int) -> tuple[Path | None, Taken] | None:
        """Where it lies, and what was taken, cut to what is needed; None if that is more, and then nothing is held."""
        if self._taking is None:
            return None
        wait([self._taking])
        is_taken = self._taking.exception() is None and self._taking.result() == 0
        if not is_taken or slots != self._slots or slot_bytes > len(self._taken.buffers[0]):
            self.close()
            return None
        given, self._taken, self._taking = self._taken, Taken(), None
        given.cut(slot_bytes)
        return self._root, given

    def close(self) -> None:
        """Let go of what nobody needed. Threads that are still at it end soon: nothing is left to be taken."""
        self.end_pinning()
        self._taken.unpin()
        self._taken.empty()
        if self._taking is not None:
            wait([self._taking])
        self._taken.let_go()
        self._taking = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
