"""After everybody is gone: what memory still holds goes to disk, and memory that nobody needs is given back.

The keeper does this for its own run when its trainers die; these are the same moves for a run whose keeper is dead too.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from everstep.capture.arena import Arena, find_arenas
from everstep.capture.host import arena_root
from everstep.errors import Damaged, EverstepError
from everstep.events import Degraded, Sink
from everstep.keeper import flush
from everstep.keeper.logbook import Logbook
from everstep.keeper.protocol import OWNER_NOTE, connect, find_runtime_folder, leave
from everstep.store.claim import keep_away
from everstep.store.disk import DiskTier
from everstep.store.manifest import committed_steps, parity_steps, run_name, step_folders
from everstep.store.places import Places, guests_in
from everstep.topology import process_alive

_NEWBORN_S = 60.0
_UNCLEAR, _PARTIAL, _GUESTS = "unclear", "holding a part of", "holding parts"  # how states begin that keep memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The memory of one run on this node."""

    run: str
    directory: Path | None
    bytes: int
    state: str  # in use, spent, orphaned, holding step n, a part of step n, or unclear: why


def whole_steps(arenas: list[Arena]) -> list[tuple[int, list[tuple[Arena, int]]]]:
    """The steps that all ranks of a world have sealed in one generation, newest first, and where each rank's slot is.

    A rank may have two arenas: one that its state outgrew, and its successor that has nothing sealed yet. Rings do not
    count: what one step consumed is no state.
    """
    found: dict[tuple[int, str, int], dict[int, tuple[Arena, int]]] = {}
    for arena in (arena for arena in arenas if arena.kind in ("base", "replica")):
        for slot, seal in sorted(arena.seals().items(), key=lambda item: item[1].sequence):
            found.setdefault((seal.step, seal.generation, arena.world), {})[arena.rank] = (arena, slot)
    whole = [(key[0], places) for key, places in found.items() if len(places) == key[2]]
    return [(step, [places[rank] for rank in sorted(places)]) for step, places in sorted(whole, key=lambda w: -w[0])]


def scavenge(tier: DiskTier, arenas: list[Arena], run: str) -> int | None:
    """Make what memory holds durable: its newest sound base, and the records of its rings.

    Returns the newest durable step. Raises Damaged if memory has steps, and none of them nor of the disk's is sound.
    """
    base = _scavenge_base(tier, arenas, run)
    rings = _rings(arenas)
    book = _book_of(tier, rings, base)
    values = [arena for arena in arenas if arena.kind == "values"]
    book.hold_values(values, rings)
    for ring in rings:
        while book.take(ring):
            continue  # every call takes as far as there is no gap
    book.save_values(values, torch_version="")
    return None if base is None else book.reach()


def _rings(arenas: list[Arena]) -> list[Arena]:
    """Those that hold records, in the order of their steps: rings of one rank follow each other."""
    return sorted(
        (ring for ring in arenas if ring.kind == "log" and ring.seals()),
        key=lambda ring: min(seal.step for seal in ring.seals().values()),
    )


def _book_of(tier: DiskTier, rings: list[Arena], base: int | None) -> Logbook:
    book = Logbook(tier, lambda event: None)
    book.base = -1 if base is None else base
    for rank, run in {(ring.rank, ring.run) for ring in rings}:
        book.go_on(rank, run)
    return book


def _scavenge_base(tier: DiskTier, arenas: list[Arena], run: str) -> int | None:
    """The newest whole and sound base in memory, if the disk has none as new that is sound."""
    durable = next(flush.sound_steps(tier, run), None)
    problem: Damaged | None = None
    for step, slots in whole_steps(arenas):
        if durable is not None and durable >= step:
            return durable
        try:
            if step in committed_steps(tier):
                flush.remove_checkpoint(tier, step)  # it is damaged, and here is a sound one
            _persist(tier, step, slots)
            return step
        except Damaged as error:
            problem = problem or error
    if problem is not None and durable is None:
        raise problem
    return durable


def _persist(tier: DiskTier, step: int, slots: list[tuple[Arena, int]]) -> None:
    generation = ""
    for arena, slot in slots:
        part = flush.persist_part(tier, arena, slot, torch_version="")
        if part is None:
            raise EverstepError(f"the arena of rank {arena.rank} is being written to; is the run alive?")
        generation = part.generation
    if not flush.commit(tier, step, [arena.rank for arena, _ in slots], slots[0][0].world, generation):
        raise EverstepError(f"step {step} was written, but {tier.root} does not give back what it was given")


def _is_used(folder: Path, arenas: list[Arena]) -> bool:
    """Whether a trainer or a keeper lives, or is just being born."""
    channel = connect(folder.name)
    if channel is not None:
        channel.close()
        return True
    newborn = not arenas and time.time() - folder.stat().st_mtime < _NEWBORN_S
    return newborn or any(process_alive(arena.pid) for arena in arenas)


def sign(folder: Path, directory: Path, emit: Sink) -> None:
    """Say beside the memory where its disk is, so that gc can save what only memory holds."""
    path, said = folder / OWNER_NOTE, os.fsencode(directory)
    try:
        if not path.exists() or path.read_bytes() != said:
            temporary = path.with_name(f".{path.name}-{os.getpid()}")
            temporary.write_bytes(said)
            os.replace(temporary, path)
    except OSError as error:
        emit(Degraded(what="gc cannot know whose memory this is", reason=str(error)))


