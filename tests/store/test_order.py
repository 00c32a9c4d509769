"""Tensors whose dimensions lie in another order in memory are kept in that order, and are found as they were."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from everstep.capture.layout import Entry, shaped
from everstep.capture.shares import Share
from everstep.errors import Damaged, NewerFormat
from everstep.image import ImageLayout, lay_out, parse
from everstep.recover.assemble import tensor_in
from everstep.types import ImageInfo

INFO = ImageInfo(format=1, run="0" * 32, rank=0, world=1)
CHANNELS = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)


def share_of(tensor: Tensor, first: int = 0, rows: int | None = None) -> Share:
    entry = Entry(name="w", tensor=tensor, gate=None, at_cut=False, common=True, family="w")
    return Share(entry, first, tensor.shape[0] if rows is None else rows)


def image_of(share: Share) -> tuple[ImageLayout, bytearray]:
    """As capture makes it: the source is copied into its view of the image."""
    layout = lay_out([share.wanted()], INFO, 100)
    data = bytearray(layout.total_bytes)
    data[: len(layout.header)] = layout.header
    (piece,) = layout.pieces
    begin = len(layout.header) + piece.offset
    flat = torch.frombuffer(data, dtype=torch.uint8)[begin : begin + piece.length]
    shaped(flat.view(share.entry.tensor.dtype), piece).copy_(share.source())
    return layout, data


@given(st.lists(st.integers(1, 4), min_size=3, max_size=5), st.randoms(use_true_random=False), st.data())
def test_whatever_the_order_all_rows_come_back(sizes: list[int], chance: random.Random, data: st.DataObject) -> None:
    inner = list(range(1, len(sizes)))
    chance.shuffle(inner)
    stored = torch.arange(float(math.prod(sizes))).view([sizes[one] for one in (0, *inner)])
    tensor = stored.permute([[0, *inner].index(one) for one in range(len(sizes))])
    first = data.draw(st.integers(0, sizes[0] - 1))
    share = share_of(tensor, first, data.draw(st.integers(1, sizes[0] - first)))
    layout, image = image_of(share)
    again, _ = parse(image, len(image))
    assert again == layout
    (piece,) = again.pieces
    begin = len(layout.header) + piece.offset
    found = tensor_in(memoryview(image)[begin : begin + piece.length], piece)
    assert torch.equal(found, share.source())
    assert bytes(image[begin : begin + piece.length]) == stored.narrow(0, first, share.rows).numpy().tobytes()


def test_a_copy_moves_memory_as_it_is() -> None:
    layout = lay_out([share_of(CHANNELS).wanted()], INFO, 100)
    assert shaped(torch.empty(120), layout.pieces[0]).stride() == CHANNELS.stride()


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, 3, 4), torch.ones(4, 3).t(), torch.ones(3, 2, 4).transpose(0, 1), torch.ones(2, 3, 8)[:, :, ::2],
     torch.ones(2, 1, 1).expand(2, 3, 4), torch.ones(2, 3, 1, 1).to(memory_format=torch.channels_last)],
    ids=["plain", "transposed", "rows inside", "with holes", "expanded", "of one pixel"],
)  # fmt: skip
def test_what_has_no_such_order_is_kept_by_its_dimensions(tensor: Tensor) -> None:
    layout, image = image_of(share_of(tensor))
    assert layout.pieces[0].order is msgspec.UNSET
    assert parse(image, len(image))[1].format == 1
    assert tensor_in(memoryview(image)[len(layout.header) :][: layout.pieces[0].length], layout.pieces[0]).equal(tensor)


def test_other_tools_see_the_shape_that_it_has_in_memory(tmp_path: Path) -> None:
    _, image = image_of(share_of(CHANNELS))
    (tmp_path / "image.safetensors").write_bytes(image)
    assert torch.equal(load_file(tmp_path / "image.safetensors")["w"], CHANNELS.permute(0, 2, 3, 1))


def claiming(old: bytes, new: bytes) -> bytearray:
    """An image whose header says something else, its padding as long as it takes."""
    layout, image = image_of(share_of(CHANNELS))
    header = bytes(image[8 : len(layout.header)]).rstrip()
    assert header.count(old) == 1
    changed = header.replace(old, new).ljust(len(layout.header) - 8)
    return bytearray(struct.pack("<Q", len(changed)) + changed + image[len(layout.header) :])


@pytest.mark.parametrize("order", ["[0,2,3]", "[1,2,3,0]", "[0,2,2,1]", "[0,2,3,4]", "[0,-1,3,1]", "[]", "[0,1,2,3,4]"])
def test_an_order_that_is_none_is_refused(order: str) -> None:
    image = claiming(b"[0,2,3,1]", order.encode())
    with pytest.raises(Damaged, match=r"w has its dimensions in the order|unreadable header"):
        parse(image, len(image))


def test_it_says_that_it_is_of_a_later_format_and_a_still_later_one_is_refused() -> None:
    _, image = image_of(share_of(CHANNELS))
    assert parse(image, len(image))[1].format == 2
    later = claiming(rb"\"format\":2", rb"\"format\":4")
    with pytest.raises(NewerFormat, match="reads up to 3"):
        parse(later, len(later))
