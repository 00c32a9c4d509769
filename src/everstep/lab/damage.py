"""Bits that turn in files of a run: which files there are of a kind, and the turning."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from everstep.capture.arena import find_arenas
from everstep.errors import EverstepError
from everstep.lab.injections import FileKind
from everstep.store.log import log_name, segments
from everstep.store.manifest import commit_name, committed_steps, data_name, part_name
from everstep.store.places import Places


def find_files(kind: FileKind, rank: int, directory: Path, memory: Sequence[Path]) -> list[Path]:
    """Of one rank, of the newest step that has such a file. `memory`: the folders of the run there."""
    if kind == "memory":
        return [slot for folder in memory for slot in _newest_slots(folder, rank)]
    try:
        tier = Places.written(directory).disk_tier()
        steps, logs = committed_steps(tier), segments(tier)
    except (EverstepError, OSError):
        return []
    if kind == "log":
        names = [log_name(start, rank) for start in logs]
    else:
        name = {"base": data_name, "manifest": part_name}
        names = [commit_name(step) if kind == "commit" else name[kind](step, rank) for step in steps]
    there = [path for path in (tier.root / name for name in names) if path.is_file() and path.stat().st_size]
    return there[-1:]


def _newest_slots(folder: Path, rank: int) -> Iterator[Path]:
    """Where the newest base of a rank lies whole."""
    for arena in find_arenas(folder.parent, folder.name):
        seals = arena.seals() if arena.rank == rank and arena.kind == "base" else {}
        if seals:
            yield Path(arena.place, f"slot-{max(seals, key=lambda slot: seals[slot].step)}.safetensors")
        arena.close()


def flip(files: Sequence[Path], bits: int, rng: random.Random) -> None:
    """So many different bits of all of them together."""
    if not files:
        raise EverstepError("the file was gone when its bits were to turn")
    sizes = [path.stat().st_size for path in files]
    if bits > 8 * sum(sizes):
        raise EverstepError(f"{bits} bits cannot turn in {sum(sizes)} bytes")
    for at in rng.sample(range(8 * sum(sizes)), bits):
        number = 0
        while at >= 8 * sizes[number]:
            at -= 8 * sizes[number]
            number += 1
        descriptor = os.open(files[number], os.O_RDWR)
        try:
            (byte,) = os.pread(descriptor, 1, at // 8)
            os.pwrite(descriptor, bytes([byte ^ (1 << at % 8)]), at // 8)
        finally:
            os.close(descriptor)
