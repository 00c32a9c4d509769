"""Bases go from arenas to an object store and come home from there, byte for byte."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from buckets import BUCKET, Server

from everstep.capture.arena import Arena
from everstep.capture.extras import encode
from everstep.config import Keep
from everstep.errors import Damaged
from everstep.image import CHUNK_BYTES, ImageLayout, Wanted, lay_out, parse
from everstep.keeper import flush
from everstep.recover.assemble import tensor_in, view
from everstep.recover.needs import Needs
from everstep.store.manifest import committed_steps, data_name, read_commit, read_data, read_part, run_name
from everstep.store.objects import ObjectTier
from everstep.types import ImageInfo

RUN, GENERATION, WORLD = "a" * 32, "b" * 32, 2
ROWS, COLUMNS = 6000, 1000  # 24 MB, so each rank's half goes up in parts


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


@pytest.fixture
def tier(server: Server, tmp_path: Path) -> ObjectTier:
    return ObjectTier(f"s3://{BUCKET}/{tmp_path.name}", server.options)


@pytest.fixture
def arenas() -> Iterator[list[tuple[Arena, ImageLayout]]]:
    made = []
    for rank in range(WORLD):
        info = ImageInfo(format=1, run=RUN, rank=rank, world=WORLD)
        half = ROWS // WORLD
        wanted = Wanted(
            name="model.w", dtype="F32", shape=(ROWS, COLUMNS), start=(rank * half, 0), extent=(half, COLUMNS)
        )  # fmt: skip
        layout = lay_out([wanted], info, 1000)
        made.append((Arena.create(None, run=RUN, rank=rank, world=WORLD, layout=layout, slots=2), layout))
    yield made
    for arena, _ in made:
        arena.close()


def weights(step: int) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(step))


def seal(arena: Arena, layout: ImageLayout, step: int) -> None:
    """What a trainer does in a step."""
    slot = step % 2
    arena.unseal(slot)
    image = memoryview(arena.slots[slot])
    (piece,) = layout.pieces
    begin = len(layout.header) + piece.offset
    rows = weights(step)[piece.start[0] : piece.start[0] + piece.extent[0]]
    tensor_in(image[begin : begin + piece.length], piece).copy_(rows)
    extras = encode({"step": step}, "extras")
    struct.pack_into("<Q", image, layout.extras_offset, len(extras))
    image[layout.extras_offset + 8 : layout.extras_offset + 8 + len(extras)] = extras
    image.release()
    arena.seal(slot, step=step, cut_time=time.time(), generation=GENERATION)


def write(tier: ObjectTier, arenas: list[tuple[Arena, ImageLayout]], step: int) -> None:
    for arena, layout in arenas:
        seal(arena, layout, step)
        assert not flush.commit(tier, step, range(WORLD), WORLD, GENERATION), "a commit before every part is there"
        assert flush.persist_part(tier, arena, step % 2, torch_version="x") is not None
    assert flush.commit(tier, step, range(WORLD), WORLD, GENERATION)


def home(tier: ObjectTier, step: int) -> torch.Tensor:
    """The way of `recover`: commit, manifests, data, tensors."""
    committed = read_commit(tier, step, RUN)
    images = {}
    for rank in range(WORLD):
        data = read_data(tier, read_part(tier, committed, rank))
        images[rank] = (*parse(data, len(data)), data)
    return view(images, step, Needs(None, 0, WORLD)).tensor("model.w")


def test_bases_of_two_ranks_are_committed_on_an_object_store_and_come_home(
    tier: ObjectTier, arenas: list[tuple[Arena, ImageLayout]]
) -> None:
    for step in (1, 2, 3):
        write(tier, arenas, step)
    assert flush.commit(tier, 3, range(WORLD), WORLD, GENERATION), "a second keeper that commits the same is no failure"
    assert committed_steps(tier) == [1, 2, 3] and run_name(tier) == RUN
    assert all(torch.equal(home(tier, step), weights(step)) for step in (1, 2, 3))
    assert flush.retire(tier, Keep(last=2), RUN) == [1]
    assert list(flush.sound_steps(tier, RUN)) == [3, 2]
    assert flush.set_aside(tier, 2, RUN, "c" * 32) == [3]
    assert committed_steps(tier) == [2]
    flush.clean(tier)
    assert tier.folders() == ["step-0000000002"]
    write(tier, arenas, 3)
    assert torch.equal(home(tier, 3), weights(3))


def test_a_part_is_written_anew_over_what_a_dead_keeper_left(
    tier: ObjectTier, arenas: list[tuple[Arena, ImageLayout]]
) -> None:
    write(tier, arenas, 1)
    arena, layout = arenas[0]
    for last in ("write step-0000000002/.data", "put step-0000000002/rank-00000.safetensors", "rank-00000.json"):

        def die(operation: str, last: str = last) -> None:
            if last in operation and not operation.startswith("delete"):
                raise KeyboardInterrupt

        seal(arena, layout, 2)
        tier.before = die
        with pytest.raises(KeyboardInterrupt):
            flush.persist_part(tier, arena, 0, torch_version="x")
        assert not flush.commit(tier, 2, range(WORLD), WORLD, GENERATION)
    tier.before = lambda operation: None
    write(tier, arenas, 2)
    assert torch.equal(home(tier, 2), weights(2))


def test_a_flipped_byte_in_an_object_is_found_and_so_is_one_that_is_cut_off_or_gone(
    tier: ObjectTier, arenas: list[tuple[Arena, ImageLayout]], server: Server, tmp_path: Path
) -> None:
    write(tier, arenas, 1)
    part = read_part(tier, read_commit(tier, 1, RUN), 1)
    (key,) = [key for key in server.objects(tmp_path.name) if ".data-" in key and "rank-00001" in key]
    data = bytearray(server.ask("GET", key))
    data[CHUNK_BYTES + 17] ^= 1
    server.ask("PUT", key, bytes(data))
    with pytest.raises(Damaged, match="the bytes do not match their checksum") as found:
        read_data(tier, part)
    assert found.value.chunk == 1 and found.value.file == data_name(1, 1) and found.value.tier == "objects"
    server.ask("PUT", key, bytes(data[:-1]))
    with pytest.raises(Damaged, match=f"{len(data) - 1} bytes instead of {len(data)}"):
        read_data(tier, part)
    server.ask("DELETE", key)
    with pytest.raises(Damaged, match="the data is missing"):
        read_data(tier, part)
    assert list(flush.sound_steps(tier, RUN)) == []
