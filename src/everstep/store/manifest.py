"""The records that make bytes a checkpoint: parts, commits, and how each is checked.

A record is canonical JSON that carries its own digest: decoding it and encoding it again must give the same bytes.
Out: data, part manifest, commit. Home: commit, part manifest, data. The chain of digests runs the same way, so a
file from another step, rank or run cannot stand in for the right one.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import xxhash

from everstep.errors import Damaged, NewerFormat
from everstep.image import CHUNK_BYTES, FORMAT, NEWEST_FORMAT, header_bytes
from everstep.store.blocks import room_for
from everstep.store.tier import Tier
from everstep.types import (
    Attempt,
    Commit,
    DatasetRecord,
    HaltRecord,
    ParityRecord,
    Part,
    Piece,
    Rewind,
    Room,
    RunRecord,
    TiersRecord,
    learnt,
)

Record = TypeVar(
    "Record", Commit, Part, RunRecord, TiersRecord, ParityRecord, HaltRecord, Attempt, Rewind, DatasetRecord
)

_COMMIT_NAME = re.compile(r"step-(\d{10})\.json")
_STEP_FOLDER = re.compile(r"step-(\d{10})")
_VALUES_FOLDER = re.compile(r"values-(\d{10})")
_PARITY_FOLDER = re.compile(r"parity-(\d{10})")
_MAX_RECORD_BYTES = 256 << 20
RUN_RECORD = "run.json"
Folder = Callable[[int], str]  # where the parts of a step lie
Ranges = Callable[[memoryview], list[tuple[int, int]]]  # of an image of which the header is there: what is needed of it


@learnt
class _Format(msgspec.Struct):
    format: int


def step_folder(step: int) -> str:
    return f"step-{step:010d}"


def commit_name(step: int) -> str:
    return f"{step_folder(step)}.json"


def values_folder(step: int) -> str:
    """Where a step of the log has what is too large for every record."""
    return f"values-{step:010d}"


def data_name(step: int, rank: int, folder: Folder = step_folder) -> str:
    return f"{folder(step)}/rank-{rank:05d}.safetensors"


def part_name(step: int, rank: int, folder: Folder = step_folder) -> str:
    return f"{folder(step)}/rank-{rank:05d}.json"


def parity_folder(step: int) -> str:
    """Where a node has its parity of a step."""
    return f"parity-{step:010d}"


def parity_names(step: int, member: int) -> tuple[str, str]:
    """The parity of a member of a group, and what it is made of."""
    stem = f"{parity_folder(step)}/member-{member:05d}"
    return f"{stem}.parity", f"{stem}.json"


def parity_steps(tier: Tier) -> list[int]:
    return [int(m[1]) for name in tier.folders() if (m := _PARITY_FOLDER.fullmatch(name))]


def values_steps(tier: Tier) -> list[int]:
    return [int(m[1]) for name in tier.folders() if (m := _VALUES_FOLDER.fullmatch(name))]


def read_single_part(tier: Tier, step: int, rank: int, run: str, folder: Folder) -> Part:
    """The manifest of one rank's part where no commit names it. FileNotFoundError if it is not there."""
    file = part_name(step, rank, folder)
    part = read_record(tier, file, Part, step=step, rank=rank)
    if (part.step, part.rank, part.run) != (step, rank, run):
        raise Damaged("a manifest of another run, step or rank", tier=tier.name, file=file, step=step, rank=rank)
    return part


def encode(record: Record) -> bytes:
    return msgspec.json.encode(_digested(record))


def _digested(record: Record) -> Record:
    body = msgspec.json.encode(msgspec.structs.replace(record, digest=""))
    return msgspec.structs.replace(record, digest=xxhash.xxh3_128_hexdigest(body))


def put_record(tier: Tier, file: str, record: Record) -> Record:
    """Write a record; as whoever reads it has it, with its digest."""
    record = _digested(record)
    tier.put(file, memoryview(msgspec.json.encode(record)))
    return record


