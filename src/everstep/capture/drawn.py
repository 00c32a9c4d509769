"""What a sampler gives to a loader: begun in the middle of a pass, noted as it is drawn, and numbered for the workers.

- Begun in the middle: what was taken is drawn again and dropped before any sample is read.
- Noted: a digest of all that was drawn up to a batch is part of a position. A sampler that gives another order to the
  next life (it draws from a random state that the loop draws from too, or keeps something from pass to pass) is found
  out.
- Numbered: a worker process draws at random from a seed of the batch that it makes. So what it draws depends neither on
  which worker it is nor on what it made before, and a pass that goes on draws what it would have drawn.

Knows neither models nor steps.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import xxhash


class Drawn:
    """A batch sampler (or sampler) that begins somewhere in the middle, and is noted and numbered.

    Samplers draw their seed when their first item is asked for, which must happen with the random state of that
    moment: `drop` asks for what is skipped, and is called once the loader's iterator stands. `begin`, if given, sets
    that state just before. Persistent workers keep the sampler with which they began, so this may serve many passes.
    A loader may ask in a thread of its own.
    """

    def __init__(
        self, source: Iterable[Any], *, seed: int | None, skip: int = 0, first: int = 0,
        begin: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """`seed`: of this pass, for workers; `first`: the number of the first batch that `source` gives."""
        self._source, self.seed, self._skip, self._number, self._begin = source, seed, skip, first, begin
        self._iterator: Iterator[Any] = iter(())
        self._digest: xxhash.xxh3_64 | None = None
        self.orders: deque[int | None] = deque()  # up to what was taken, and up to each that was drawn ahead
        self.is_begun = False  # a loader may not ask at once, and then it never asks here
        self._dropping = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        self.is_begun, self._digest = True, xxhash.xxh3_64()
        self.orders = deque([self._order()])
        if self._begin is None:
            self._iterator = iter(self._source)
        return self._rest()

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_source"), name)  # loaders of other classes ask for a batch_size, say

    def _rest(self) -> Iterator[Any]:
        self.drop()
        number, self._number = self._number, 0
        for index in self._iterator:
            self._note(index)
            self.orders.append(self._order())
            yield index if self.seed is None else _Numbered(index, self.seed + number & _WORD)
            number += 1

    def drop(self) -> None:
        with self._dropping:
            if self._begin is not None:
                begin, self._begin = self._begin, None
                begin()
                self._iterator = iter(self._source)
            skip, self._skip = self._skip, 0
            for index in itertools.islice(self._iterator, skip):
                self._note(index)
            if skip:
                self.orders[0] = self._order()
            self._number += skip

    def taken(self) -> None:
        """A batch more was; one that was not drawn here (a loader with a way of its own) ends what is known."""
        if len(self.orders) > 1:
            self.orders.popleft()
        else:
            self.orders.clear()

    def _order(self) -> int | None:
        """Of all that was drawn; None if it cannot be told from another."""
        return None if self._digest is None else int(self._digest.intdigest())

    def _note(self, index: Any) -> None:
        if self._digest is None:
            return
        try:
            told = _INDICES.encode(index) if _is_known(index) else None
        except Exception:  # of a tensor that has no values, say, or of a list that has itself in it
            told = None
        if told is None:
            self._digest = None
        else:
            self._digest.update(told)


class Rest:
    """What is left of a DistributedSampler's pass after `taken` global samples, for this rank; then whole passes."""

    def __init__(self, sampler: Any, taken: int) -> None:
        self._sampler, self._taken = sampler, taken

    def __iter__(self) -> Iterator[int]:
        taken, self._taken = self._taken, 0
        yield from self._rest(taken) if taken else self._sampler

    def _rest(self, taken: int) -> list[int]:
        whole = copy.copy(self._sampler)
        whole.num_replicas, whole.rank, whole.num_samples, whole.total_size = (
            1,
            0,
            len(whole.dataset),
            len(whole.dataset),
        )
        order = list(whole)
        rest, ranks = order[taken:], self._sampler.num_replicas
        if self._sampler.drop_last:
            rest = rest[: len(rest) // ranks * ranks]
        elif len(rest) % ranks:
            rest += list(itertools.islice(itertools.cycle(order), ranks - len(rest) % ranks))
        return rest[self._sampler.rank :: ranks]


def divide(sampler: Any, ranks: int, rank: int) -> None:
    """Let a DistributedSampler be that of another rank, or of another number of them."""
    from torch.utils.data import DistributedSampler

    fresh: DistributedSampler[Any] = DistributedSampler(
        sampler.dataset, ranks, rank, sampler.shuffle, sampler.seed, sampler.drop_last
    )
    for name in ("num_replicas", "rank", "num_samples", "total_size"):
        setattr(sampler, name, getattr(fresh, name))


_WORD = 2**64 - 1
_PLAIN = {int, str, float, bool, bytes, type(None)}


def _is_known(index: Any) -> bool:
    """Whether it is the same in every process; an object of the program's own may have anything in it."""
    if type(index) in _PLAIN:
        return True
    if isinstance(index, (list, tuple, set, frozenset)):
        return _PLAIN.issuperset(map(type, index)) or all(map(_is_known, index))
    if type(index) is dict:
        return all(map(_is_known, index)) and all(map(_is_known, index.values()))
    return hasattr(index, "tobytes") or hasattr(index, "untyped_storage")  # of NumPy, and tensors


def _values(held: Any) -> Any:
    """A number, or what an array has in it: to make a list of it takes longer than to read many a sample."""
    if not held.shape:
        return held.tolist()
    array = held.numpy() if hasattr(held, "numpy") else held
    if array.dtype.hasobject:
        raise TypeError("its bytes are addresses")
    return str(array.dtype), array.shape, array.tobytes()


_INDICES = msgspec.msgpack.Encoder(enc_hook=_values, order="deterministic")


class _Numbered:
    """What is asked of a worker, on its way there: it arrives as what it is."""

    __slots__ = ("_index", "_seed")

    def __init__(self, index: Any, seed: int) -> None:
        self._index, self._seed = index, seed

    def __reduce__(self) -> tuple[Callable[[Any, int], Any], tuple[Any, int]]:
        return _arrived, (self._index, self._seed)


def _arrived(index: Any, seed: int) -> Any:
    """In a worker, which makes this batch next."""
    import torch
    from torch.utils.data import get_worker_info

    if get_worker_info() is not None:
        random.seed(seed)
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which would take a note for every device
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])  # with two words it would draw what Python does
    return index
