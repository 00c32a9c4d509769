"""The digest of state: one number, additive, the same wherever the state lies."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from xxhash import xxh3_64_intdigest

from everstep.capture import digest as module
from everstep.capture.digest import MODULUS, StateDigest, digest, number
from everstep.capture.layout import Entry
from everstep.capture.shares import share

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn]


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


def mix(index: int) -> int:
    """splitmix64, made odd."""
    x = (index + 1) * 0x9E3779B97F4A7C15 % MODULUS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MODULUS
    return x ^ (x >> 31) | 1


def by_definition(name: str, tensor: Tensor) -> int:
    words = tensor.reshape(-1).view(torch.int32).tolist()
    table = [mix(i - module._BLOCK) for i in range(module._BLOCK)]
    weights = (table[i % module._BLOCK] * mix(i // module._BLOCK) for i in range(len(words)))
    return sum(map(int.__mul__, words, weights)) * (xxh3_64_intdigest(name.encode()) | 1) % MODULUS


@pytest.mark.parametrize("elements", [1, 7, module._BLOCK, 3 * module._BLOCK + 5])
def test_it_is_what_its_definition_says(elements: int) -> None:
    assert number(digest("a", noise(elements))) == by_definition("a", noise(elements))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(cuts=st.lists(st.integers(0, 700), max_size=4))
def test_rows_add_up_to_the_whole(dtype: torch.dtype, cuts: list[int]) -> None:
    tensor = noise(700, 61, dtype=dtype)
    edges = [0, *sorted(cuts), 700]
    parts = [digest("a", tensor[a:b], a * 61) for a, b in pairwise(edges)]
    assert number(*parts) == number(digest("a", tensor))


def test_the_shares_of_ranks_add_up_and_private_state_is_counted_apart() -> None:
    tensors = {f"t{i}": noise(40 + i, 3) for i in range(5)}
    entries = [Entry(name=n, tensor=t, gate=0, at_cut=False, common=n != "t4", family=n) for n, t in tensors.items()]
    entries += [Entry(name="step", tensor=torch.tensor(3.0), gate=0, at_cut=False, common=True, family="step")]
    entries += [Entry(name="buffer", tensor=noise(9), gate=None, at_cut=True, common=False, family="buffer")]
    ranks = [StateDigest(share(entries, rank, 3)).take() for rank in range(3)]
    whole = StateDigest(share(entries, 0, 1)).take()
    assert number(*(common for common, _ in ranks)) == number(whole[0])
    assert {number(private) for _, private in ranks} == {number(digest("t4", tensors["t4"]))} == {number(whole[1])}


def entry(name: str, tensor: Tensor) -> Entry:
    return Entry(name=name, tensor=tensor, gate=0, at_cut=False, common=True, family=name)


def tensors_of_all_sizes() -> list[Tensor]:
    return [
        *(noise(*shape) for shape in [(), (3,), (40, 7), (70_000,), (9, 20_000)]),
        noise(5, 3, 4, 4).to(memory_format=torch.channels_last),
    ]


def test_a_state_that_stays_where_it_is_is_digested_again_and_again() -> None:
    tensors = tensors_of_all_sizes()
    plan = StateDigest(share([entry(str(i), tensor) for i, tensor in enumerate(tensors)], 0, 1))
    for turn in range(3):
        for tensor in tensors:
            tensor.add_(turn)
        assert number(*plan.take()) == sum(by_definition(str(i), t) for i, t in enumerate(tensors)) % MODULUS


class Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_thousand_tensors_take_a_few_calls() -> None:
    """Each would take some microseconds of the training thread, and the loop may have none to spare."""
    plan = StateDigest(share([entry(str(i), noise(1 + i % 30)) for i in range(1000)], 0, 1))
    with Calls() as calls:
        plan.take()
    assert calls.count < 30


def test_memory_format_does_not_matter_and_order_does() -> None:
    tensor = noise(5, 3, 4, 4)
    assert number(digest("a", tensor.to(memory_format=torch.channels_last))) == number(digest("a", tensor))
    assert number(digest("a", tensor.transpose(2, 3))) != number(digest("a", tensor))
    assert number(digest("b", tensor)) != number(digest("a", tensor))


@given(i=st.integers(0, 69_999), j=st.integers(0, 69_999))
def test_one_ulp_up_and_one_down_do_not_cancel(i: int, j: int) -> None:
    tensor = noise(70_000)
    before = number(digest("a", tensor))
    bits = tensor.view(torch.int32)
    bits[i] += 1
    assert number(digest("a", tensor)) != before
    bits[j] -= 1
    assert (number(digest("a", tensor)) != before) == (i != j)


def test_large_tensors_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = noise(700, 61)
    whole = number(digest("a", tensor))
    monkeypatch.setitem(module._ROWS, "cpu", 2)
    assert number(digest("a", tensor)) == whole
    assert number(digest("a", tensor.t().contiguous().t())) == whole


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_device_gives_the_same_number(dtype: torch.dtype) -> None:
    tensor = noise(700, 611, dtype=dtype)
    assert number(digest("a", tensor.cuda())) == number(digest("a", tensor))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_state_on_a_device_is_digested_again_and_again() -> None:
    tensors = [*tensors_of_all_sizes(), noise(600, module._BLOCK)]
    there = [tensor.cuda() for tensor in tensors]
    plan = StateDigest(share([entry(str(i), tensor) for i, tensor in enumerate(there)], 0, 1))
    for turn in range(3):
        for tensor in (*tensors, *there):
            tensor.add_(turn)
        here = StateDigest(share([entry(str(i), tensor) for i, tensor in enumerate(tensors)], 0, 1))
        assert number(*plan.take()) == number(*here.take())