def decode(
    data: bytes | memoryview,
    kind: type[Record],
    *,
    tier: str,
    file: str,
    step: int | None = None,
    rank: int | None = None,
) -> Record:
    """A record that anybody may have written. `step` and `rank`: whose it should be, for the message."""
    data = bytes(data)
    try:
        version = msgspec.json.decode(data, type=_Format).format
        known = NEWEST_FORMAT if kind is Part else FORMAT
        if version > known:
            newer = f"format {version}, and this Everstep reads up to {known}; upgrade it"
            raise NewerFormat(newer, tier=tier, file=file, step=step, rank=rank)
        record = msgspec.json.decode(data, type=kind)
        canonical = encode(record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise Damaged(f"unreadable record: {error}", tier=tier, file=file, step=step, rank=rank) from None
    if canonical != data:
        raise Damaged("the record does not match its digest", tier=tier, file=file, step=step, rank=rank)
    return record


def read_record(
    tier: Tier, file: str, kind: type[Record], *, step: int | None = None, rank: int | None = None
) -> Record:
    """Read and check a record. FileNotFoundError if it is not there."""
    size = tier.size(file)
    if size > _MAX_RECORD_BYTES:
        raise Damaged(f"a record of {size} bytes is none of ours", tier=tier.name, file=file, step=step, rank=rank)
    return decode(tier.get(file), kind, tier=tier.name, file=file, step=step, rank=rank)


def run_name(tier: Tier) -> str:
    """Whose directory this is: run.json says it, and so does every commit, should run.json be lost or damaged.

    FileNotFoundError if neither is there.
    """
    try:
        return read_record(tier, RUN_RECORD, RunRecord).run
    except NewerFormat:
        raise
    except (FileNotFoundError, Damaged):
        named = set()
        for step in committed_steps(tier):
            try:
                named.add(read_record(tier, commit_name(step), Commit, step=step).run)
            except (Damaged, OSError):
                continue
        if len(named) == 1:
            return named.pop()
        if committed_steps(tier):
            why = f"the commits are of {len(named)} runs" if named else "no commit can be read either"
            raise Damaged(f"the run's record is lost, and {why}", tier=tier.name, file=RUN_RECORD) from None
        raise


def committed_steps(tier: Tier) -> list[int]:
    return [int(m[1]) for name in tier.names() if (m := _COMMIT_NAME.fullmatch(name))]


def step_folders(tier: Tier) -> list[int]:
    return [int(m[1]) for name in tier.folders() if (m := _STEP_FOLDER.fullmatch(name))]


def read_commit(tier: Tier, step: int, run: str) -> Commit:
    file = commit_name(step)
    commit = read_record(tier, file, Commit, step=step)
    if (commit.step, commit.run) != (step, run):
        raise Damaged(f"this commit is of step {commit.step} of run {commit.run}", tier=tier.name, file=file, step=step)
    ranks = [ref.rank for ref in commit.parts]
    if not ranks or ranks != sorted(set(ranks)) or ranks[-1] >= commit.world:
        raise Damaged("the commit does not list ranks of its world, each once", tier=tier.name, file=file, step=step)
    return commit


def partial_steps(tier: Tier, run: str) -> list[int]:
    """The committed steps of which other nodes have the rest."""
    found = []
    for step in committed_steps(tier):
        try:
            commit = read_commit(tier, step, run)
        except (Damaged, OSError):
            continue  # nobody can restore from it
        if len(commit.parts) < commit.world:
            found.append(step)
    return found


def read_part(tier: Tier, commit: Commit, rank: int) -> Part:
    """The manifest of one rank's part, checked against its commit."""
    file = part_name(commit.step, rank)
    try:
        part = read_record(tier, file, Part, step=commit.step, rank=rank)
    except FileNotFoundError:
        raise Damaged("the manifest is missing", tier=tier.name, file=file, step=commit.step, rank=rank) from None
    committed = next(ref for ref in commit.parts if ref.rank == rank)
    same = (part.run, part.generation, part.step, part.rank, part.world) == (
        commit.run, commit.generation, commit.step, rank, commit.world
    )  # fmt: skip
    if part.digest != committed.digest or not same:
        raise Damaged("not the manifest that was committed", tier=tier.name, file=file, step=commit.step, rank=rank)
    return part


def read_data(tier: Tier, part: Part, folder: Folder = step_folder, *, room: Room = room_for) -> memoryview:
    """The image of one part, with every chunk checked as it comes."""
    file = data_name(part.step, part.rank, folder)

    def bad(reason: str, chunk: int | None = None) -> Damaged:
        return Damaged(reason, tier=tier.name, step=part.step, rank=part.rank, file=file, chunk=chunk)

    try:
        size = tier.size(file)
        if size != part.bytes:
            raise bad(f"{size} bytes instead of {part.bytes}")
        checks = Checks(size, part.chunks, part.chunk_bytes, bad)
        image = tier.get(file, room=room, arrived=checks.check)
    except FileNotFoundError:
        raise bad("the data is missing") from None
    checks.finish(len(image))
    return image


def read_some(tier: Tier, part: Part, ranges: Ranges, folder: Folder = step_folder) -> tuple[memoryview, int]:
    """The image of one part as far as it is needed, with every chunk of that checked, and how many bytes were read.

    Elsewhere it is empty. `ranges`: what is needed, as the image's header tells.
    """
    file = data_name(part.step, part.rank, folder)

    def bad(reason: str, chunk: int | None = None) -> Damaged:
        return Damaged(reason, tier=tier.name, step=part.step, rank=part.rank, file=file, chunk=chunk)

    if part.bytes < 8:
        raise bad(f"{part.bytes} bytes are no image")
    image, known = memoryview(mmap.mmap(-1, part.bytes)), set[int]()

    def read(chunk: int) -> None:
        at = chunk * CHUNK_BYTES
        into = image[at : at + CHUNK_BYTES]
        if tier.read(file, at, into) != len(into):
            raise bad(f"it ends before byte {at + len(into)}")

    def fill(begin: int, end: int) -> None:
        fresh = [chunk for chunk in chunks_in([(begin, end)]) if chunk not in known]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read, fresh))
        check_chunks(image, part.chunks, part.chunk_bytes, bad, fresh)
        known.update(fresh)

    try:
        fill(0, 8)
        fill(0, header_bytes(image))
        for begin, end in ranges(image):
            fill(begin, end)
    except FileNotFoundError:
        raise bad("the data is missing") from None
    return image, sum(len(image[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]) for chunk in known)


