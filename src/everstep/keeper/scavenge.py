"""After everybody is gone: what memory still holds goes to disk, and memory that nobody needs is given back.

The keeper does this for its own run when its trainers die; these are the same moves for a run whose keeper is dead too.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from everstep.capture.arena import Arena, arena_root, find_arenas
from everstep.errors import EverstepError
from everstep.keeper import flush
from everstep.keeper.protocol import connect
from everstep.store.disk import DiskTier
from everstep.store.manifest import committed_steps, decode
from everstep.topology import process_alive
from everstep.types import RunRecord

DIRECTORY = "directory"  # beside the arenas of a run: where its disk is
RUN_RECORD = "run.json"
_NEWBORN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The memory of one run on this node."""

    run: str
    directory: Path | None
    bytes: int
    state: str  # in use, spent, orphaned, or holding step n


def newest_whole(arenas: list[Arena]) -> int | None:
    """The newest step that all ranks of a world have sealed in one generation."""
    if not arenas or {arena.rank for arena in arenas} != set(range(arenas[0].world)):
        return None
    sealed = [{(seal.step, seal.generation) for seal in arena.seals().values()} for arena in arenas]
    return max((step for step, _ in set.intersection(*sealed)), default=None)


def scavenge(tier: DiskTier, arenas: list[Arena]) -> int | None:
    """Make the newest whole step in memory durable, if it is newer than what is; returns the durable step."""
    newest = newest_whole(arenas)
    durable = max(committed_steps(tier), default=None)
    if newest is None or (durable is not None and durable >= newest):
        return durable
    generation = ""
    for arena in arenas:
        slot = arena.slot_of(newest)
        assert slot is not None
        part = flush.persist_part(tier, arena, slot, torch_version="")
        if part is None:
            raise EverstepError(f"the arena of rank {arena.rank} is being written to; is the run alive?")
        generation = part.generation
    flush.commit(tier, newest, arenas[0].world, generation)
    return newest


def _is_used(folder: Path, arenas: list[Arena]) -> bool:
    """Whether a trainer or a keeper lives, or is just being born."""
    channel = connect(folder.name)
    if channel is not None:
        channel.close()
        return True
    newborn = not arenas and time.time() - folder.stat().st_mtime < _NEWBORN_S
    return newborn or any(process_alive(arena.pid) for arena in arenas)


def _owner(folder: Path) -> Path | None:
    """The run's directory, if it still is that run's."""
    try:
        directory = Path((folder / DIRECTORY).read_text())
        record = decode((directory / RUN_RECORD).read_bytes(), RunRecord, tier="disk", file=RUN_RECORD)
    except (OSError, EverstepError):
        return None
    return directory if record.run == folder.name else None


def look(memory_path: str | None = None) -> list[Left]:
    """Every run that has memory on this node."""
    return [_look(folder) for folder in _folders(memory_path)]


def _folders(memory_path: str | None) -> list[Path]:
    root = arena_root(memory_path)
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def _look(folder: Path) -> Left:
    arenas = list(find_arenas(folder.parent, folder.name))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    owner = _owner(folder)
    if _is_used(folder, arenas):
        state = "in use"
    elif owner is None:
        state = "orphaned"
    else:
        newest = newest_whole(arenas)
        durable = max(committed_steps(DiskTier(owner)), default=-1)
        state = "spent" if newest is None or newest <= durable else f"holding step {newest}"
    for arena in arenas:
        arena.close()
    return Left(run=folder.name, directory=owner, bytes=size, state=state)


def give_back(left: Left, memory_path: str | None = None) -> str:
    """Free the memory of a run that nobody uses, after saving what only it holds; says what was done."""
    folder = arena_root(memory_path) / left.run
    arenas = list(find_arenas(folder.parent, left.run))
    if _is_used(folder, arenas):
        return "kept: in use"
    done = "removed"
    if left.directory is not None and newest_whole(arenas) is not None:
        step = scavenge(DiskTier(left.directory), arenas)
        done = f"step {step} is on disk; removed"
    for arena in arenas:
        arena.close()
    shutil.rmtree(folder, ignore_errors=True)
    return done
