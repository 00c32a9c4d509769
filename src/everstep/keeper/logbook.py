"""From the rings to the log: many records with one flush, and how far they lead.

Nothing here is asked of the trainer: a record stays in its ring until the logbook has said that it is on a medium.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import asdict

import xxhash

from everstep import image
from everstep.capture.arena import Arena, Seal
from everstep.errors import Damaged, EverstepError
from everstep.events import Logged, Sink, Tuned
from everstep.keeper.book import Book, forget
from everstep.keeper.flush import persist_part
from everstep.keeper.protocol import Hello
from everstep.keeper.rounds import NONE, Lane, Order
from everstep.store.frame import format_of
from everstep.store.log import cut_after, ranks_of
from everstep.store.manifest import read_single_part, values_folder, values_steps
from everstep.store.tier import Tier
from everstep.tune.models import has_moved, steps_per_values
from everstep.types import Frame, Gaps

_KEPT_VALUES = 2  # the newest, and one before it in case that one is damaged


class Logbook:
    def __init__(
        self, tier: Tier, emit: Sink, taken: Callable[[Arena, int], None] = Arena.set_taken, *,
        kept_values: int = _KEPT_VALUES,
    ) -> None:  # fmt: skip
        """`taken`: is told how far the records of a ring are on the medium. `kept_values`: of how many steps."""
        self._tier, self._emit, self._taken, self._kept_values = tier, emit, taken, kept_values
        self.writing = threading.Lock()  # for whoever changes anything
        self.base = NONE  # the newest base on the medium, from which records lead on,
        self.base_bytes_s = 0.0  # and how fast it was written
        self.pins: list[Callable[[], int | None]] = []  # up to where others have taken records from the medium
        self.pinned_values: list[Callable[[], int | None]] = []  # which values others are about to take from there
        self.appointed: Callable[[], Order] | None = None  # where all nodes save values of the same step, of which one
        self._books: dict[int, Book] = {}
        self._lives: dict[int, Hello] = {}  # by rank, as the present one began
        self._passed: dict[int, int] = {}  # up to where records of a rank were let go unwritten
        self._saved: list[int] = []  # the steps whose values are on the medium, of all ranks here,
        self._held: list[int] = []  # those whose values are to follow,
        self._missed = NONE  # and the newest that was appointed, and overwritten before it was saved
        self._completes: deque[int] = deque(maxlen=kept_values)  # the newest that all nodes have saved
        self._values_bytes = self._record_bytes = self._slots = 0  # of a step of all ranks here, and of a ring
        self._tensor_bytes: dict[int, int] = {}  # of a rank's newest record, without its extras
        self._told: int | None = None  # how far apart values were said to be
        self.records: Counter[int] = Counter()  # written from here, by rank,
        self.record_bytes = 0  # and of all of them

    def open(self, hello: Hello, ranks: Collection[int] | None = None) -> None:
        """A rank is there: what was passed over when it resumed goes, and its log is gone on with.

        `ranks`: whose values lie on the medium, if not those of all whose parts lie on this node's disk.
        """
        cut_after(self._tier, hello.resumed_from, [hello.rank], hello.run, hello.generation)
        self._lives[hello.rank] = hello
        self.go_on(hello.rank, hello.run)
        self._look_for_values(hello, hello.ranks_here if ranks is None else ranks)

    def go_on(self, rank: int, run: str) -> None:
        """What is on the medium of a rank's log stays as it is, and is gone on with."""
        self._books[rank] = Book(self._tier, rank, run)
        self._passed.pop(rank, None)  # the life before may have come further than the present one has

    def _look_for_values(self, hello: Hello, ranks: Collection[int]) -> None:
        """Forget values that were passed over when this life began, and find those that are whole."""
        self._saved = []
        for step in values_steps(self._tier):
            try:
                parts = [read_single_part(self._tier, step, rank, hello.run, values_folder) for rank in ranks]
            except (EverstepError, FileNotFoundError):
                continue
            after = hello.resumed_from is None or step > hello.resumed_from
            is_of_life = {part.generation == hello.generation for part in parts}
            if after and is_of_life == {False}:
                self._tier.delete_folder(values_folder(step))
            elif (not after or is_of_life == {True}) and all(part.world == hello.world for part in parts):
                self._saved.append(step)

    def overtake(self, hello: Hello) -> None:
        """Another life has begun: if it has fewer ranks, what those left that are no more goes as far as the rest."""
        self._missed = NONE
        self._completes.clear()
        ranks = {rank for rank in ranks_of(self._tier) if rank >= hello.world}
        cut_after(self._tier, hello.resumed_from, ranks, hello.run)
        for rank in ranks & self._books.keys():
            del self._books[rank]

    def take(self, ring: Arena, *, is_urgent: bool = True, at_most: int | None = None) -> int:
        """Write records that are sealed and not yet written, with one flush for all; returns how many.

        Where a step needs values beside its record, which are saved now and then, records gather until the ring is
        half full: before, nobody could stop at them.
        """
        book = self._books[ring.rank]
        after = max(book.last, self._passed.get(ring.rank, NONE))
        found = sorted((seal for seal in self._seals(ring) if seal.step > after), key=lambda seal: seal.step)
        if not found or (book.has_values and not is_urgent and len(found) < len(ring.slots) // 2):
            return 0
        header = bytes(ring.image(0)[: image.header_bytes(ring.image(0))])
        if xxhash.xxh3_64_intdigest(header) != ring.layout_digest:
            raise Damaged("the ring has lost its header", tier="memory", rank=ring.rank)
        following = [seal for at, seal in enumerate(found) if seal.step == found[0].step + at][:at_most]
        following, records = _unspoilt(ring, following)
        if not records:
            return 0
        is_begun, size = book.write(header, ring.layout_digest, records), sum(f.payload_bytes for f, _ in records)
        self.records[ring.rank] += len(records)
        self.record_bytes += size
        if is_begun:
            self._emit(Logged(rank=ring.rank, first=following[0].step, last=following[-1].step, bytes=size))
        layout, info = image.parse_cached(header, ring.slot_bytes, ring.place)
        book.has_values = info.has_values
        newest = records[-1][0]
        self._tensor_bytes[ring.rank] = newest.payload_bytes - (sum(newest.ranges[-1]) - layout.extras_offset)
        self._taken(ring, book.last)
        return len(following)

    def _seals(self, ring: Arena) -> list[Seal]:
        """Without those of steps that the present life does again, which a ring has until its trainer has looked."""
        life = self._lives.get(ring.rank)
        if life is None:
            return list(ring.seals().values())
        began = NONE if life.resumed_from is None else life.resumed_from
        return [seal for seal in ring.seals().values() if seal.step <= began or seal.generation == life.generation]

    def pass_over(self, ring: Arena, base: int) -> None:
        """All ranks have a base in memory: records up to it are let go unwritten, and others lead on from it."""
        if base > max(self._books[ring.rank].last, ring.taken()):
            self._passed[ring.rank] = base
            self._taken(ring, base)

    @property
    def with_values(self) -> set[int]:
        """The ranks of whose records nobody can stop at most: values must be there, too."""
        return {rank for rank, book in self._books.items() if book.has_values}

    def rotate(self) -> None:
        """A base is on the medium: what follows begins new segments, so that old ones can go."""
        for book in self._books.values():
            book.rotate()

    def forget(self, oldest_base: int) -> None:
        """Let go what no kept base needs, and nobody is about to take from here."""
        pinned = [step for pin in self.pins if (step := pin()) is not None]
        forget(self._tier, self._books, min([oldest_base, *pinned]))

    def last(self, rank: int) -> int:
        """The newest step of a rank's log on the medium; -1 if there is none."""
        book = self._books.get(rank)
        return NONE if book is None else book.last

    @property
    def tier(self) -> Tier:
        return self._tier

    def reach(self) -> int:
        """The newest step that a reboot would leave: the base, and the records of all ranks here that follow it."""
        books, base = list(self._books.values()), self.base
        if not books or any(not book.leads_from(base) for book in books):
            return base
        last = min(book.last for book in books)
        if not any(book.has_values for book in books):
            return last
        step = self.values_step
        if self.appointed is not None:
            step = self.appointed().complete  # a newer one that is here may never be on all nodes
        return step if base <= step <= last and step in self._saved else base

    # -- values

    @property
    def values_step(self) -> int:
        """The newest step whose values are on the medium, of all ranks here; -1: there is none."""
        return max(self._saved, default=NONE)

    @property
    def values_done(self) -> int:
        """The step whose values all nodes save now, if they are here; else the newest."""
        step = self.appointed().step if self.appointed is not None else NONE
        return step if step in self._saved else self.values_step

    def values_status(self) -> Lane:
        """How far the values of this node are, for the others."""
        apart = self._values_apart() if self._values_bytes else 0
        return Lane(done=self.values_done, missed=self._missed, apart=apart)

    def hold_values(
        self, found: list[Arena], rings: list[Arena], *, is_urgent: bool = True, is_alive: bool = True
    ) -> bool:  # fmt: skip
        """Before records are written: the newest values that those will have reached are not to be overwritten.

        Whether there are any to be saved now: those that all nodes save next, where there are several; else the newest,
        if it is urgent, or so many records have come since the last that can be stopped at that they are worth it.
        """
        self._held = []
        ranks = {ring.rank for ring in rings}
        if not ranks or ranks != {arena.rank for arena in found} or not ranks <= self._books.keys():
            return False
        self._values_bytes, self._slots = sum(arena.slot_bytes for arena in found), len(rings[0].slots)
        self._record_bytes = sum(self._tensor_bytes.get(ring.rank, 0) for ring in rings)
        sealed = set.intersection(*({seal.step for seal in arena.seals().values()} for arena in found))
        for ring in rings:
            recorded = {seal.step for seal in ring.seals().values()}
            sealed = {step for step in sealed if step in recorded or step <= self._books[ring.rank].last}
        if self.appointed is not None:
            self._held = self._appointed_values(self.appointed(), found, sealed, is_alive=is_alive)
            return bool(self._held)
        step, last = max(sealed, default=NONE), max(self.values_step, self.base)
        if step <= self.values_step or not (is_urgent or step - last >= self._values_apart()):
            return False
        self._held = [step]
        for arena in found:
            arena.set_taken(step)
        return True

    def _appointed_values(self, order: Order, found: list[Arena], sealed: set[int], *, is_alive: bool) -> list[int]:
        """Those of the step that all nodes save next, which trainers are told before they come to it.

        When the trainers are gone, all that are only in memory: which of them all nodes have, nobody may know.
        """
        if not is_alive:
            return sorted(step for step in sealed.difference(self._saved) if step > order.complete)
        step = max(order.step, order.complete)  # a node that could not be reached may lack what all disks have
        if step == NONE or step in self._saved:
            return []
        for arena in found:
            if arena.taken() != step:
                arena.set_taken(step)
        if step not in sealed and max(sealed, default=NONE) > step:
            self._missed = step
        return [step] if step in sealed else []

    def _values_apart(self) -> int:
        if not self._record_bytes:
            return self._slots // 2  # until one is written
        tuning = steps_per_values(self._values_bytes, self._record_bytes, slots=self._slots)
        if has_moved(self._told, tuning.value):
            self._told = tuning.value
            self._emit(Tuned(**asdict(tuning)))
        return tuning.value

    def save_values(self, found: list[Arena], *, torch_version: str) -> None:
        """After records were written: make the steps whose values are held such that can be stopped at."""
        for step in self._held:
            if any(book.last < step for book in self._books.values()):
                break
            if not all(self._save(step, arena, torch_version) for arena in found):
                return  # the trainer was faster; the next one will do
            self._saved = sorted({*self._saved, step})
        self._forget_values()

    def _save(self, step: int, arena: Arena, torch_version: str) -> bool:
        slot = arena.slot_of(step)
        if slot is None:
            return False
        try:
            part = persist_part(self._tier, arena, slot, torch_version=torch_version, folder=values_folder)
        except Damaged as error:
            if error.tier == "memory":
                arena.unseal(slot)  # so that another step is taken
                self._missed = step
            raise
        return part is not None

    def _forget_values(self) -> None:
        """The newest few that all nodes have stay, and what may become such."""
        if self.appointed is None:
            old = self._saved[: -self._kept_values]
        else:
            complete = self.appointed().complete
            if complete in self._completes or complete not in self._saved:
                return
            self._completes.append(complete)
            old = [step for step in self._saved if step < self._completes[0]]
            old = old if len(self._completes) == self._kept_values else []
        pinned = [step for pin in self.pinned_values if (step := pin()) is not None]
        old = [step for step in old if step < min(pinned, default=step + 1)]
        if old:
            for step in values_steps(self._tier):
                if step <= max(old):
                    self._tier.delete_folder(values_folder(step))
            self._saved = [step for step in self._saved if step > max(old)]

    def will_reach(self, step: int, rings: list[Arena], values: list[Arena]) -> bool:
        """Whether what is there, in memory or written, leads from the base to a step."""
        for ring in rings:
            book = self._books[ring.rank]
            sealed = {seal.step for seal in self._seals(ring)}
            if not book.leads_from(self.base) or any(s not in sealed for s in range(book.last + 1, step + 1)):
                return False
            is_unsaved = book.has_values and book.last >= step > self.values_step
            if is_unsaved and not (values and all(arena.slot_of(step) is not None for arena in values)):
                return False  # its values were overwritten before they were saved
        return True

    def is_behind(self, ring: Arena) -> bool:
        """Whether a ring holds what neither the log nor the base has."""
        book = self._books.get(ring.rank)
        return book is not None and any(seal.step > max(book.last, self.base) for seal in ring.seals().values())


def _unspoilt(ring: Arena, seals: list[Seal]) -> tuple[list[Seal], list[tuple[Frame, list[memoryview]]]]:
    """Records as they are written: those behind the last that was overwritten while we looked.

    What others have taken already the trainer may overwrite. Of that a copy is made, which counts if its seal is still
    there; the rest stays as it is until we have taken it.
    """
    taken, first = ring.taken(), 0
    records: list[tuple[Frame, list[memoryview]]] = []
    slots = {seal.sequence: slot for slot, seal in ring.seals().items()}
    for at, seal in enumerate(seals):
        slot = slots.get(seal.sequence)
        data = ring.image(slot) if slot is not None else None
        if slot is not None and data is not None and seal.step <= taken:
            copied = memoryview(bytes(data))
            data = copied if ring.seals().get(slot) == seal else None
        if data is None:
            records.clear()
            first = at + 1
        else:
            records.append(_framed(ring, seal, data))
    return seals[first:], records


def _framed(ring: Arena, seal: Seal, data: memoryview) -> tuple[Frame, list[memoryview]]:
    header = bytes(data[: image.header_bytes(data)])
    layout, info = image.parse_cached(header, len(data), ring.place)
    extras = layout.extras_offset + 8 + len(image.extras_of(layout, data))  # the rest of their room means nothing
    parts = [data[len(header) : extras]]
    ranges: tuple[tuple[int, int], ...] = ((len(header), extras - len(header)),)
    gaps: Gaps = ()
    if info.codec is not None:
        from everstep.store.gaps import shorten  # which brings numpy, that whoever only looks need not load

        parts, ranges, gaps = shorten(layout, data, extras)
    frame = Frame(
        format=format_of(gaps), run=ring.run, generation=seal.generation, step=seal.step, rank=ring.rank,
        world=ring.world, cut_time=seal.cut_time, kind="record", layout=seal.layout_digest, ranges=ranges, gaps=gaps,
    )  # fmt: skip
    return frame, parts