def chunks_in(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """The chunks that some bytes lie in, each once."""
    found = (range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)) for begin, end in ranges if begin < end)
    return sorted({chunk for some in found for chunk in some})


class Checks:
    """The chunks of an image against their checksums; `bad` makes the error from a reason and a chunk."""

    def __init__(self, size: int, chunks: tuple[int, ...], chunk_bytes: int, bad: Callable[..., Damaged]) -> None:
        if chunk_bytes != CHUNK_BYTES or len(chunks) != -(-size // chunk_bytes):
            raise bad(f"{len(chunks)} checksums do not fit {size} bytes")
        self._size, self._chunks, self._bad = size, chunks, bad
        self._good: set[int] = set()

    def check(self, offset: int, chunk: memoryview) -> None:
        """One chunk, which begins at `offset`. Threads may ask at once."""
        index, beside = divmod(offset, CHUNK_BYTES)
        if beside or not chunk or len(chunk) != min(CHUNK_BYTES, self._size - offset):
            raise self._bad(f"{len(chunk)} bytes from {offset} on are no chunk")
        if xxhash.xxh3_64_intdigest(chunk) != self._chunks[index]:
            raise self._bad("the bytes do not match their checksum", index)
        self._good.add(index)

    def finish(self, size: int) -> None:
        """Whether an image of so many bytes is all that was checked."""
        if size != self._size:
            raise self._bad(f"{size} bytes instead of {self._size}")
        if len(self._good) != len(self._chunks):
            raise self._bad(f"{len(self._good)} of {len(self._chunks)} chunks were checked")


def check_chunks(
    image: memoryview, chunks: tuple[int, ...], chunk_bytes: int, bad: Callable[..., Damaged],
    only: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """All of an image that is there, or some chunks of it."""
    checks = Checks(len(image), chunks, chunk_bytes, bad)

    def check(index: int) -> None:
        at = index * CHUNK_BYTES
        checks.check(at, image[at : at + CHUNK_BYTES])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, range(len(chunks)) if only is None else only))


def uncovered(parts: Iterable[tuple[Piece, ...]]) -> str | None:
    """Why these parts together are not a whole checkpoint, or None if they are."""
    found: dict[str, list[Piece]] = {}
    for pieces in parts:
        for piece in pieces:
            if not piece.private:
                found.setdefault(piece.name, []).append(piece)
    for name, boxes in found.items():
        if len(boxes) == 1 and boxes[0].whole:
            continue  # as most are: there may be many
        shape = boxes[0].shape
        if any(piece.shape != shape for piece in boxes):
            return f"ranks disagree on the shape of {name}"
        volume = sum(math.prod(piece.extent) for piece in boxes)
        if volume != math.prod(shape):
            return f"{volume} of {math.prod(shape)} elements of {name} are there"
        if len(boxes) > 1 and volume and _overlaps(boxes):
            return f"some elements of {name} are there twice, and others are not"
    return None


def _overlaps(boxes: list[Piece]) -> bool:
    """Whether two boxes have an element in common: seen while going along the dimension that is cut most often."""
    dims = range(len(boxes[0].shape))
    along = max(dims, key=lambda d: len({piece.start[d] for piece in boxes}))
    beside = [d for d in dims if d != along]
    open_: list[Piece] = []  # those that have begun and not ended
    for piece in sorted((one for one in boxes if math.prod(one.extent)), key=lambda one: one.start[along]):
        open_ = [one for one in open_ if one.start[along] + one.extent[along] > piece.start[along]]
        for one in open_:
            if all(_meet(one.start[d], one.extent[d], piece.start[d], piece.extent[d]) for d in beside):
                return True
        open_.append(piece)
    return False


def _meet(start: int, extent: int, other: int, its_extent: int) -> bool:
    return start < other + its_extent and other < start + extent
