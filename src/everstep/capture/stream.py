"""Streams of Hugging Face divided anew: what other ranks, of another number, had not read of a pass yet.

A stream that `split_dataset_by_node` divided can be read again as any rank of any number of them had it. So the rest of
a pass is the rest of all the old ranks' streams, batch by batch in turn, and the new ranks take turns at that. Each
reads all of it, until the pass is over. If the last turn is not enough for all ranks, its samples are shared out
evenly; only if there are fewer samples than ranks are some seen twice, as a DistributedSampler has it.

Nothing but the numbers of ranks and of batches taken must be known for it, however often ranks change in a pass.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from everstep.errors import Mismatch


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """How a pass over a stream was divided: at first among so many ranks, which took so many batches each.

    `taken`: the batches that have been taken since then, by ranks of other numbers.
    """

    ranks: int | None  # None: it was not divided, and each rank read all of it
    batch_size: int | None
    workers: int
    batches: int = 0
    taken: int | None = None  # None: the ranks are still the first ones


def is_stream(dataset: Any) -> bool:
    streams = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    return streams is not None and isinstance(dataset, streams)


def course_of(loader: Any, rank: int, world: int) -> Course | None:
    """How a pass begins over this loader; None if it is over no stream that could be divided anew."""
    from torch.utils.data import DataLoader

    if not isinstance(loader, DataLoader) or not is_stream(loader.dataset):
        return None
    split = getattr(loader.dataset, "_distributed", None)
    if split is not None and (split.rank, split.world_size) != (rank, world):
        return None  # divided among others than the ranks: whoever those are, they do not take their turns as ranks do
    ranks = 1 if world == 1 else None if split is None else world
    return Course(ranks=ranks, batch_size=loader.batch_size, workers=loader.num_workers)


def rest(loader: Any, now: Course, before: Course, rank: int, world: int) -> Iterator[Any]:
    """The batches of this rank that are left of a pass."""
    if (now.batch_size, now.workers) != (before.batch_size, before.workers):
        raise Mismatch(
            f"a stream was read in batches of {before.batch_size} by {before.workers} workers, and is now to be read "
            f"in batches of {now.batch_size} by {now.workers}: with another number of ranks both must stay as they were"
        )
    if before.ranks is None or now.ranks is None:
        raise Mismatch(
            "the number of ranks has changed, and the stream was divided among them by split_dataset_by_node only "
            "before or only now; divide it as it was"
        )
    turns = _in_turn([_of_rank(loader, one, before.ranks, before.batches) for one in range(before.ranks)])
    next(islice(turns, before.taken or 0, before.taken or 0), None)
    return _shared_out(turns, rank, world, is_whole=before.batch_size is None)


def _of_rank(loader: Any, rank: int, ranks: int, batches: int) -> Iterator[Any]:
    """What a rank of so many reads after some batches."""
    own, dataset = copy.copy(loader), copy.copy(loader.dataset)
    dataset.__dict__ = dict(dataset.__dict__)  # copies of streams share theirs
    split = copy.copy(dataset._distributed) or sys.modules["datasets"].iterable_dataset.DistributedConfig(0, 1)
    split.rank, split.world_size = rank, ranks
    dataset._distributed = split
    own._iterator = None  # persistent workers serve one at a time
    object.__setattr__(own, "dataset", dataset)
    iterator: Iterator[Any] = iter(own)
    next(islice(iterator, batches, batches), None)
    return iterator


def _in_turn(streams: list[Iterator[Any]]) -> Iterator[Any]:
    while streams:
        left = []
        for stream in streams:
            for batch in islice(stream, 1):
                left.append(stream)
                yield batch
        streams = left


def _shared_out(batches: Iterator[Any], rank: int, world: int, *, is_whole: bool) -> Iterator[Any]:
    """`is_whole`: a batch is one sample, as the stream gives it."""
    while len(turn := list(islice(batches, world))) == world:
        yield turn[rank]
    if is_whole:
        yield from [turn[rank % len(turn)]] if turn else []
        return
    samples = [_sample(batch, at) for batch in turn for at in range(_size(batch))]
    if samples:
        yield joined(samples[rank::world] or [samples[rank % len(samples)]])


def _size(batch: Any) -> int:
    import torch

    if isinstance(batch, torch.Tensor | list | tuple) and not _is_record(batch):
        return len(batch)
    parts = list(batch.values() if isinstance(batch, Mapping) else batch if _is_record(batch) else ())
    if not parts:
        raise Mismatch(f"batches with a {type(batch).__name__} in them cannot be shared out among other ranks")
    return _size(parts[0])


def _is_record(batch: Any) -> bool:
    """A sequence of columns, as collating a tuple gives, and not of samples."""
    import torch

    if not isinstance(batch, list | tuple) or not batch:
        return False
    return isinstance(batch[0], torch.Tensor | Mapping | list | tuple)


def _sample(batch: Any, at: int) -> Any:
    """One sample as a batch of one."""
    if isinstance(batch, Mapping):
        return _mapping(batch, {key: _sample(value, at) for key, value in batch.items()})
    if _is_record(batch):
        return _record(batch, [_sample(one, at) for one in batch])
    return batch[at : at + 1]


def joined(batches: Sequence[Any]) -> Any:
    """Batches of several seats as one: tensors along their first dimension, whatever they lie in."""
    import torch

    first = batches[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(tuple(batches))
    if isinstance(first, Mapping):
        return _mapping(first, {key: joined([batch[key] for batch in batches]) for key in first})
    if _is_record(first):
        return _record(first, [joined(column) for column in zip(*batches, strict=True)])
    if isinstance(first, list | tuple):
        return type(first)(item for batch in batches for item in batch)
    raise Mismatch(f"batches with a {type(first).__name__} in them cannot be joined; use batch='shrink'")


def _mapping(like: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    """Of the same kind, such as the BatchEncoding of a tokenizer; a kind of dict may be made of other things."""
    kind: Any = dict if isinstance(like, dict) else type(like)
    return kind(made)


def _record(like: Sequence[Any], columns: list[Any]) -> Any:
    kind: Any = type(like)
    return kind(*columns) if hasattr(like, "_fields") else kind(columns)
