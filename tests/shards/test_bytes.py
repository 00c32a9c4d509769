"""A rank reads what overlaps its own part, and nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from acts import Act, perform
from test_boxes import RUN, images_of
from torch.distributed.tensor import Shard

from everstep.errors import Damaged
from everstep.image import CHUNK_BYTES, FORMAT, parse
from everstep.recover.needs import Needs
from everstep.store.disk import DiskTier
from everstep.store.manifest import data_name, read_some
from everstep.types import Part, Place, as_raw


def part_on(tier: DiskTier) -> tuple[Part, torch.Tensor]:
    """One rank's part, of eight chunks, of a tensor that two ranks have."""
    whole = torch.arange(16 * CHUNK_BYTES // 4, dtype=torch.float32).reshape(64, -1)
    layout, info, data = images_of({"model.w": whole}, (2,), {"model.w": [Shard(0)]})[1]
    chunks = tier.put(data_name(1, 1), data)
    part = Part(
        format=FORMAT, run=RUN, generation="g", step=1, rank=1, world=2, bytes=len(data), chunk_bytes=CHUNK_BYTES,
        chunks=chunks, raw_pieces=as_raw(layout.pieces), cut_time=time.time(), torch="",
    )  # fmt: skip
    assert info.rank == 1
    return part, whole


def needs_of(start: int, rows: int, columns: int) -> Needs:
    """Of the first of two ranks; the part is that of the other."""
    needs = Needs(None, 0, 2)
    needs._places["model.w"] = Place((64, columns), (start, 0), (rows, columns))
    return needs


def test_only_chunks_with_needed_bytes_are_read_and_checked(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, name="disk")
    part, whole = part_on(tier)
    asked: list[int] = []
    read = tier.read

    def counted(name: str, offset: int, into: memoryview) -> int:
        asked.append(offset // CHUNK_BYTES)
        return read(name, offset, into)

    tier.read = counted  # type: ignore[method-assign]
    beside = needs_of(0, 32, whole.shape[1])  # what the other rank had

    def ranges(needs: Needs, image: memoryview) -> list[tuple[int, int]]:
        return needs.ranges(*parse(image, len(image)))

    _, size = read_some(tier, part, lambda image: ranges(beside, image))
    assert (sorted(asked), size) == ([0], CHUNK_BYTES)  # the header, which says so
    asked.clear()
    image, size = read_some(tier, part, lambda image: ranges(needs_of(40, 4, whole.shape[1]), image))
    assert sorted(asked) == [0, 2, 3] and size == 3 * CHUNK_BYTES  # four rows are a chunk, beside the header's
    layout, _ = parse(image, len(image))
    begin = len(layout.header) + layout.pieces[0].offset + 8 * whole[0].nbytes
    rows = torch.frombuffer(image, dtype=torch.float32, offset=begin, count=4 * whole.shape[1])
    assert torch.equal(rows.view(4, -1), whole[40:44])


def test_a_needed_chunk_with_a_flipped_bit_is_named_and_another_is_not_looked_at(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, name="disk")
    part, whole = part_on(tier)
    file = tmp_path / data_name(1, 1)
    with file.open("r+b") as data:
        data.seek(5 * CHUNK_BYTES + 17)
        byte = data.read(1)
        data.seek(-1, 1)
        data.write(bytes([byte[0] ^ 1]))
    for needs, is_bad in ((needs_of(0, 32, whole.shape[1]), False), (needs_of(32, 32, whole.shape[1]), True)):
        if is_bad:
            with pytest.raises(Damaged, match="chunk 5"):
                read_some(tier, part, lambda image: needs.ranges(*parse(image, len(image))))
        else:
            read_some(tier, part, lambda image: needs.ranges(*parse(image, len(image))))


@pytest.mark.soak
@pytest.mark.parametrize("wipe", [False, True], ids=["memory", "disk"])
def test_ranks_of_an_fsdp_run_read_little_more_than_their_own_parts(wipe: bool, tmp_path: Path) -> None:
    acts = [Act("fsdp", 4, "run", steps=1, model="Wide"), Act("fsdp", 4, "run", model="Wide", wipe=wipe)]
    _, again = perform(acts, tmp_path)
    parts = [path.stat().st_size for path in (tmp_path / "run").glob("step-*/*.safetensors")]
    assert len(parts) == 4 and min(parts) > CHUNK_BYTES
    for rank, began in enumerate(again.began):
        assert began["fetched"][0] <= parts[rank] + 3 * CHUNK_BYTES < sum(parts)
