"""From a slot to a medium: a part, then the commit when the last part is in place, then what may go goes.

Each function is safe to be killed in and called again: what is half there is removed or completed by the next call.
"""

from __future__ import annotations

import time
from functools import lru_cache

from everstep import image
from everstep.capture.arena import Arena
from everstep.config import Keep
from everstep.errors import Damaged
from everstep.image import CHUNK_BYTES, FORMAT
from everstep.store.manifest import (
    commit_name,
    committed_steps,
    data_name,
    decode,
    encode,
    part_name,
    step_folder,
    step_folders,
    uncovered,
)
from everstep.store.retain import to_retire
from everstep.store.tier import Tier
from everstep.types import Commit, ImageInfo, Part, PartRef

_ORPHAN_AGE_S = 300.0


def persist_part(tier: Tier, arena: Arena, slot: int, *, torch_version: str) -> Part | None:
    """Write one sealed slot and its manifest. None if the slot was overwritten meanwhile, and then nothing is left."""
    seal = arena.seals().get(slot)
    if seal is None:
        return None
    data = arena.image(slot)
    layout, info = _parsed(bytes(data[: image.header_bytes(data)]), len(data), arena.place)
    for leftover in (part_name(seal.step, info.rank), data_name(seal.step, info.rank)):
        tier.delete(leftover)
    chunks = tier.put(data_name(seal.step, info.rank), data)
    if arena.seals().get(slot) != seal:
        tier.delete(data_name(seal.step, info.rank))
        return None
    arena.set_checks(slot, seal.sequence, chunks)
    part = Part(
        format=FORMAT, run=info.run, generation=seal.generation, step=seal.step, rank=info.rank, world=info.world,
        bytes=len(data), chunk_bytes=CHUNK_BYTES, chunks=chunks, pieces=layout.pieces, cut_time=seal.cut_time,
        torch=torch_version,
    )  # fmt: skip
    tier.put(part_name(seal.step, info.rank), memoryview(encode(part)))
    return part


@lru_cache(maxsize=8)
def _parsed(header: bytes, total_bytes: int, place: str) -> tuple[image.ImageLayout, ImageInfo]:
    """Many tensors take long to read, and their header is the same at every step."""
    return image.parse(header, total_bytes, file=place)


def commit(tier: Tier, step: int, world: int, generation: str) -> bool:
    """Write the commit if every rank's part is there, of one generation, and together they are whole."""
    parts = []
    for rank in range(world):
        file = part_name(step, rank)
        try:
            part = decode(tier.get(file), Part, tier=tier.name, file=file)
        except (FileNotFoundError, Damaged):
            return False
        if part.generation != generation or part.world != world:
            return False
        parts.append(part)
    missing = uncovered(part.pieces for part in parts)
    if missing is not None:
        raise Damaged(f"the parts are not a whole checkpoint: {missing}", tier=tier.name, step=step)
    record = Commit(
        format=FORMAT, run=parts[0].run, generation=generation, step=step, world=world,
        parts=tuple(PartRef(rank=p.rank, bytes=p.bytes, digest=_digest(p)) for p in parts),
        cut_time=max(p.cut_time for p in parts), committed_time=time.time(),
    )  # fmt: skip
    try:
        tier.put(commit_name(step), memoryview(encode(record)))
    except FileExistsError:
        pass  # another keeper was a moment earlier; its commit names the same parts
    return True


def _digest(part: Part) -> str:
    return part.digest if part.digest else decode(encode(part), Part, tier="", file="").digest


def retire(tier: Tier, keep: Keep, *, damaged: tuple[int, ...] = ()) -> list[int]:
    """Let go what the policy lets go: commits first, so that no commit ever names what is not there."""
    gone = to_retire(committed_steps(tier), keep, damaged=damaged)
    for step in gone:
        remove_checkpoint(tier, step)
    return gone


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


def set_aside(tier: Tier, after: int | None) -> list[int]:
    """Commits newer than the step that the run goes on from: passed over at recovery, and about to be made anew."""
    newer = [step for step in committed_steps(tier) if after is None or step > after]
    for step in newer:
        tier.delete(commit_name(step))
    for step in step_folders(tier):
        if after is None or step > after:
            tier.rename_folder(step_folder(step), f"rejected-{step:010d}-{time.time_ns():x}")
    return newer
