"""From a slot to a medium: a part, then the commit when the last part is in place, then what may go goes.

Each function is safe to be killed in and called again: what is half there is removed or completed by the next call.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

import xxhash

from everstep import image
from everstep.capture.arena import Arena
from everstep.config import Keep
from everstep.errors import Damaged
from everstep.image import CHUNK_BYTES, FORMAT
from everstep.store.log import cut_after, strangers
from everstep.store.manifest import (
    Folder,
    commit_name,
    committed_steps,
    data_name,
    encode,
    part_name,
    put_record,
    read_commit,
    read_data,
    read_part,
    read_record,
    read_single_part,
    step_folder,
    step_folders,
    uncovered,
    values_folder,
    values_steps,
)
from everstep.store.retain import to_retire
from everstep.store.tier import Passing, Tier, freely
from everstep.types import Commit, ImageInfo, Part, PartRef, as_raw

_ORPHAN_AGE_S = 300.0


def persist_part(
    tier: Tier, arena: Arena, slot: int, *, torch_version: str, folder: Folder = step_folder,
    passing: Passing = freely,
) -> Part | None:  # fmt: skip
    """Write one sealed slot and its manifest. None if the slot was overwritten meanwhile, and then nothing is left."""
    seal = arena.seals().get(slot)
    if seal is None:
        return None
    data, known = arena.image(slot), arena.checks(slot)
    header = bytes(data[: image.header_bytes(data)])
    if xxhash.xxh3_64_intdigest(header) != seal.layout_digest:
        raise Damaged("the header is not the one that was sealed", tier="memory", step=seal.step, rank=arena.rank)
    layout, info = image.parse_cached(header, len(data), arena.place)
    data_file, part_file = data_name(seal.step, info.rank, folder), part_name(seal.step, info.rank, folder)
    for leftover in (part_file, data_file):
        tier.delete(leftover)
    chunks = tier.put(data_file, data, passing)
    if arena.seals().get(slot) != seal:
        tier.delete(data_file)
        return None
    if known is not None and chunks != known:
        tier.delete(data_file)
        first = next((i for i, (a, b) in enumerate(zip(chunks, known, strict=False)) if a != b), 0)
        reason = "the bytes no longer match their checksum"
        raise Damaged(reason, tier="memory", step=seal.step, rank=arena.rank, chunk=first)
    arena.set_checks(slot, seal.sequence, chunks)
    part = Part(
        format=info.format, run=info.run, generation=seal.generation, step=seal.step, rank=info.rank, world=info.world,
        bytes=len(data), chunk_bytes=CHUNK_BYTES, chunks=chunks, raw_pieces=as_raw(layout.pieces),
        cut_time=seal.cut_time, torch=torch_version, replica=info.replica,
    )  # fmt: skip
    return put_record(tier, part_file, part)


def put_image(
    tier: Tier, found: tuple[image.ImageLayout, ImageInfo, memoryview], *, step: int, generation: str,
    cut_time: float = 0.0, torch_version: str = "", folder: Folder = step_folder,
) -> Part:  # fmt: skip
    """Write an image that is in nobody's arena, and its manifest. `cut_time`: 0: now."""
    layout, info, data = found
    data_file, part_file = data_name(step, info.rank, folder), part_name(step, info.rank, folder)
    for leftover in (part_file, data_file):
        tier.delete(leftover)
    chunks = tier.put(data_file, data)
    part = Part(
        format=info.format, run=info.run, generation=generation, step=step, rank=info.rank, world=info.world,
        bytes=len(data), chunk_bytes=CHUNK_BYTES, chunks=chunks, raw_pieces=as_raw(layout.pieces),
        cut_time=cut_time or time.time(), torch=torch_version, replica=info.replica,
    )  # fmt: skip
    return put_record(tier, part_file, part)


