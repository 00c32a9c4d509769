"""Shared memory that outlives the trainer: a control page and a few slots, each a whole image.

A slot's life: `free` -> `opened` (its seal is wiped, copies run into it) -> `sealed` (its seal is written). The seal
carries a checksum of itself and is written last, so that a reader in another process may trust what it finds after a
crash at any instruction: a torn seal is no seal. Checks (chunk checksums of a sealed slot) come later, from whoever
has the time, and name the seal that they belong to.

An arena is files under a directory (shared memory, or any mount that was asked for), or memfds without a name that
the keeper holds. Knows nothing of tensors, CUDA or steps beyond their numbers; imports no torch.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import shutil
import struct
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import xxhash

from everstep.capture.host import allow_many_files, free_memory, is_memory, make_private, populate
from everstep.capture.taken import Taken, close_all, unmap
from everstep.errors import Damaged, NotEnoughMemory, TierFailed
from everstep.image import BLOCK, CHUNK_BYTES, FORMAT, ImageLayout, round_up
from everstep.mapped import Mapped

MEMFD = "memfd"

# What a slot holds: a whole state; what one step consumed (then it is a ring); what a step left that is too large for
# every record; or a whole state that the keeper advances.
ArenaKind = Literal["base", "log", "values", "replica"]

_MAGIC = b"EVERSTEP"
_HEADER = struct.Struct("<8sIIIIQQ32s8s")  # magic, format, rank, world, slots, slot bytes, layout digest, run, kind
_OWNER = struct.Struct("<Q")  # pid; not in the header, which is never written again, so that no crash can tear it
_LIVE = struct.Struct("<Qd")  # newest step, time of its cut
_TAKEN = struct.Struct("<Q")  # of a ring: the newest step that nobody needs; of values: the one that is being read
_SEAL = struct.Struct("<QQdQQ32s")  # sequence, step, cut time, length, layout digest, generation
_CHECKS = struct.Struct("<QQ")  # sequence of the seal, number of chunks
_SUM = struct.Struct("<Q")
_OWNER_AT, _LIVE_AT, _TAKEN_AT, _SEALS_AT, _SEAL_BYTES = 128, 256, 384, 512, 128
_MAX_SLOTS = 200  # a descriptor each, and a message carries no more than 253


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    sequence: int
    step: int
    cut_time: float
    length: int
    layout_digest: int
    generation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    step: int
    cut_time: float


def _pack(record: bytes) -> bytes:
    return record + _SUM.pack(xxhash.xxh3_64_intdigest(record))


def _unpack(form: struct.Struct, buffer: mmap.mmap, at: int) -> tuple[Any, ...] | None:
    record = buffer[at : at + form.size]
    (total,) = _SUM.unpack_from(buffer, at + form.size)
    return form.unpack(record) if total == xxhash.xxh3_64_intdigest(record) else None


def _head_bytes(slots: int) -> int:
    """Of the control file: what comes before the checks, a page for up to 28 slots."""
    return round_up(_SEALS_AT + slots * _SEAL_BYTES, BLOCK)


def _checks_bytes(slot_bytes: int) -> int:
    return round_up(_CHECKS.size + 8 * -(-slot_bytes // CHUNK_BYTES) + _SUM.size, BLOCK)


def _file(folder: Path | None, name: str, whose: str) -> int:
    if folder is None:
        return os.memfd_create(f"everstep-{whose}-{name}", os.MFD_CLOEXEC)
    return os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)


class Arena:
    """One rank's slots. The trainer writes; anybody may read at any time."""

    before: Callable[[str], None] = staticmethod(lambda operation: None)  # tests kill here

    def __init__(self, descriptors: list[int], place: str, mapped: list[Mapped] | None = None) -> None:
        """Take over what is open of control page and slots: this very list, so that nobody closes anything twice.

        `place` is a directory, or MEMFD. `mapped`: the slots, where they are already.
        """
        self.place = place
        self.descriptors = descriptors
        control, *slots = descriptors
        self._lock = -1
        if os.fstat(control).st_size < BLOCK:
            raise Damaged("an arena without a control page", file=place)
        self.control = mmap.mmap(control, os.fstat(control).st_size)
        fields = _unpack(_HEADER, self.control, 0)
        if fields is None or fields[0] != _MAGIC:
            raise Damaged("not an arena, or its control page is damaged", file=place)
        _, version, rank, world, count, slot_bytes, layout_digest, run, kind = fields
        self.rank: int = rank
        self.world: int = world
        self.slot_bytes: int = slot_bytes
        self.layout_digest: int = layout_digest
        self.pid: int = _OWNER.unpack_from(self.control, _OWNER_AT)[0]
        self.run: str = run.decode()
        self.kind: ArenaKind = kind.rstrip(b"\0").decode()
        if version != FORMAT or count != len(slots) or count > _MAX_SLOTS or self.kind not in get_args(ArenaKind):
            raise Damaged(f"an arena of format {version} with {count} slots for {self.kind!r}", file=place)
        if any(os.fstat(slot).st_size != self.slot_bytes for slot in slots):
            raise Damaged("an arena whose slots are cut off", file=place)
        if len(self.control) < _head_bytes(count) + count * _checks_bytes(slot_bytes):
            raise Damaged("an arena whose control file is cut off", file=place)
        self.slots = mapped if mapped is not None else [Mapped(slot, self.slot_bytes) for slot in slots]
        self._next = self._sequence = 0  # of a ring: the slot whose turn it is; the newest seal by this object
        weakref.finalize(self, close_all, self.descriptors).atexit = False  # mappings go with the last who looks there

    # -- making and finding

    @classmethod
    def create(
        cls, root: Path | None, *, kind: ArenaKind = "base", run: str, rank: int, world: int, layout: ImageLayout,
        slots: int, reserved: Taken | None = None,
    ) -> Arena:  # fmt: skip
        """A new arena with empty slots: under `root`, or of memfds if there is none. Memory is taken now or refused.

        `reserved`: what was taken there for the slots before, which is the arena's from now on.
        """
        allow_many_files()
        size, whose = layout.total_bytes, f"{run[:8]}-{rank}"
        control_bytes = _head_bytes(slots) + slots * _checks_bytes(size)
        header = _HEADER.pack(_MAGIC, FORMAT, rank, world, slots, size, layout.digest, run.encode(), kind.encode())
        names = [f"slot-{i}.safetensors" for i in range(slots)]
        folder = None
        if root is not None:
            own = kind in ("log", "values")  # these follow each other
            name = secrets.token_hex(8) if own else f"{layout.digest:016x}"
            folder = root / run / f"rank-{rank:05d}-{kind}-{name}"
        taken = reserved or Taken()
        opened: list[int] = []
        try:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
                make_private(folder)
            opened.append(_file(folder, "control", whose))
            os.posix_fallocate(opened[0], 0, control_bytes)
            if reserved is None:
                taken.files += (_file(folder, name, whose) for name in names)
                taken.take(size, in_memory=root is None or is_memory(root))
            elif folder is not None:
                reserved.name(folder, names)
            for slot in taken.files:
                os.pwrite(slot, layout.header, 0)
            cls.before("arena header")
            os.pwrite(opened[0], _OWNER.pack(os.getpid()), _OWNER_AT)
            os.pwrite(opened[0], _pack(header), 0)
            while taken.files:
                opened.append(taken.files.pop(0))
            return cls(opened, str(folder) if folder else MEMFD, taken.buffers)
        except BaseException as error:
            taken.let_go()
            close_all(opened)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            where = str(root) if root else "memory"
            raise NotEnoughMemory(where, control_bytes + size * slots, free_memory(root), f"({error})") from error

    @classmethod
    def open(cls, folder: Path) -> Arena:
        """The arena that lies in a directory, whoever made it."""
        opened = [os.open(folder / "control", os.O_RDWR)]
        try:
            while (slot := folder / f"slot-{len(opened) - 1}.safetensors").exists():
                opened.append(os.open(slot, os.O_RDWR))
            return cls(opened, str(folder))
        except BaseException:
            close_all(opened)
            raise

    def populate(self) -> None:
        """Map every page now, for those who will touch them all; whoever only looks need not wait for that."""
        populate([slot.span for slot in self.slots])  # where the kernel does not, they are mapped as they are touched

    def unpin(self) -> None:
        """No device copies into it any more."""
        for slot in self.slots:
            slot.unpin()

    def close(self) -> None:
        unmap((self.control, *self.slots))
        self.unlock()
        close_all(self.descriptors)

    def remove(self) -> None:
        if self.place != MEMFD:
            (Path(self.place) / "control").unlink(missing_ok=True)  # first: whoever finds the rest knows what it is
            self.before("arena gone")
            shutil.rmtree(self.place, ignore_errors=True)

    def lock(self, *, shared: bool, wait: bool = True) -> bool:
        """Of a replica: readers share the lock, and whoever advances it holds it alone. A process takes it along."""
        if self._lock < 0:  # a description of our own: descriptors that travelled share theirs, and its locks
            self._lock = os.open(f"/proc/self/fd/{self.descriptors[0]}", os.O_RDWR)
        how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            fcntl.flock(self._lock, how)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- the trainer's side

    def adopt(self, layout: ImageLayout) -> None:
        """A new process takes over an arena that its predecessor left; headers that were damaged are written anew."""
        self.populate()
        for buffer in self.slots:
            if buffer[: len(layout.header)] != layout.header:
                buffer[: len(layout.header)] = layout.header
        self.pid = os.getpid()
        self.control[_OWNER_AT : _OWNER_AT + _OWNER.size] = _OWNER.pack(self.pid)

    def free_slot(self, protect: int, leased: set[int]) -> int | None:
        """The slot to overwrite next: never a leased one, never one of the newest `protect` sealed ones."""
        seals = self.seals()
        newest = sorted(seals, key=lambda slot: -seals[slot].sequence)
        barred = leased | set(newest[:protect])
        free = [slot for slot in range(len(self.slots)) if slot not in barred]
        return min(free, key=lambda slot: seals[slot].sequence if slot in seals else -1, default=None)

    def has_room(self, records: int) -> bool:
        """Of a ring: whether the slots whose turn is next have no records, or such as nobody needs."""
        taken, count = self.taken(), len(self.slots)
        return records <= count and all(
            self._is_free(at % count, taken) for at in range(self._next, self._next + records)
        )

    def taken_slot(self, busy: Collection[int]) -> int | None:
        """Of a ring: a slot that has no record, or one that nobody needs, and that is not busy being filled.

        They have their turns: a look at every one of 200 would cost more than a step may.
        """
        taken, count = self.taken(), len(self.slots)
        for slot in (at % count for at in range(self._next, self._next + count)):
            if slot not in busy and self._is_free(slot, taken):
                self._next = (slot + 1) % count
                return slot
        return None

    def _is_free(self, slot: int, taken: int) -> bool:
        seal = self._seal_of(slot)
        return seal is None or seal.step <= taken

    def unseal(self, slot: int) -> None:
        self.before("unseal")
        at = _SEALS_AT + slot * _SEAL_BYTES
        self.control[at : at + _SEAL.size + _SUM.size] = bytes(_SEAL.size + _SUM.size)

    def unseal_after(self, step: int | None) -> None:
        """Forget steps that the run is about to do again."""
        for slot, seal in self.seals().items():
            if step is None or seal.step > step:
                self.unseal(slot)
        if self.taken() > (step or 0):
            self.set_taken(step or 0)

    def seal(self, slot: int, *, step: int, cut_time: float, generation: str) -> None:
        self.before("seal")
        newest = self._sequence or max((seal.sequence for seal in self.seals().values()), default=0)
        sequence = self._sequence = max(newest + 1, time.time_ns())  # never used twice: stale checks match nothing
        record = _SEAL.pack(sequence, step, cut_time, self.slot_bytes, self.layout_digest, generation.encode())
        at = _SEALS_AT + slot * _SEAL_BYTES
        self.control[at : at + _SEAL.size + _SUM.size] = _pack(record)

    def flush(self, slot: int) -> None:
        """Force a slot and its seal onto persistent memory, where the arena lies on such."""
        self.slots[slot].flush()
        self.control.flush()

    def set_live(self, step: int, cut_time: float) -> None:
        self.control[_LIVE_AT : _LIVE_AT + _LIVE.size + _SUM.size] = _pack(_LIVE.pack(step, cut_time))

    def set_taken(self, step: int) -> None:
        """The keeper's word: records up to this step may be overwritten; or, of values, this step may not."""
        self.before("taken")
        self.control[_TAKEN_AT : _TAKEN_AT + _TAKEN.size + _SUM.size] = _pack(_TAKEN.pack(step))

    # -- any reader's side

    def taken(self) -> int:
        fields = _unpack(_TAKEN, self.control, _TAKEN_AT)
        return fields[0] if fields else 0

    def live(self) -> Live:
        fields = _unpack(_LIVE, self.control, _LIVE_AT)
        step, cut_time = fields or (0, 0.0)
        return Live(step=step, cut_time=cut_time)

    def seals(self) -> dict[int, Seal]:
        """The sealed slots."""
        found = {slot: self._seal_of(slot) for slot in range(len(self.slots))}
        return {slot: seal for slot, seal in found.items() if seal is not None}

    def _seal_of(self, slot: int) -> Seal | None:
        fields = _unpack(_SEAL, self.control, _SEALS_AT + slot * _SEAL_BYTES)
        if fields is None or fields[3] != self.slot_bytes:
            return None
        sequence, step, cut_time, length, digest, generation = fields
        return Seal(
            sequence=sequence, step=step, cut_time=cut_time, length=length, layout_digest=digest,
            generation=generation.decode(),
        )  # fmt: skip

    def torn(self) -> list[int]:
        """The slots whose seal does not match its checksum: a crash in the moment of sealing, or damage."""
        size, sealed = _SEAL.size + _SUM.size, self.seals()
        places = {slot: _SEALS_AT + slot * _SEAL_BYTES for slot in range(len(self.slots))}
        return [slot for slot, at in places.items() if slot not in sealed and any(self.control[at : at + size])]

    def slot_of(self, step: int, generation: str = "") -> int | None:
        """Where a step lies; the later one if it was sealed twice, as the last step is when a run ends.

        `generation`: as that life sealed it, whatever followed.
        """
        found = {
            slot: seal.sequence
            for slot, seal in self.seals().items()
            if seal.step == step and generation in ("", seal.generation)
        }
        return max(found, key=found.__getitem__, default=None)

    def image(self, slot: int) -> memoryview:
        return memoryview(self.slots[slot])

    def checks(self, slot: int) -> tuple[int, ...] | None:
        """The chunk checksums of what is sealed in a slot, if somebody has made them."""
        seal = self.seals().get(slot)
        at = _head_bytes(len(self.slots)) + slot * _checks_bytes(self.slot_bytes)
        sequence, count = _CHECKS.unpack_from(self.control, at)
        if seal is None or sequence != seal.sequence or count != -(-self.slot_bytes // CHUNK_BYTES):
            return None
        record = self.control[at : at + _CHECKS.size + 8 * count]
        (total,) = _SUM.unpack_from(self.control, at + len(record))
        return (
            struct.unpack_from(f"<{count}Q", record, _CHECKS.size)
            if total == xxhash.xxh3_64_intdigest(record)
            else None
        )

    def set_checks(self, slot: int, sequence: int, checksums: tuple[int, ...]) -> None:
        at = _head_bytes(len(self.slots)) + slot * _checks_bytes(self.slot_bytes)
        record = _CHECKS.pack(sequence, len(checksums)) + struct.pack(f"<{len(checksums)}Q", *checksums)
        self.control[at : at + len(record) + _SUM.size] = _pack(record)


@dataclass(frozen=True, slots=True)
class Wreck:
    """What cannot be read: damaged, or its owner died while making or removing it."""

    folder: Path
    reason: str
    was_whole: bool  # it may have held something

    @property
    def rank(self) -> int:
        return int(self.folder.name.split("-")[1])

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def find_arenas(root: Path, run: str, wrecks: list[Wreck] | None = None) -> Iterator[Arena]:
    """Every readable arena of a run on this node; the others go to `wrecks`."""
    allow_many_files()
    try:
        folders = sorted((root / run).glob("rank-*"))
    except FileNotFoundError:
        return  # an ending keeper has just removed it
    for folder in folders:
        try:
            arena = Arena.open(folder)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):  # it may be whole
                raise TierFailed(f"{folder} cannot be read: {error.strerror}; raise that limit (ulimit -n)") from error
            if wrecks is not None:
                wrecks.append(Wreck(folder, str(error), _was_finished(folder)))
            continue
        yield arena


def _was_finished(folder: Path) -> bool:
    """Whether an arena was ever made whole: its header is written last, and nothing is sealed before."""
    try:
        with open(folder / "control", "rb") as control:
            return any(control.read(_HEADER.size))
    except OSError:
        return False
