"""The order of samples, and what is drawn for them: the same in a pass that goes on, or it is said."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from everstep.capture.extras import random_state, set_random_state
from everstep.capture.position import Feed
from everstep.errors import Mismatch

COUNT = 24


class Noisy(Dataset[Tensor]):
    """Every sample knows its index, and three numbers that were drawn for it."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: Any) -> Tensor:
        index = index[0] if isinstance(index, tuple) else index
        return torch.tensor([int(index), torch.rand(()).item(), random.random(), np.random.rand()])


def begin_anew() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def batches(feed: Feed, count: int, *, loop_draws: bool = True) -> list[list[list[float]]]:
    """So many, over the ends of passes."""
    found: list[list[list[float]]] = []
    while len(found) < count:
        try:
            found.append(feed.next_batch().tolist())
        except StopIteration:
            feed.end_pass()
        if loop_draws:
            torch.rand(3), random.random(), np.random.rand()
    return found


def gone_on(make: Callable[[], Any], taken: int, count: int, *, loop_draws: bool = True) -> tuple[Any, Any]:
    """What an undisturbed loop gets, and what one gets that goes on in another program."""
    begin_anew()
    feed = Feed(make(), 0, 1)
    batches(feed, taken, loop_draws=loop_draws)
    position, random_then = feed.position(), random_state()
    undisturbed = batches(feed, count, loop_draws=loop_draws)
    torch.manual_seed(99)
    other = Feed(make(), 0, 1)
    other.restore(position)
    set_random_state(random_then)
    return undisturbed, batches(other, count, loop_draws=loop_draws)


