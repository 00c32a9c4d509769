"""The tensors of an image are cut out of it many at a time, and each is what its own bytes say."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.capture import extras
from everstep.capture.layout import TORCH_DTYPES
from everstep.image import ITEM_BYTES, Wanted, lay_out, parse, put_extras
from everstep.recover.assemble import view
from everstep.recover.needs import Needs
from everstep.types import ImageInfo

INFO = ImageInfo(format=1, run="0" * 32, rank=0, world=1)
SHAPES = st.lists(st.integers(0, 4), max_size=4)


@given(st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), SHAPES, st.booleans()), max_size=30), st.booleans())
def test_whatever_lies_beside_it_a_tensor_is_what_its_bytes_say(
    kinds: list[tuple[str, list[int], bool]], is_readonly: bool
) -> None:
    wanted = [
        Wanted(
            name=f"w{i}", dtype=dtype, shape=tuple(shape), start=(0,) * len(shape), extent=tuple(shape),
            order=(0, 2, 1) if is_ordered and len(shape) == 3 else msgspec.UNSET,
        )
        for i, (dtype, shape, is_ordered) in enumerate(kinds)
    ]  # fmt: skip
    told = extras.encode({"step": 7}, "state")
    layout = lay_out(wanted, INFO, len(told))
    size = layout.total_bytes - len(layout.header)
    data = memoryview(bytearray(layout.header) + np.random.default_rng(len(kinds)).bytes(size))
    put_extras(layout, data, told)
    again, info = parse(data, len(data))

    found = view({0: (again, info, data.toreadonly() if is_readonly else data)}, 7, Needs(None, 0, 1))
    assert set(found.pieces) == {one.name for one in wanted}
    for piece in layout.pieces:
        begin = len(layout.header) + piece.offset
        ((_, tensor),) = found.pieces[piece.name]
        assert (tensor.dtype, tuple(tensor.shape)) == (TORCH_DTYPES[piece.dtype], piece.extent)
        stored = tensor if piece.order is msgspec.UNSET else tensor.transpose(1, 2)
        assert stored.is_contiguous()
        assert stored.reshape(-1).view(torch.uint8).numpy().tobytes() == data[begin : begin + piece.length]
