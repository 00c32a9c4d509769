"""The order of samples, and what is drawn for them: the same in a pass that goes on, or it is said."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lives import MeetingPlace, run_directory, way_to
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, get_worker_info

import everstep
from everstep.capture.drawn import Drawn
from everstep.capture.extras import random_state, set_random_state
from everstep.capture.position import Feed
from everstep.errors import BadConfig, Mismatch

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
    seen: list[Any] = []

    class Seeing(Noisy):
        def __getitem__(self, index: Any) -> Tensor:
            if get_worker_info() is None:
                seen.append(type(index))
            return super().__getitem__(index)

    undisturbed, again = gone_on(lambda: DataLoader(Seeing(), 4, sampler=Own(how), num_workers=workers), 4, 6)
    assert undisturbed == again and names(undisturbed) == [*range(16, COUNT), *range(16)]
    kinds = {"of NumPy": np.int64, "tensors": Tensor, "pairs": tuple, "objects": Name}
    assert set(seen) == (set() if workers else {kinds[how]})


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


# -- what an index may be


@dataclass
class Pair:
    index: int


class Tricky:
    def tolist(self) -> Any:
        raise ValueError("no list")

    tobytes = tolist


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def orders_of(*indices: Any) -> list[int | None]:
    drawn = Drawn(indices, seed=None)
    assert len(list(drawn)) == len(indices)
    return list(drawn.orders)


@pytest.mark.parametrize(
    "index", [Pair(1), Name(1), Tricky(), torch.eye(2).to_sparse(), torch.empty(2, device="meta"), endless(),
              np.array([Name(1), "a"])],
    ids=["dataclass", "object", "tricky", "sparse", "meta", "endless", "addresses"],
)  # fmt: skip
def test_an_index_that_cannot_be_compared_ends_what_is_known_and_not_the_pass(index: Any) -> None:
    none, first, second, *unknown = orders_of(1, 2, index, 4)
    assert None not in (none, first, second) and unknown == [None, None]


DIFFERENT: list[tuple[Any, Any]] = [
    (1, 2), ([1, 2], [2, 1]), ((1, "a"), (1, "b")), ({"a": 1}, {"a": 2}), ({1}, {2}), (b"a", b"b"),
    (np.int64(1), np.int64(2)), (np.arange(3), np.arange(3)[::-1]), (np.arange(4), np.arange(4).reshape(2, 2)),
    (torch.arange(3), torch.arange(3).flip(0)), ([torch.tensor(1)], [torch.tensor(2)]),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_indices_that_differ_are_told_apart(one: Any, other: Any) -> None:
    assert orders_of(one)[-1] not in (None, orders_of(other)[-1])
    assert orders_of(one) == orders_of(one)


def test_what_lies_in_a_set_has_the_same_order_in_every_process() -> None:
    program = (
        "from everstep.capture.drawn import Drawn; drawn = Drawn([{'a', 'b', 'c', 'd'}], seed=None); list(drawn); "
        "print(list(drawn.orders))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": str(seed)}, capture_output=True,
            text=True, check=True,
        ).stdout
        for seed in (1, 2, 3)
    }  # fmt: skip
    assert len(said) == 1 and "None" not in said.pop()


# -- loaders with ways of their own


class Lazily(DataLoader[Any]):
    """Asks its sampler when it is asked for its first batch."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [3, 8])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_loader_whose_iterator_is_a_generator_goes_on_where_it_was(
    distributed: bool, workers: int, taken: int
) -> None:
    def make() -> Any:
        order = {"sampler": DistributedSampler(Noisy(), 1, 0)} if distributed else {"shuffle": True}
        return Lazily(Noisy(), 4, num_workers=workers, **order)

    undisturbed, again = gone_on(make, taken, 6)
    assert [names([one]) for one in undisturbed] == [names([one]) for one in again]


def test_its_persistent_workers_stay_from_pass_to_pass() -> None:
    loader = Lazily(Noisy(), 4, num_workers=1, persistent_workers=True)
    feed = Feed(loader, 0, 1)
    rest_of_pass(feed)
    before = loader._iterator
    rest_of_pass(feed)
    assert before is not None and loader._iterator is before


