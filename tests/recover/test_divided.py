"""With another number of ranks the rest of a pass is divided anew: every sample is seen, and none is seen twice.

Counted for every kind of data that can be divided, at every place of a pass; what cannot be is refused.
"""

from __future__ import annotations

import sys
from collections import Counter, UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import must_finish

from everstep.capture.position import Feed
from everstep.capture.stream import joined
from everstep.errors import Mismatch

SHARDS, OF_EACH = 6, 7
SAMPLES = SHARDS * OF_EACH
Made = Callable[[int, int], Any]  # the loader of a rank of so many
WORLDS = [(2, 3), (3, 1), (2, 4), (1, 2), (2, 3, 1, 4)]


def sampled(kind: type[DataLoader[Any]], shuffle: bool = True) -> Made:
    def make(rank: int, world: int) -> Any:
        data = TensorDataset(torch.arange(SAMPLES))
        return kind(data, batch_size=3, sampler=DistributedSampler(data, world, rank, shuffle=shuffle))

    return make


def shards_of(shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        for i in range(OF_EACH):
            yield {"name": shard * OF_EACH + i, "text": str(shard)}


def streamed(kind: type[DataLoader[Any]], *, buffer: int = 0, workers: int = 0, divided: bool = True) -> Made:
    def make(rank: int, world: int) -> Any:
        import datasets  # in a process of its own: it starts threads
        from datasets.distributed import split_dataset_by_node

        stream = datasets.IterableDataset.from_generator(shards_of, gen_kwargs={"shards": list(range(SHARDS))})
        if buffer:
            stream = stream.shuffle(seed=3, buffer_size=buffer)
        if divided:
            stream = split_dataset_by_node(stream, rank=rank, world_size=world)
        return kind(stream.with_format("torch"), batch_size=3, num_workers=workers)

    return make


def names(batch: Any) -> list[int]:
    found: list[int] = (batch["name"] if isinstance(batch, dict) else batch[0]).tolist()
    return found


def take(feeds: list[Feed], batches: int) -> list[int]:
    """So many batches on every rank, in step; as many as there are, if a pass ends."""
    seen: list[int] = []
    for _ in range(batches):
        try:
            for feed in feeds:
                seen += names(feed.next_batch())
        except StopIteration:
            break
    return seen


def rest_of_pass(feeds: list[Feed]) -> tuple[list[int], set[int]]:
    """What is left, and how many batches each rank had of it."""
    seen, counts = list[int](), set[int]()
    for feed in feeds:
        count = 0
        while True:
            try:
                seen += names(feed.next_batch())
            except StopIteration:
                feed.end_pass()
                break
            count += 1
        counts.add(count)
    return seen, counts


def feeds_of(make: Made, world: int, before: list[dict[str, Any]]) -> list[Feed]:
    feeds = [Feed(make(rank, world), rank, world) for rank in range(world)]
    for rank, feed in enumerate(feeds) if before else ():
        feed.restore(before[rank if rank < len(before) else 0], before)
    return feeds


def count(make: Made, worlds: tuple[int, ...], each: int) -> None:
    """A pass that other numbers of ranks go on with, each of which takes some batches; and the pass after it."""
    before: list[dict[str, Any]] = []
    seen: Counter[int] = Counter()
    for world in worlds[:-1]:
        feeds = feeds_of(make, world, before)
        seen.update(take(feeds, each))
        before = [feed.position() for feed in feeds]
        again = [feed.position() for feed in feeds_of(make, world, before)]  # a restart with as many ranks
        assert [(p["batches"], p["samples"]) for p in again] == [(p["batches"], p["samples"]) for p in before] or (
            before[0]["stream"] is not None and again[0]["stream"] == before[0]["stream"]
        )
    feeds = feeds_of(make, worlds[-1], before)
    rest, counts = rest_of_pass(feeds)
    seen.update(rest)
    assert set(seen) == set(range(SAMPLES)), f"lost: {sorted(set(range(SAMPLES)) - set(seen))}"
    assert sum(seen.values()) - SAMPLES < max(worlds), f"seen twice: {[one for one in seen if seen[one] > 1]}"
    assert len(counts) == 1, "a rank would wait for the others"
    following, _ = rest_of_pass(feeds)
    assert set(following) == set(range(SAMPLES)) and len(following) - SAMPLES < worlds[-1]


def count_all(make: Made, worlds: tuple[int, ...]) -> dict[str, Any]:
    for each in (0, 1, 2, 3):
        count(make, worlds, each)
    return {}


@pytest.mark.parametrize("worlds", WORLDS, ids=str)
@pytest.mark.parametrize("make", [sampled(DataLoader), sampled(StatefulDataLoader)], ids=["plain", "stateful"])
def test_a_distributed_sampler(make: Made, worlds: tuple[int, ...]) -> None:
    count_all(make, worlds)


@pytest.mark.parametrize(
    "make",
    [
        streamed(DataLoader, buffer=5),
        pytest.param(streamed(StatefulDataLoader), marks=pytest.mark.soak),
        pytest.param(streamed(DataLoader, workers=2), marks=pytest.mark.soak),
    ],
    ids=["shuffled", "stateful loader", "workers"],
)
def test_a_stream_that_was_divided_by_node(make: Made) -> None:
    """By shards where they are enough for all ranks alike, and else by samples: 6 shards among 4 ranks."""

    def life() -> dict[str, Any]:
        for worlds in WORLDS:
            count_all(make, worlds)
        return {}

    must_finish(life)


class Pair(NamedTuple):
    name: Any
    text: Any


def as_encoding(samples: list[Any]) -> Any:
    """Like the BatchEncoding of a tokenizer: a mapping that is no dict."""
    return UserDict(default_collate(samples))


def as_pair(samples: list[Any]) -> Any:
    return Pair(**default_collate(samples))


@pytest.mark.parametrize("collate", [as_encoding, as_pair])
def test_the_last_samples_of_a_stream_come_as_batches_do(collate: Any) -> None:
    def life() -> dict[str, Any]:
        def make(rank: int, world: int) -> Any:
            loader = streamed(DataLoader)(rank, world)
            return DataLoader(loader.dataset, batch_size=3, collate_fn=collate)

        feeds = feeds_of(make, 2, [])
        seen = [feed.next_batch() for feed in feeds]
        for feed in feeds_of(make, 5, [feed.position() for feed in feeds]):  # two batches are left for the last turn
            seen += to_the_end(feed)
        kinds, whole = {type(batch) for batch in seen}, joined(seen)
        assert kinds == {type(whole)} and kinds <= {UserDict, Pair}
        found = whole.name if isinstance(whole, Pair) else whole["name"]
        assert set(found.tolist()) == set(range(SAMPLES))
        return {}

    must_finish(life)


def to_the_end(feed: Feed) -> Iterator[Any]:
    while True:
        try:
            yield feed.next_batch()
        except StopIteration:
            return


class Own(IterableDataset[Any]):
    """Has a state, and what it means only it knows."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.at = rank, world, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < SAMPLES // self.world:
            self.at += 1
            yield torch.tensor([self.rank + self.world * (self.at - 1)])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize(
    "make",
    [
        lambda rank, world: StatefulDataLoader(Own(rank, world), batch_size=3),
        lambda rank, world: DataLoader(Own(rank, world), batch_size=3),
        lambda rank, world: DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=3, shuffle=True),
    ],
    ids=["its own state", "its own state, unread", "no DistributedSampler"],
)
def test_what_nobody_can_divide_is_refused(make: Made) -> None:
    feeds = feeds_of(make, 2, [])
    for feed in feeds:
        feed.next_batch()
    before = [feed.position() for feed in feeds]
    feeds_of(make, 2, before)
    for world in (1, 3):
        with pytest.raises(Mismatch, match=rf"saved by 2 ranks and this job has {world}\. Only .* can be divided anew"):
            feeds_of(make, world, before)


def test_streams_that_every_rank_reads_for_itself_go_on_and_those_that_are_not_read_as_before_are_refused() -> None:
    def life() -> dict[str, Any]:
        make = streamed(DataLoader, divided=False)
        feeds = feeds_of(make, 2, [])
        seen = take(feeds[:1], 4)
        take(feeds[1:], 4)
        for feed in feeds_of(make, 3, [one.position() for one in feeds]):
            assert seen + rest_of_pass([feed])[0] == list(range(SAMPLES))
        feeds = feeds_of(streamed(DataLoader), 2, [])
        take(feeds, 2)
        before = [feed.position() for feed in feeds]
        with pytest.raises(Mismatch, match=r"batches of 3 by 0 workers.* batches of 3 by 1: .* both must stay"):
            feeds_of(streamed(DataLoader, workers=1), 3, before)
        with pytest.raises(Mismatch, match="only before or only now; divide it as it was"):
            feeds_of(streamed(DataLoader, divided=False), 3, before)
        with pytest.raises(Mismatch, match=r"Only .* can be divided anew"):  # as the ranks of another job have it
            feeds_of(lambda rank, world: streamed(DataLoader)(rank, 4), 3, before)
        with pytest.raises(Mismatch, match="global batch does not stay; use batch='shrink'"):
            Feed(streamed(DataLoader)(0, 1), 0, 1, keeps_seats=True).restore(before[0], before)
        return {}

    must_finish(life)


def test_ranks_that_stood_at_different_places_are_refused() -> None:
    feeds = feeds_of(sampled(DataLoader), 2, [])
    take(feeds, 1)
    feeds[1].next_batch()
    before = [feed.position() for feed in feeds]
    feeds_of(sampled(DataLoader), 2, before)
    with pytest.raises(Mismatch, match=r"rank 0 after batch 1 of pass 0, rank 1 after batch 2 of pass 0"):
        feeds_of(sampled(DataLoader), 3, before)