def part_in_place(tier: Tier, arena: Arena, slot: int, run: str) -> Part | None:
    """A part that was written before, and waits for those of others: one of them may commit it at any time."""
    seal = arena.seals().get(slot)
    if seal is None:
        return None
    try:
        part = read_single_part(tier, seal.step, arena.rank, run, step_folder)
    except (FileNotFoundError, Damaged):
        return None
    is_same = (part.generation, part.bytes, part.cut_time) == (seal.generation, seal.length, seal.cut_time)
    return part if is_same else None


def commit(
    tier: Tier, step: int, ranks: Sequence[int], world: int, generation: str, known: Iterable[Part] = ()
) -> bool:
    """Write the commit if the part of each of these ranks is there, of one generation, and all together are whole.

    `known`: parts that the caller has written or read itself. To see that they lie there still takes less than to
    read them as if somebody else had written them.
    """
    parts, pieces, by_rank = [], [], {part.rank: part for part in known}
    for rank in ranks:
        file = part_name(step, rank)
        try:
            part = by_rank.get(rank)
            if part is None or tier.get(file) != encode(part):
                part = read_record(tier, file, Part, step=step, rank=rank)
            pieces.append(part.pieces)
        except (FileNotFoundError, Damaged):
            return False
        if part.generation != generation or part.world != world:
            return False
        parts.append(part)
    missing = uncovered(pieces) if len(parts) == world else None
    if missing is not None:
        raise Damaged(f"the parts are not a whole checkpoint: {missing}", tier=tier.name, step=step)
    record = Commit(
        format=FORMAT, run=parts[0].run, generation=generation, step=step, world=world,
        parts=tuple(PartRef(rank=p.rank, bytes=p.bytes, digest=p.digest) for p in parts),
        cut_time=max(p.cut_time for p in parts), committed_time=time.time(),
    )  # fmt: skip
    try:
        put_record(tier, commit_name(step), record)
    except FileExistsError:
        if not _says_the_same(tier, record):  # an earlier life's: the parts that it names are no longer there
            tier.delete(commit_name(step))
            put_record(tier, commit_name(step), record)
    return True


def _says_the_same(tier: Tier, record: Commit) -> bool:
    """Whether the commit that is there names the same parts: another keeper of this life was a moment earlier."""
    try:
        found = read_commit(tier, record.step, record.run)
    except (Damaged, OSError):
        return False
    return (found.generation, found.world, found.parts) == (record.generation, record.world, record.parts)


def sound_steps(tier: Tier, run: str, *, read_all: bool = True) -> Iterator[int]:
    """The committed steps that can be restored, newest first: records are checked, sizes, and with `read_all` bytes."""
    return (step for step in reversed(committed_steps(tier)) if _is_sound(tier, step, run, read_all=read_all))


def _is_sound(tier: Tier, step: int, run: str, *, read_all: bool) -> bool:
    try:
        committed = read_commit(tier, step, run)
        for ref in committed.parts:
            part = read_part(tier, committed, ref.rank)
            if read_all:
                read_data(tier, part)
            elif tier.size(data_name(step, ref.rank)) != part.bytes:
                return False
    except (Damaged, OSError):
        return False
    return True


def retire(
    tier: Tier, keep: Keep, run: str, *, read_all: bool = False, before: int | None = None,
    everywhere: Collection[int] | None = None,
) -> list[int]:  # fmt: skip
    """Let go what the policy lets go: commits first, so that no commit ever names what is not there.

    Of what is damaged nothing counts as kept, so the last restorable checkpoint stays. `before`: the newest step that
    all nodes have, where each has its own parts only; nothing from there on goes, however old it is. `everywhere`:
    all that they have.
    """
    committed = committed_steps(tier)
    sound = list(islice(sound_steps(tier, run, read_all=read_all), keep.last))
    looked_at = [step for step in committed if len(sound) < keep.last or step >= sound[-1]]
    damaged, judged = set(looked_at) - set(sound), set(looked_at)
    gone = to_retire(committed, keep, damaged=damaged, everywhere=everywhere)
    while relied_on := _relied_on(committed, gone, judged, keep):
        damaged |= {step for step in relied_on if not _is_sound(tier, step, run, read_all=read_all)}
        judged |= relied_on
        gone = to_retire(committed, keep, damaged=damaged, everywhere=everywhere)
    gone = [step for step in gone if before is None or step < before]
    for step in gone:
        remove_checkpoint(tier, step)
    return gone