class Later(DataLoader[Any]):
    """Its iterator is nobody's generator, and asks as late."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (batch for batch in [super()] for batch in batch.__iter__())


def test_a_loader_that_asks_late_in_another_way_is_refused_at_once() -> None:
    with pytest.raises(BadConfig, match="the __iter__ of Later does not ask its sampler at once"):
        Feed(Later(Noisy(), 4), 0, 1).next_batch()


class Broken(Noisy):
    def __getitem__(self, index: Any) -> Tensor:
        if int(index) == 5:
            raise OSError("a file cannot be read")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_could_not_be_made_counts_as_one_that_was_taken(workers: int) -> None:
    def next_of(feed: Feed) -> list[int]:
        try:
            return names([feed.next_batch().tolist()])
        except OSError:
            return names([feed.next_batch().tolist()])

    feed = Feed(DataLoader(Broken(), 4, num_workers=workers), 0, 1)
    assert [next_of(feed) for _ in range(3)][1:] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    other = Feed(DataLoader(Broken(), 4, num_workers=workers), 0, 1)
    other.restore(feed.position())
    assert next_of(other) == [16, 17, 18, 19] == next_of(feed)


def test_workers_whose_batches_come_in_any_order_are_refused(tmp_path: Path) -> None:
    loader = DataLoader(Noisy(), 4, num_workers=2, in_order=False)
    model = torch.nn.Linear(4, 1)
    with pytest.raises(BadConfig, match="in_order=False"):
        everstep.guard(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, dir=tmp_path / "run")


def test_after_another_number_of_ranks_a_loader_that_knows_its_place_is_asked_for_it_again() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def feed(rank: int, ranks: int) -> Feed:
        sampler: Any = DistributedSampler(Noisy(), ranks, rank)
        return Feed(stateful(Noisy(), 2, sampler=sampler, num_workers=2, persistent_workers=True), rank, ranks)

    both = [feed(rank, 2) for rank in range(2)]
    taken = [name for one in both for name in names(batches(one, 1))]
    positions = [one.position() for one in both]
    alone = feed(0, 1)
    alone.restore(positions[0], positions)
    assert sorted(taken + rest_of_pass(alone)) == list(range(COUNT))
    batches(alone, 3)
    position, undisturbed = alone.position(), rest_of_pass(alone)
    again = feed(0, 1)
    again.restore(position)
    assert rest_of_pass(again) == undisturbed and len(undisturbed) == COUNT - 6


# -- ranks of which one draws otherwise

PROGRAM = """
import os, random, signal, sys, torch, everstep
from torch import nn
from torch.utils.data import DataLoader, Sampler
everstep.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0), random.seed(rank)
class Own(Sampler):
    def __len__(self):
        return 40
    def __iter__(self):
        for _ in range(40):
            yield random.randrange(40)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = everstep.guard(model, optimizer, DataLoader(torch.randn(40, 4), 2, sampler=Own()), dir=sys.argv[1])
for batch in run:
    model(batch).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 1 and run.step == 3:
        random.random()  # which its sampler will not see when it draws again
    if run.step == 5 and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_one_rank_refuses_all_do_with_its_reason_and_the_step_is_not_blamed(tmp_path: Path) -> None:
    def life(directory: Path) -> list[subprocess.CompletedProcess[str]]:
        place = MeetingPlace()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(directory)], stderr=subprocess.PIPE, text=True,
                env={**os.environ, **way_to(place.port), "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            said = [rank.communicate(timeout=60)[1] for rank in ranks]
        finally:
            place.close()
        return [subprocess.CompletedProcess([], rank.returncode, "", words) for rank, words in zip(ranks, said)]

    with run_directory() as directory:
        assert life(directory)[0].returncode == -signal.SIGKILL
        first, second = life(directory)
        assert "Mismatch: on rank 1: the pass under way cannot be gone on with" in first.stderr, first.stderr
        assert "Mismatch: the pass under way cannot be gone on with" in second.stderr, second.stderr
        assert not (directory / "attempt.json").exists() and not list(directory.rglob("*attempt*"))