LOADERS: dict[str, Callable[[], Any]] = {
    "three workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=3),
    "persistent workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2, persistent_workers=True),
    "spawned workers": lambda: DataLoader(Noisy(), 4, num_workers=1, multiprocessing_context="spawn"),
    "a generator of its own": lambda: DataLoader(
        Noisy(), 4, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(1)
    ),
    "no batches": lambda: DataLoader(Noisy(), None, shuffle=True, num_workers=2),
    "a distributed sampler": lambda: DataLoader(Noisy(), 4, sampler=DistributedSampler(Noisy(), 1, 0), num_workers=2),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("taken", [1, 4, 6, 8])
def test_workers_draw_what_they_would_have_drawn(kind: str, taken: int) -> None:
    undisturbed, again = gone_on(LOADERS[kind], taken, 8)
    assert undisturbed == again


def test_no_two_batches_and_no_two_passes_and_no_two_ranks_have_the_same_draws() -> None:
    seen: list[float] = []
    for rank in range(2):
        begin_anew()
        sampler = DistributedSampler(Noisy(), 2, rank, shuffle=False)
        loader = DataLoader(Noisy(), 4, sampler=sampler, num_workers=2, persistent_workers=True)
        seen += [number for batch in batches(Feed(loader, rank, 2), 9) for sample in batch for number in sample[1:]]
    assert len(set(seen)) == len(seen) == 2 * 9 * 4 * 3


def test_the_number_of_workers_changes_nothing_of_what_they_draw() -> None:
    def drawn(workers: int) -> Any:
        begin_anew()
        return batches(Feed(DataLoader(Noisy(), 4, shuffle=True, num_workers=workers), 0, 1), 8)

    assert drawn(1) == drawn(3)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loop_draws_and_the_order_is_what_they_are_without_everstep(workers: int) -> None:
    begin_anew()
    loader = DataLoader(Noisy(), 4, shuffle=True, num_workers=workers)
    plain = [(batch[:, 0].tolist(), torch.rand(()).item()) for _ in range(2) for batch in loader]
    begin_anew()
    feed = Feed(DataLoader(Noisy(), 4, shuffle=True, num_workers=workers), 0, 1)
    guarded = [
        ([one[0] for one in batch], torch.rand(()).item())
        for _ in range(12)
        for batch in batches(feed, 1, loop_draws=False)
    ]
    assert guarded == plain


# -- in the process that has had the loader before: a notebook, or a rank that lives through the loss of another


def names(found: list[list[list[float]]]) -> list[int]:
    return [int(sample[0]) for batch in found for sample in batch]


def rest_of_pass(feed: Feed) -> list[int]:
    found: list[int] = []
    while True:
        try:
            found += names([feed.next_batch().tolist()])
        except StopIteration:
            feed.end_pass()
            return found


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("distributed", [False, True])
def test_persistent_workers_who_were_further_go_back(distributed: bool, passes: int) -> None:
    begin_anew()
    order = {"sampler": DistributedSampler(Noisy(), 1, 0)} if distributed else {"shuffle": True}
    loader: Any = DataLoader(Noisy(), 4, num_workers=2, persistent_workers=True, **order)
    feed = Feed(loader, 0, 1)
    for _ in range(passes):
        rest_of_pass(feed)
    taken = names(batches(feed, 2))
    position = feed.position()
    batches(feed, 2)  # which all do again
    again = Feed(loader, 0, 1)
    again.restore(position)
    assert sorted(taken + rest_of_pass(again)) == list(range(COUNT))
    assert sorted(rest_of_pass(again)) == list(range(COUNT))


def test_persistent_workers_have_the_seats_of_the_lost_too_and_every_pass_has_an_order_of_its_own() -> None:
    loaders = [
        DataLoader(Noisy(), 2, sampler=DistributedSampler(Noisy(), 3, r), num_workers=1, persistent_workers=True)
        for r in range(3)
    ]
    feeds = [Feed(loader, rank, 3, keeps_seats=True) for rank, loader in enumerate(loaders)]
    taken = [name for feed in feeds for name in names(batches(feed, 1))]
    positions = [feed.position() for feed in feeds]
    left = [Feed(loader, rank, 2, keeps_seats=True) for rank, loader in enumerate(loaders[:2])]
    for feed in left:
        feed.restore(positions[feed.rank], positions)
    passes = [[rest_of_pass(feed) for feed in left] for _ in range(3)]
    assert sorted(taken + passes[0][0] + passes[0][1]) == list(range(COUNT))
    for one in passes[1:]:
        assert sorted(one[0] + one[1]) == list(range(COUNT))
    assert passes[1] != passes[2]


# -- samplers that nobody can draw from again


class Own(Sampler[Any]):
    """A sampler of a user's own."""

    def __init__(self, how: str) -> None:
        self.how, self.order = how, list(range(COUNT))

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[Any]:
        if self.how == "shuffled in place":
            random.shuffle(self.order)
            yield from self.order
        for index in self.order if self.how != "shuffled in place" else ():
            if self.how == "drawn one by one":
                yield random.randrange(COUNT)
            elif self.how == "of NumPy":
                yield np.int64(index)
            elif self.how == "tensors":
                yield torch.tensor(index)
            elif self.how == "pairs":
                yield (index, index % 3)
            elif self.how == "objects":
                yield Name(index)
            else:
                yield index


class Name:
    """Only its program knows whether it is the same as another."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __int__(self) -> int:
        return self.index


def of(how: str, workers: int = 0) -> Callable[[], Any]:
    return lambda: DataLoader(Noisy(), 4, sampler=Own(how), num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_draws_from_what_the_loop_draws_from_is_refused_and_not_followed(workers: int) -> None:
    with pytest.raises(Mismatch, match="another order in pass 0"):
        gone_on(of("drawn one by one", workers), 3, 1)
    undisturbed, again = gone_on(of("drawn one by one", 2), 4, 4, loop_draws=False)
    assert undisturbed == again, "where the loop draws nothing it is as good as any"


def test_what_workers_had_been_asked_for_ahead_belongs_to_the_order() -> None:
    undisturbed, again = gone_on(of("drawn one by one", 1), 1, 5)
    assert undisturbed == again, "all that was drawn had been drawn before the loop drew"


def test_a_sampler_that_keeps_something_from_pass_to_pass_is_refused() -> None:
    undisturbed, again = gone_on(of("shuffled in place"), 4, 2)
    assert undisturbed == again, "its first pass is what it would be"
    for taken in (7, 12):  # in the next one, and at its end
        with pytest.raises(Mismatch, match="another order in pass 1"):
            gone_on(of("shuffled in place"), taken, 1)


def test_whoever_is_not_strict_reads_on_and_is_told() -> None:
    feed = Feed(of("shuffled in place")(), 0, 1)
    batches(feed, 8)
    other = Feed(of("shuffled in place")(), 0, 1)
    (differing,) = other.restore(feed.position(), strict=False)
    assert "keeps something from pass to pass" in differing
    assert len(batches(other, 4)) == 4


@pytest.mark.parametrize("how", ["of NumPy", "tensors", "pairs", "objects"])
@pytest.mark.parametrize("workers", [0, 2])
def test_indices_of_any_kind_reach_the_data_as_they_are(how: str, workers: int) -> None:
    undisturbed, again = gone_on(of(how, workers), 4, 6)
    assert undisturbed == again


def test_a_distributed_sampler_of_another_seed_is_refused_in_the_middle_of_a_pass_only() -> None:
    def feed(seed: int) -> Feed:
        return Feed(DataLoader(Noisy(), 4, sampler=DistributedSampler(Noisy(), 1, 0, seed=seed)), 0, 1)

    before = feed(3)
    feed(4).restore(before.position())
    batches(before, 2)
    feed(3).restore(before.position())
    with pytest.raises(Mismatch, match="had shuffle=True, seed=3 and has True, 4"):
        feed(4).restore(before.position())


def test_what_older_programs_have_saved_is_gone_on_with() -> None:
    feed = Feed(DataLoader(Noisy(), 4, shuffle=True), 0, 1)
    batches(feed, 2)
    position = feed.position()
    del position["order"], position["shuffle"]
    Feed(DataLoader(Noisy(), 4, shuffle=True), 0, 1).restore(position)
