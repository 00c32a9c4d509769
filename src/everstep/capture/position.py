"""Where the data stands: which batch comes next, and how to get there again without reading what was already read.

A position is plain data: the pass over the loader, the batches taken in it, the global samples taken in it, the random
state with which the pass began, and the loader's own state where it keeps one. Three kinds of loader:

- `stateful`: has state_dict and load_state_dict (StatefulDataLoader and others): its own word is taken, unless it only
  counts what it reads from a stream that has no state.
- `sampled`: a plain DataLoader over a map-style dataset: its sampler is run again and its first batches are dropped
  before any sample is read. With a DistributedSampler the cut is made in the global order, so that another number of
  ranks continues where this one stopped.
- `opaque`: any other iterable, and a DataLoader whose __iter__ is a generator, which asks its sampler when nobody of us
  is near: the first batches are read and thrown away. With another number of ranks a stream of
  Hugging Face goes on as `stream` says, and others do not.

Seats: what a rank reads is the data of a seat, and at first there is one for each rank. Where ranks are lost and the
global batch is to stay, seats stay too: whoever is left has several, and its batch is theirs, one after the other.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
import xxhash

from everstep.capture.drawn import Drawn, Rest, divide
from everstep.capture.extras import random_state, set_random_state
from everstep.capture.stream import Course, course_of, is_stream, joined, rest
from everstep.config import Batch
from everstep.errors import BadConfig, Mismatch
from everstep.events import say
from everstep.topology import Topology

_UNREAD_CUTS = 3  # the first may come before the loop does
_ANOTHER_PASS = "the pass under way cannot be gone on with (strict=False reads on all the same):"


def _kind(loader: Any) -> str:
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(loader, DataLoader) and _forgetful(loader.dataset):
        return "opaque"  # StatefulDataLoader would read it again too, but loses count when it is resumed twice
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return "stateful"
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return "opaque"
    return "opaque" if inspect.isgeneratorfunction(type(loader).__iter__) else "sampled"


def _forgetful(dataset: Any) -> bool:
    """Whether a stream cannot say where it stands: neither it nor its iterator, a generator, has a state_dict.

    Those of Hugging Face have one, but a shuffle buffer is not in it, and the pass after a resumed one begins where
    that one was resumed.
    """
    from torch.utils.data import IterableDataset

    if is_stream(dataset):
        return True
    has_no_state = isinstance(dataset, IterableDataset) and not hasattr(dataset, "state_dict")
    return has_no_state and inspect.isgeneratorfunction(type(dataset).__iter__)


class Feed:
    """Passes over a loader, again and again, and always knows where it stands."""

    def __init__(self, loader: Any, rank: int, world: int, *, keeps_seats: bool = False) -> None:
        """`keeps_seats`: with fewer ranks than before, the seats of all of them are divided among the ranks."""
        from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

        self.loader, self.kind = loader, _kind(loader)
        self.rank, self.world = rank, world
        self._keeps_seats, self._seats = keeps_seats, world
        self.epoch = 0
        self._empty_passes = 0  # in a row
        self._unread_cuts = 0  # before the first batch was taken
        self._batches = 0  # taken in this pass
        self._samples = 0  # taken in this pass by all ranks
        self._iterator: Iterator[Any] | None = None
        self._drawn: Drawn | None = None  # by the sampler of a plain DataLoader, for this rank alone
        self._began: dict[str, Any] | None = None
        self._course: Course | None = None  # of a stream: how this pass was divided when it, or this life, began
        sampler = getattr(loader, "sampler", None) if isinstance(loader, DataLoader) else None
        is_divided = isinstance(sampler, DistributedSampler) and self.kind != "opaque"
        self._distributed = sampler if is_divided else None
        if self.kind == "sampled" and loader.num_workers > 1 and not getattr(loader, "in_order", True):
            raise BadConfig(
                "the loader has in_order=False and several workers: nobody can know which samples a pass has taken, "
                "and a resumed one would repeat some and leave others out. Leave in_order out, or use a "
                "StatefulDataLoader"
            )
        self._batch_samples = 1
        if sampler is not None and loader.batch_sampler is not None:
            self._batch_samples = getattr(loader.batch_sampler, "batch_size", 1)
        is_plain = type(getattr(loader, "batch_sampler", None)) is BatchSampler
        self._batch = self._batch_samples if is_plain else None  # as it is known, of each batch but the last
        self._of = _items_of(loader)

    @classmethod
    def of(cls, loader: Any, place: Topology, batch: Batch) -> Feed:
        return cls(loader, place.rank, place.world, keeps_seats=batch == "redistribute")

    def position(self) -> dict[str, Any]:
        keeps_place = self.kind == "stateful" and self._iterator is not None
        self._tell_unread()
        return {
            "kind": self.kind,
            "world": self._seats,
            "epoch": self.epoch,
            "batches": self._batches,
            "batch": self._batch,
            # The rest of a pass that was divided begins anew for each life; `shuffle` says what its order follows from.
            "order": [] if self._drawn is None or self._distributed is not None else list(self._drawn.orders),
            "shuffle": self._shuffle,
            "of": self._of,
            "samples": self._samples if self._distributed is not None else None,
            "began": self._began,
            "loader": self.loader.state_dict() if keeps_place else None,
            "generators": self._generator_states() if keeps_place else None,
            "stream": self._stream_position(),
        }

    def _tell_unread(self) -> None:
        """Of a loop that reads the loader itself, and calls run.done()."""
        if self._iterator is None and not self.epoch:
            self._unread_cuts += 1
            if self._unread_cuts == _UNREAD_CUTS and self.rank == 0:
                way = "iterate the run and not the loader, or keep its place in extra="
                say(f"the place in the data is not kept, since steps are taken and no batch is: {way}")

    def _stream_position(self) -> dict[str, Any] | None:
        course = self._course
        if course is None:
            return None
        if course.taken is None:
            course = msgspec.structs.replace(course, batches=self._batches)
        else:
            course = msgspec.structs.replace(course, taken=course.taken + self._batches * self.world)
        return cast(dict[str, Any], msgspec.to_builtins(course))

    @property
    def _shuffle(self) -> list[Any] | None:
        """What the order of a DistributedSampler is a function of, beside the pass."""
        return None if self._distributed is None else [self._distributed.shuffle, self._distributed.seed]

    @property
    def share(self) -> float:
        """How much of the global batch this rank has."""
        return len(self._mine) / self._seats

    @property
    def batch_samples(self) -> int:
        """Of all ranks."""
        return self._batch_samples * self._seats

    @property
    def is_even(self) -> bool:
        return self._seats % self.world == 0

    @property
    def _mine(self) -> list[int]:
        return list(range(self.rank, self._seats, self.world))

    def restore(
        self, position: dict[str, Any], of_all: Sequence[dict[str, Any]] = (), *, strict: bool = True
    ) -> list[str]:
        """Stand where `position` says; the next batch is the one after it. How the loader differs from what was saved.

        `of_all`: where each old rank stood.
        """
        self.epoch = position["epoch"]
        if position["world"] != self.world and len({(one["epoch"], one["batches"]) for one in of_all}) > 1:
            stood = ", ".join(
                f"rank {rank} after batch {p['batches']} of pass {p['epoch']}" for rank, p in enumerate(of_all)
            )
            raise Mismatch(f"{self._elsewhere(position)}, who stood at different places: {stood}")
        if self._keeps_seats and self._distributed is not None:
            self._seats = max(self.world, position["world"])
        if position["began"] is None:
            return []
        self._batches, self._began = position["batches"], position["began"]
        differing = self._differing(position)
        if differing and strict:
            raise Mismatch(_ANOTHER_PASS, differing)
        self._samples = position["samples"] or 0
        self._course = course_of(self.loader, self.rank, self.world)
        before = random_state()
        self._set_epoch()
        self._set_began(position["began"])
        self._iterator = self._resumed(position)
        set_random_state(before)
        if self._drew_otherwise(position):
            differing.append(
                f"the sampler gives another order in pass {self.epoch} than it gave: it draws from a random state that "
                "the loop draws from too, keeps something from pass to pass, or was changed. Give it a generator of "
                "its own, and make its order a function of set_epoch(). (If it draws as it goes, remembers nothing of "
                "that, and the loader has no workers, strict=False goes on exactly)"
            )
            if strict:
                raise Mismatch(_ANOTHER_PASS, differing[-1:])
        return differing

    def _drew_otherwise(self, position: dict[str, Any]) -> bool:
        if self._drawn is None or position.get("batch") != self._batch:
            return False
        return any(one != other for one, other in zip(position.get("order", ()), self._drawn.orders, strict=False))

    def _differing(self, position: dict[str, Any]) -> list[str]:
        """Batches of another size are counted anew, where whole ones of them were taken."""
        found, before, now, of = [], position.get("batch"), self._batch, position.get("of", self._of)
        if of != self._of:
            found.append(f"the data set had {of} items and has {self._of}")
        had, has = position.get("shuffle"), self._shuffle
        if had is not None and has is not None and had != has:
            found.append(f"its DistributedSampler had shuffle={had[0]}, seed={had[1]} and has {has[0]}, {has[1]}")
        knows_itself = self.kind == "stateful" or (self._distributed is not None and position["samples"] is not None)
        if knows_itself or before is None or now is None or before == now:
            return found
        taken = self._batches * before
        if of is not None and taken >= of:
            return found  # the last batch was the last of the pass
        if self.kind == "sampled" and taken % now == 0:
            self._batches = taken // now
        else:
            found.append(
                f"a batch had {before} samples and has {now}: {taken} were taken, and where that is cannot be said in "
                "batches of the new size"
            )
        return found

    def _resumed(self, position: dict[str, Any]) -> Iterator[Any]:
        same_world = position["world"] == self.world
        if position["loader"] is not None and same_world and self._seats == self.world:
            if self.kind != "stateful":
                raise Mismatch("the saved loader had a state_dict and this one has none; give the same kind of loader")
            return self._stateful(position["loader"], position["generators"])
        if self._distributed is not None and position["samples"] is not None:
            self.kind = "sampled"  # for the rest of this pass its own count would start in the middle
            return self._over_seats(self._samples)
        before = msgspec.convert(position["stream"], Course) if position.get("stream") is not None else None
        if before is not None and self._course is not None and (not same_world or before.taken is not None):
            if before.ranks is None and self._course.ranks is None:
                return self._read_again()  # every rank reads all of it, as every rank did
            if self._keeps_seats:
                raise Mismatch(
                    f"{self._elsewhere(position)}: a stream's global batch does not stay; use batch='shrink'"
                )
            now, self._batches = self._course, 0
            self._course = msgspec.structs.replace(before, taken=before.taken or 0)
            return rest(self.loader, now, before, self.rank, self.world)
        if not same_world:
            raise Mismatch(
                f"{self._elsewhere(position)}. Only a DataLoader with a DistributedSampler, or over a stream of "
                "Hugging Face that split_dataset_by_node has divided among the ranks, can be divided anew; what the "
                "state of another means to other ranks nobody can know. Go on with as many ranks as before."
            )
        if self.kind == "sampled":
            began = position["began"]
            begin = (lambda: self._set_began(began)) if began["standing"] else None
            return self._draw(skip=self._batches, begin=begin)
        return self._read_again()

    def _elsewhere(self, position: dict[str, Any]) -> str:
        return f"the data position was saved by {position['world']} ranks and this job has {self.world}"

    def _read_again(self) -> Iterator[Any]:
        iterator = iter(self.loader)
        for _ in range(self._batches):
            next(iterator, None)
        return cast(Iterator[Any], iterator)

    def _stateful(self, state: Any, generators: list[bytes]) -> Iterator[Any]:
        self.loader.load_state_dict(state)
        iterator = iter(self.loader)
        self._set_generators(generators)  # StatefulDataLoader leaves them behind by its worker seed
        return cast(Iterator[Any], iterator)

    def begin_pass(self) -> Iterator[Any]:
        """Begin a pass, unless one is under way."""
        if self._iterator is None:
            self._set_epoch()
            standing = getattr(self.loader, "_iterator", None)  # persistent workers, who draw no new seed
            goes_on = self._drawn is not None and getattr(standing, "_index_sampler", None) is self._drawn
            self._began = self._beginning(standing=goes_on)
            self._course = course_of(self.loader, self.rank, self.world)
            if self._seats != self.world:
                self._iterator = self._over_seats(0)
            elif self.kind != "sampled":
                self._iterator = iter(self.loader)
            elif goes_on and self._drawn is not None:
                self._drawn.seed = self._seed_of(self.rank)
                self._iterator = iter(self.loader)
            else:
                self._iterator = self._draw()
        return self._iterator

    def next_batch(self) -> Any:
        """The next batch, or StopIteration at the end of a pass."""
        iterator = self.begin_pass()
        try:
            batch = next(iterator)
        except StopIteration:
            raise
        except Exception:
            if self.kind == "sampled":
                self._taken()  # a loop that goes on gets the one after it
            raise
        self._taken()
        return batch

    def _taken(self) -> None:
        self._batches += 1
        self._samples += self.batch_samples
        if self._drawn is not None:
            self._drawn.taken()

    def end_pass(self) -> None:
        """BadConfig at the second pass in a row that gave nothing: no number of passes would give any."""
        self._empty_passes = 0 if self._batches else self._empty_passes + 1
        if self._empty_passes == 2:
            raise BadConfig("the loader has given no batch in two passes: nothing can be trained on it")
        self.epoch += 1
        self._iterator, self._began, self.kind, self._course = None, None, _kind(self.loader), None
        self._batches = self._samples = 0

    # -- how a pass begins

    def _set_epoch(self) -> None:
        for holder in (self.loader, getattr(self.loader, "sampler", None), getattr(self.loader, "batch_sampler", None)):
            if holder is not None and hasattr(holder, "set_epoch"):
                holder.set_epoch(self.epoch)

    def _beginning(self, *, standing: bool) -> dict[str, Any]:
        return {
            "standing": standing,
            "random": random_state(),
            "generators": self._generator_states(),
        }

    def _generator_states(self) -> list[bytes]:
        return [generator.get_state().numpy().tobytes() for generator in generators_of(self.loader)]

    def _set_began(self, began: dict[str, Any]) -> None:
        set_random_state(began["random"])
        self._set_generators(began["generators"])

    def _set_generators(self, states: list[bytes]) -> None:
        import torch

        generators = generators_of(self.loader)
        if len(generators) != len(states):
            raise Mismatch("the loader or its sampler had a generator= when saved and has none now, or the reverse")
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def _seed_of(self, seat: int) -> int | None:
        """From which the workers of a plain DataLoader draw in this pass: a number that is drawn from nothing."""
        if _kind(self.loader) != "sampled" or not self.loader.num_workers or self._began is None:
            return None
        states = [self._began["random"]["torch"], *self._began["generators"]]
        return int(xxhash.xxh3_64_intdigest(b"".join([*states, f"{self.epoch} {seat}".encode()])))

    def _draw(self, **begun: Any) -> Iterator[Any]:
        """A pass of a plain DataLoader's own sampler, begun as `Drawn` is."""
        self._drawn = Drawn(self._index_sampler(), seed=self._seed_of(self.rank), **begun)
        return self._iterate_over(self._drawn)

    def _over_seats(self, taken: int) -> Iterator[Any]:
        """What is left of a pass after so many global samples, of all seats of this rank."""
        if self._seats == self.world:
            rest = self._rest_of(self._distributed, self.rank, taken)  # which hears of the next pass
            self._drawn = rest if isinstance(rest, Drawn) else None
            return self._iterate_over(rest)
        iterators = []
        for seat in self._mine:
            sampler = copy.copy(self._distributed)
            divide(sampler, self._seats, seat)
            rest = self._rest_of(sampler, seat, taken)
            iterators.append(self._iterate_over(rest, alone=len(self._mine) == 1))
        return iterators[0] if len(iterators) == 1 else map(joined, zip(*iterators, strict=True))

    def _rest_of(self, sampler: Any, seat: int, taken: int) -> Any:
        source: Any = Rest(sampler, taken)
        if self.loader.batch_sampler is not None:
            batches = copy.copy(self.loader.batch_sampler)
            batches.sampler, source = source, batches
        if _kind(self.loader) != "sampled":
            return source  # persistent workers keep it for passes in which a loader that knows its place counts by it
        return Drawn(source, seed=self._seed_of(seat), first=self._batches)

    def _index_sampler(self) -> Any:
        return self.loader.sampler if self.loader.batch_sampler is None else self.loader.batch_sampler

    def _iterate_over(self, samples: Any, *, alone: bool = True) -> Iterator[Any]:
        """iter(loader) with its sampler replaced for the moment in which the iterator takes hold of it.

        `alone`: no other iterator of this loader is in use; persistent workers serve one at a time.
        """
        loader = self.loader if alone else copy.copy(self.loader)
        loader._iterator = None  # persistent workers would go on with the sampler that they had
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        original = getattr(loader, name)
        object.__setattr__(loader, name, samples)
        try:
            iterator = iter(loader)
        finally:
            object.__setattr__(loader, name, original)
        if isinstance(samples, Drawn):
            if not samples.is_begun:
                raise BadConfig(
                    f"the __iter__ of {type(loader).__name__} does not ask its sampler at once, so nobody can say "
                    "where it stands: make __iter__ a generator itself, or give the loader state_dict and "
                    "load_state_dict"
                )
            samples.drop()
        return cast(Iterator[Any], iterator)


def _items_of(loader: Any) -> int | None:
    """How many items there are to be drawn from; None where a stream has no end, or nobody knows."""
    from torch.utils.data import DataLoader, IterableDataset

    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    if dataset is None or isinstance(dataset, IterableDataset):
        return None
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def generators_of(loader: Any) -> list[Any]:
    """The generators of a loader and its samplers, each once."""
    holders, one = [loader, getattr(loader, "sampler", None)], getattr(loader, "batch_sampler", None)
    while one is not None:
        holders += [one, getattr(one, "sampler", None)]
        one = getattr(one, "batch_sampler", None)  # one that shares out the batches of another
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(g): g for g in found if g is not None}.values())
