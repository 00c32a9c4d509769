"""Whether the tensors of a program are still the same is asked at every cut, and of many in parts."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from everstep.capture.watch import Watch

MANY = 10_000


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return {str(number): torch.zeros(1) for number in range(MANY)}


def watch_of(holder: dict[str, Tensor]) -> Watch:
    watch = Watch()
    watch.grows(holder)
    for key, tensor in holder.items():
        watch.add(holder, key, tensor, tensor)
    return watch


@pytest.mark.parametrize("which", [0, MANY // 2, MANY - 1])
def test_a_replaced_tensor_is_seen_wherever_it_is_among_many(which: int, tensors: dict[str, Tensor]) -> None:
    holder = dict(tensors)
    watch = watch_of(holder)
    assert watch.unchanged()
    holder[str(which)] = torch.zeros(1)
    assert not watch.unchanged()


@pytest.mark.parametrize("which", [0, MANY // 2, MANY - 1])
def test_a_tensor_that_has_moved_is_seen(which: int, tensors: dict[str, Tensor]) -> None:
    watch, moved = watch_of(tensors), tensors[str(which)]
    moved.data = torch.zeros(1)
    assert not watch.unchanged()


def test_a_new_tensor_and_a_new_kind_of_value_are_seen(tensors: dict[str, Tensor]) -> None:
    holder = dict(tensors)
    watch = watch_of(holder)
    holder["new"] = torch.zeros(1)
    assert not watch.unchanged()
    state: dict[str, object] = {"step": 1}
    watch = watch_of(tensors)
    watch.plain(state, "step")
    assert watch.unchanged()
    state["step"] = torch.zeros(1)
    assert not watch.unchanged()


def test_others_have_the_interpreter_while_many_are_looked_at(tensors: dict[str, Tensor]) -> None:
    watch, moments = watch_of(tensors), list[float]()

    def pause() -> None:
        moments.append(time.thread_time())

    began = time.thread_time()
    assert watch.unchanged(pause)
    whole = time.thread_time() - began
    moments = [began, *moments, began + whole]
    longest = max(b - a for a, b in pairwise(moments))
    assert longest < whole / 3

    turns, over = 0, threading.Event()

    def ask() -> None:
        watch.unchanged(lambda: time.sleep(1e-3))
        over.set()

    asking = threading.Thread(target=ask)
    asking.start()
    while not over.wait(1e-4):
        turns += 1
    asking.join()
    assert turns >= 4


def test_few_are_looked_at_without_a_pause() -> None:
    watch = watch_of({str(number): torch.zeros(1) for number in range(500)})
    assert watch.unchanged(lambda: pytest.fail("paused"))
