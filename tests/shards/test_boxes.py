"""Boxes without processes: whatever the shapes, placements and meshes, what a rank puts together is its part."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from everstep.capture import extras
from everstep.capture.layout import Entry
from everstep.capture.shape import view_in
from everstep.capture.sharded import Box, located, sharers_at
from everstep.capture.shares import share
from everstep.errors import Damaged
from everstep.image import FORMAT, STEPPED_FORMAT, lay_out, parse
from everstep.recover.assemble import common, view
from everstep.recover.needs import Needs
from everstep.store.manifest import _overlaps, uncovered
from everstep.types import ImageInfo, Piece, Place

RUN = "0" * 32


def cut(tensor: Tensor, mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: list[Any]) -> Tensor:
    """The part at a place of a mesh, as torch would scatter it: one placement after the other."""
    for place, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts = list(tensor.chunk(mesh[place], placement.dim)) if tensor.shape[placement.dim] else [tensor]
            empty = tensor.narrow(placement.dim, 0, 0)
            parts += [empty] * (mesh[place] - len(parts))
            tensor = parts[coordinate[place]]
    return tensor


@st.composite
def layouts(draw: st.DrawFn, dims: int) -> tuple[tuple[int, ...], list[Any]]:
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    kinds = [st.just(Replicate())] + ([st.builds(Shard, st.integers(0, dims - 1))] if dims else [])
    return mesh, [draw(st.one_of(kinds)) for _ in mesh]


def places(mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(product(*map(range, mesh)))


def box_at(shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: list[Any]) -> Box:
    found = located(shape, mesh, coordinate, placements)
    assert not isinstance(found, str)
    ranks = tuple(range(math.prod(mesh)))
    return Box(shape, found[0], sharers_at(ranks, mesh, coordinate, placements))


def images_of(
    tensors: dict[str, Tensor], mesh: tuple[int, ...], placements: dict[str, list[Any] | str]
) -> dict[int, Any]:
    """What ranks of a mesh would have captured. In place of placements: "all" have it as under DDP, or its "own"."""
    images = {}
    world = math.prod(mesh)
    for rank, coordinate in enumerate(places(mesh)):
        entries = []
        for name, whole in tensors.items():
            how = placements[name]
            local = whole if isinstance(how, str) else cut(whole, mesh, coordinate, how)
            box = None if isinstance(how, str) else box_at(tuple(whole.shape), mesh, coordinate, how)
            entries.append(
                Entry(name=name, tensor=local, gate=0, at_cut=False, common=how != "own", family=name, box=box)
            )
        shares = share(entries, rank, world)
        layout = lay_out([s.wanted() for s in shares], ImageInfo(format=FORMAT, run=RUN, rank=rank, world=world), 4096)
        data = torch.zeros(layout.total_bytes, dtype=torch.uint8)
        data[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        pieces = {piece.name: piece for piece in layout.pieces}
        for chunk in (chunk for one in shares for chunk in one.chunks(48)):
            view_in(data, chunk, pieces, len(layout.header)).copy_(chunk.source())
        payload = extras.encode({"step": 1}, "state")
        room = len(payload).to_bytes(8, "little") + payload
        data[layout.extras_offset : layout.extras_offset + len(room)] = torch.frombuffer(
            bytearray(room), dtype=torch.uint8
        )
        images[rank] = (layout, ImageInfo(format=FORMAT, run=RUN, rank=rank, world=world), memoryview(data.numpy()))
    return images


@given(data=st.data())
def test_what_a_rank_puts_together_is_its_part(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=3))
    tensors = {
        f"model.{i}": torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + 1000 * i
        for i, shape in enumerate(shapes)
    }
    mesh = data.draw(layouts(0))[0]
    before = {
        name: data.draw(st.sampled_from(["all", "own"]))
        if data.draw(st.booleans())
        else [data.draw(layouts(tensor.dim()))[1][0] for _ in mesh]
        for name, tensor in tensors.items()
    }
    images = images_of(tensors, mesh, before)
    assert uncovered(layout.pieces for layout, _, _ in images.values()) is None
    onto = data.draw(layouts(0))[0]
    for rank, coordinate in enumerate(places(onto)):
        needs = Needs(None, rank, math.prod(onto))
        wanted = {}
        for name, whole in tensors.items():
            if data.draw(st.booleans()):
                wanted[name] = (whole, (0,) * whole.dim())
                continue
            placements = [data.draw(layouts(whole.dim()))[1][0] for _ in onto]
            start, extent = located(tuple(whole.shape), onto, coordinate, placements)  # type: ignore[misc]
            wanted[name] = (cut(whole, onto, coordinate, placements), start)
            assert extent == tuple(wanted[name][0].shape)
            needs._places[name] = Place(tuple(whole.shape), start, extent)
        found = view(_only(images, needs), 1, needs)
        for name, (part, start) in wanted.items():
            local = torch.full_like(part, -1.0)
            for target, source in common(found.pieces.get(name, []), local, start):
                target.copy_(source)
            assert torch.equal(local, part)
            assert found.kind(name).shape == tuple(tensors[name].shape)


def test_whoever_has_the_same_keeps_as_much_of_it() -> None:
    """Two tensors, replicated along different dimensions of one mesh: each has sharers of its own."""
    tensors = {"a": torch.arange(96.0).reshape(24, 4), "b": torch.arange(96.0).reshape(24, 4)}
    images = images_of(tensors, (2, 2), {"a": [Replicate(), Shard(0)], "b": [Shard(0), Replicate()]})
    kept = {rank: {p.name: p.start[0] for p in layout.pieces} for rank, (layout, _, _) in images.items()}
    assert kept == {0: {"a": 0, "b": 0}, 1: {"a": 12, "b": 6}, 2: {"a": 6, "b": 12}, 3: {"a": 18, "b": 18}}
    assert {p.extent for layout, _, _ in images.values() for p in layout.pieces} == {(6, 4)}


def _only(images: dict[int, Any], needs: Needs) -> dict[int, Any]:
    """The images with nothing in them but what a rank says that it needs."""
    found = {}
    for rank, (layout, info, data) in images.items():
        left = bytearray(len(data))
        for begin, end in [(0, len(layout.header)), *needs.ranges(layout, info)]:
            left[begin:end] = data[begin:end]
        found[rank] = (layout, info, memoryview(left))
    return found


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.booleans())
def test_fsdp_over_tensor_parallelism_is_cut_as_fsdp_cuts_it(dp: int, tp: int, rows: int, other: bool) -> None:
    """FSDP cuts what tensor parallelism has left; a strided placement says so from the other side."""
    whole = torch.arange(rows * dp * tp * 2 * tp).reshape(rows * dp * tp, 2 * tp)
    dim = 1 if other else 0
    first: Any = Shard(0) if other else _StridedShard(0, split_factor=tp)
    for d, t in product(range(dp), range(tp)):
        actual = whole.chunk(tp, dim)[t].chunk(dp, 0)[d]
        found = located(tuple(whole.shape), (dp, tp), (d, t), [first, Shard(dim)])
        assert not isinstance(found, str)
        (a, b), (n, m) = found
        assert torch.equal(whole[a : a + n, b : b + m], actual)


@pytest.mark.parametrize(
    ("shape", "placements", "words"),
    [
        ((8,), [Partial()], "neither a part nor a copy"),
        ((10,), [_StridedShard(0, split_factor=2), Shard(0)], "cannot be cut evenly"),
        ((8,), [_StridedShard(0, split_factor=2), Replicate()], "side by side"),
        ((8,), [Shard(1)], "a dimension that it has not"),
    ],
)
def test_what_is_no_box_is_refused(shape: tuple[int, ...], placements: list[Any], words: str) -> None:
    found = located(shape, (2,) * len(placements), (0,) * len(placements), placements)
    assert isinstance(found, str) and words in found


def piece(start: tuple[int, int], extent: tuple[int, int]) -> Piece:
    size = math.prod(extent) * 4
    return Piece(name="w", dtype="F32", shape=(4, 4), start=start, extent=extent, offset=0, length=size)


@given(st.data())
def test_boxes_overlap_if_an_element_is_in_two_of_them(data: st.DataObject) -> None:
    """Against counting elements, for as many of them as the tensor has."""
    sides = [[data.draw(st.integers(0, 3)) for _ in range(2)] for _ in range(data.draw(st.integers(1, 4)))]
    boxes = [piece((a, b), (data.draw(st.integers(0, 4 - a)), data.draw(st.integers(0, 4 - b)))) for a, b in sides]
    counts = torch.zeros(4, 4)
    for one in boxes:
        counts[one.start[0] : one.start[0] + one.extent[0], one.start[1] : one.start[1] + one.extent[1]] += 1
    assert (uncovered([tuple(boxes)]) is None) == bool((counts == 1).all())
    assert _overlaps(boxes) == bool((counts > 1).any())


def test_boxes_that_cover_some_elements_twice_are_no_checkpoint() -> None:
    """As many elements as there should be, and yet a hole."""
    good = [piece((0, 0), (4, 2)), piece((0, 2), (2, 2)), piece((2, 2), (2, 2))]
    assert uncovered([tuple(good)]) is None
    bad = [good[0], good[1], msgspec.structs.replace(good[2], start=(1, 2))]
    assert "twice" in str(uncovered([tuple(bad)]))
    with pytest.raises(Damaged, match="there twice"):
        images = {0: (SimpleNamespace(pieces=tuple(bad)), None, None)}
        view(images, 1, Needs(None, 0, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "place", [Place((4,), (2,), (3,)), Place((4,), (-1,), (2,)), Place((4,), (5,), (-1,)), Place((4, 2), (0,), (4,))]
)
def test_a_record_that_claims_to_step_what_is_no_box_is_refused(place: Place) -> None:
    def header(stepped: Place) -> bytes:
        info = ImageInfo(format=FORMAT, run=RUN, rank=0, world=2, stepped={"model.w": stepped})
        return lay_out([], info, 8).header

    _, info = parse(header(Place((4,), (2,), (2,))), 8192)
    assert info.stepped == {"model.w": Place((4,), (2,), (2,))} and info.format == STEPPED_FORMAT
    with pytest.raises(Damaged, match=r"no box of model\.w"):
        parse(header(place), 8192)