def original(folder: Path, directory: Path) -> Path | None:
    """The directory whose memory this is, if that is another one of the same run: one is a copy of the other."""
    try:
        owner = _owner(folder)
        return None if owner is None or os.path.samefile(owner, directory) else owner
    except (Damaged, OSError):
        return None  # nobody has signed, or one of them is gone


def written_to(run: str, directory: Path) -> Path | None:
    """Where a keeper that lives still writes to, if that is somewhere else: what it had was moved."""
    channel, note = connect(run), find_runtime_folder(run) / OWNER_NOTE
    if channel is None:
        return None
    channel.close()
    try:
        place = Path(os.fsdecode(note.read_bytes()))
        return None if os.path.samefile(place, directory) else place
    except FileNotFoundError:
        return place if note.exists() else None


def _owner(folder: Path) -> Path | None:
    """The run's directory; None if it is gone or another run's by now. Damaged if that cannot be told."""
    try:
        said = (folder / OWNER_NOTE).read_bytes()
    except OSError:
        said = b""
    directory = Path(os.fsdecode(said))
    if not directory.is_absolute() or b"\0" in said:
        raise Damaged("it is not known whose memory this is", file=str(folder / OWNER_NOTE))
    try:
        return directory if run_name(DiskTier(directory)) == folder.name else None
    except (FileNotFoundError, NotADirectoryError):
        return None


def look(memory_path: str | None = None) -> list[Left]:
    """Every run that has memory on this node."""
    return [_look(folder) for folder in _folders(memory_path)]


def _folders(memory_path: str | None) -> list[Path]:
    root = arena_root(memory_path)
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def _look(folder: Path) -> Left:
    arenas = list(find_arenas(folder.parent, folder.name))
    owner: Path | None = None
    size = 0
    try:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        owner = _owner(folder)
        if _is_used(folder, arenas):
            state = "in use"
        elif guests := _guest_steps(folder):
            state = f"{_GUESTS} of other nodes, of step {max(guests)}"
        elif not _holds_any(arenas):
            state = "spent"
        elif owner is None:
            state = "orphaned"
        else:
            state = _held(Places.written(owner).disk_tier(), arenas, folder.name)
    except (EverstepError, OSError) as error:
        state = f"{_UNCLEAR}: {error}"
    for arena in arenas:
        arena.close()
    return Left(run=folder.name, directory=owner, bytes=size, state=state)


def _held(tier: DiskTier, arenas: list[Arena], run: str) -> str:
    durable = next(flush.sound_steps(tier, run), -1)
    rings = _rings(arenas)
    book = _book_of(tier, rings, durable)
    if any(step > durable for step in _partial_steps(arenas)):
        return f"{_PARTIAL} step {max(_partial_steps(arenas))}, the rest of which is on other nodes"
    steps = [step for step, _ in whole_steps(arenas)[:1] if step > durable]
    steps += [max(seal.step for seal in ring.seals().values()) for ring in rings if book.is_behind(ring)]
    return f"holding step {max(steps)}" if steps else "spent"


def _guest_steps(folder: Path) -> list[int]:
    """The steps of which other nodes have entrusted something to this one."""
    guests = guests_in(folder)
    return [*step_folders(guests), *parity_steps(guests)]


def _partial_steps(arenas: list[Arena]) -> list[int]:
    """The steps of ranks whose world is larger than what is on this node."""
    bases = [arena for arena in arenas if arena.kind in ("base", "replica")]
    here = {(arena.world, arena.rank) for arena in bases}
    partial = [arena for arena in bases if any((arena.world, rank) not in here for rank in range(arena.world))]
    return [seal.step for arena in partial for seal in arena.seals().values()]


def _holds_any(arenas: list[Arena]) -> bool:
    """Whether there is anything that could be needed, if nobody else had it."""
    return bool(whole_steps(arenas) or _rings(arenas) or _partial_steps(arenas))


def give_back(left: Left, memory_path: str | None = None, *, guests: bool = False) -> str:
    """Free the memory of a run that nobody uses, after saving what only it holds; says what was done.

    `guests`: also what this node holds for others, who may need it when they come back.
    """
    if left.state.startswith(_GUESTS):
        if not guests:
            return f"kept: {left.state}; --guests gives it up"
        folder = arena_root(memory_path) / left.run
        shutil.rmtree(guests_in(folder).root, ignore_errors=True)
        left = _look(folder)  # what this node has of its own is another matter
    if left.directory is None:
        return _give_back(left, memory_path)
    with keep_away(left.directory) as is_away:  # a job that comes back now waits, and finds all of it on the disk
        return _give_back(left, memory_path) if is_away else "kept: in use"


def _give_back(left: Left, memory_path: str | None) -> str:
    folder = arena_root(memory_path) / left.run
    arenas = list(find_arenas(folder.parent, left.run))
    if _is_used(folder, arenas):
        return "kept: in use"
    done = "removed"
    if left.state.startswith((_UNCLEAR, _PARTIAL)) and _holds_any(arenas):
        return f"kept: {left.state}"
    if left.directory is not None and _holds_any(arenas):
        step = scavenge(Places.written(left.directory).disk_tier(), arenas, left.run)
        done = f"step {step} is on disk; removed"
    for arena in arenas:
        arena.close()
    shutil.rmtree(folder, ignore_errors=True)
    leave(find_runtime_folder(left.run))  # where the socket was, if that is elsewhere
    return done