def _relied_on(committed: Collection[int], gone: Collection[int], judged: Collection[int], keep: Keep) -> set[int]:
    """The steps in whose favour others are to go, and that nobody has looked at yet."""
    if keep.every is None:
        return set()
    decided = {step // keep.every for step in set(gone).difference(judged)}
    return {step for step in set(committed).difference(gone, judged) if step // keep.every in decided}


def oldest_followed(tier: Tier, keep: Keep, run: str, *, before: int | None = None) -> int:
    """The base that the log on a tier begins at: an older milestone is whole without it. `before`: as for `retire`."""
    committed = committed_steps(tier)
    sound = [] if keep.every in (None, 1) else list(islice(sound_steps(tier, run, read_all=False), keep.last))
    if not sound:
        return min(committed, default=-1)
    return min([*sound, *(step for step in committed if before is not None and step >= before)])


def remove_checkpoint(tier: Tier, step: int) -> None:
    tier.delete(commit_name(step))
    tier.delete_folder(step_folder(step))


def clean(tier: Tier) -> list[int]:
    """Remove what crashes left: temporary files, and parts without a commit that a newer commit has overtaken."""
    tier.sweep(_ORPHAN_AGE_S)
    committed = committed_steps(tier)
    newest = max(committed, default=-1)
    orphans = [step for step in step_folders(tier) if step not in committed and step < newest]
    for step in orphans:
        tier.delete_folder(step_folder(step))
    for folder in tier.folders():
        if folder.startswith("rejected-") and committed:
            tier.delete_folder(folder)
    return orphans


def set_aside(tier: Tier, after: int | None, run: str, generation: str) -> list[int]:
    """Commits newer than the step that a life goes on from: passed over at recovery, and about to be made anew.

    Those of the life itself stay: it may only have lost its keeper.
    """
    newer = [step for step in committed_steps(tier) if after is None or step > after]
    gone = disown(tier, after, run, generation)
    for step in step_folders(tier):
        if (after is None or step > after) and (step in gone or step not in newer):
            with suppress(FileNotFoundError):  # it was just being removed
                tier.rename_folder(step_folder(step), f"rejected-{step:010d}-{time.time_ns():x}")
    return gone


def disown(tier: Tier, after: int | None, run: str, generation: str) -> list[int]:
    """Delete the commits of other lives that are newer than what this one goes on from, so that it can make its own."""
    newer = [step for step in committed_steps(tier) if after is None or step > after]
    gone = [step for step in newer if not _is_of(tier, step, run, generation)]
    for step in gone:
        tier.delete(commit_name(step))
    return gone


def disown_all(tier: Tier, after: int | None, run: str, generation: str) -> list[int]:
    """The same of all that a deeper tier has: commits, values and records. The commits that are gone."""
    gone = disown(tier, after, run, generation)
    disown_values(tier, after, generation)
    cut_after(tier, after, strangers(tier, after, run, generation), run, generation)
    return gone


def _is_of(tier: Tier, step: int, run: str, generation: str) -> bool:
    try:
        return read_commit(tier, step, run).generation == generation
    except (Damaged, OSError):
        return False


def disown_values(tier: Tier, after: int | None, generation: str) -> None:
    """Delete the values of other lives beyond the step that this one goes on from."""
    for step in values_steps(tier):
        if (after is None or step > after) and generation not in _lives(tier, values_folder(step)):
            tier.delete_folder(values_folder(step))


def _lives(tier: Tier, folder: str) -> Iterator[str]:
    """Those that parts in a folder are of, as far as they can be read."""
    for name in tier.names(folder):
        if name.endswith(".json"):
            try:
                yield read_record(tier, name, Part).generation
            except (Damaged, OSError):
                continue
