"""Virtual workers that train one model together, and may lose some of them in the middle of a step.

Each worker has weights and momentum of its own: a row of one tensor. In a step every worker computes gradients for its
share of the batch; layer by layer, the last first, they are averaged, and each layer is updated as soon as its average
is there. That is the arithmetic of reductions and updates that overlap with the backward pass. So whoever is lost
inside a step leaves the others with some layers updated and some not, and not all at the same layer.

How they come out of it is decided by the code of real runs: `live/course` says how a step is finished without the
lost, `recover/plan` which step all can go back to. The seats of the lost are filled again: on the way back before the
step is done again, on the way forward when it is finished. What a lost worker had is overwritten with NaN.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from everstep.lab.lessons import Lesson
from everstep.live.course import Begin, Give, GiveUp, GoOn, Lossy, Reduce, Saying, next_move
from everstep.recover.plan import make_plan
from everstep.types import Holding, Survey

_SLOTS = 2  # images of a worker in memory, as in real runs


class Finish(Enum):
    """What becomes of layers of which only some gradients are there."""

    RESCALED = "forward"  # they are averaged over those who are left, as real runs do it
    UNSCALED = "forward-unscaled"  # the lost count as if they had given zeros
    DROPPED = "forward-dropped"  # they are not updated in this step


class Workers:
    def __init__(self, lesson: Lesson, count: int, *, captures: bool = False) -> None:
        """`captures`: an image of every worker is taken after every step, which `go_back` needs."""
        self._lesson, self.count, self._captures = lesson, count, captures
        weights = lesson.start()
        self.state = torch.stack([weights, torch.zeros_like(weights)]).repeat(count, 1, 1)
        self.losses = torch.zeros(count)
        self._share = 1.0 / count
        self._gradients = torch.zeros(count, len(weights))
        self._results: dict[int, Tensor | None] = {}  # of reductions, by number; None: nobody is to use it
        self._images: list[dict[int, Tensor]] = [{} for _ in range(count)]  # by step
        self._batches, self._got = [0] * count, [0] * count  # the batch of each, and how many reductions it has
        for rank in range(count):
            self._capture(rank)

    @property
    def layers(self) -> int:
        return len(self._lesson.layers)

    @property
    def step(self) -> int:
        """That all have finished."""
        return min(self._got) // self.layers

    @property
    def foremost(self) -> int:
        """A rank that is nowhere behind."""
        return max(range(self.count), key=self._got.__getitem__)

    def digest(self) -> str:
        """Of all that all have."""
        return xxh3_128_hexdigest(self.state.numpy().data)

    def work(self, late: Collection[int] = ()) -> None:
        """The next layer is averaged over all, and updated by all who are not late to notice."""
        number = self._got[0]
        if number % self.layers == 0:
            self._begin(range(self.count))
        self._results[number] = self._sum(range(self.count), number, self._share)
        self._results.pop(number - 2 * self.layers, None)  # nobody is a pass behind
        self._take(number, [rank for rank in range(self.count) if rank not in late])

    def lose(self, ranks: Collection[int]) -> list[int]:
        """They have not given their gradients of the next layer, and never will. Who is left, as far as each came."""
        left = [rank for rank in range(self.count) if rank not in ranks]
        self._begin([rank for rank in left if self._has_finished(rank)])
        for rank in ranks:
            self.state[rank] = self._gradients[rank] = self.losses[rank] = torch.nan
        return left

    # -- the ways out

    def go_forward(self, left: Sequence[int], finish: Finish) -> Lossy:
        """The step is finished by those who are left."""
        missing: dict[int, list[float]] = {}
        while not isinstance(move := next_move([self._say(rank) for rank in left]), Begin):
            match move:
                case Give():
                    self._take(move.number, self._waiting(left, move.number))
                case Reduce():
                    self._results[move.number] = self._without_the_lost(left, move, finish)
                    missing.setdefault(move.number // self.layers, []).append(1.0 - move.present)
                    self._take(move.number, left)
                case GoOn():
                    self._begin([rank for rank in left if self._batches[rank] < move.batch])
                case GiveUp():
                    raise AssertionError(move.reason)  # nothing here is ever broken
        self._set_out(self._batches[left[0]], [self.state[left[0]]] * self.count)
        return Lossy.of(missing.values())

    def go_back(self) -> None:
        """All take the newest image that all have; the memory of the lost is still there."""
        held = [
            Holding(
                source="memory", node="here", step=step, rank=rank, world=self.count, generation="", cut_time=0.0,
                bytes=image.nbytes,
            )
            for rank, images in enumerate(self._images) for step, image in images.items()
        ]  # fmt: skip
        step = make_plan(Survey(holdings=tuple(held)), {"here"}).step
        assert step is not None
        self._set_out(step, [images[step] for images in self._images])

    def start_again(self, step: int, checkpoint: Tensor) -> None:
        self._set_out(step, [checkpoint] * self.count)

    def _set_out(self, step: int, states: Sequence[Tensor]) -> None:
        self.state = torch.stack(list(states))
        self._batches, self._got = [step] * self.count, [step * self.layers] * self.count
        for rank, images in enumerate(self._images):
            self._images[rank] = {taken: image for taken, image in images.items() if taken < step}
            self._capture(rank)

    # -- one layer, one worker

    def _begin(self, ranks: Collection[int]) -> None:
        """Their next batch: the same one, since nobody begins one while others are in two."""
        for step in {self._batches[rank] + 1 for rank in ranks}:
            gradients, losses = self._lesson.gradients(self.state[:, 0], step)
            for rank in ranks:
                self._gradients[rank], self.losses[rank], self._batches[rank] = gradients[rank], losses[rank], step

    def _take(self, number: int, ranks: Collection[int]) -> None:
        """The result of a reduction: the layer is updated with it."""
        result, layer = self._results[number], self._lesson.layers[number % self.layers]
        for rank in ranks:
            if result is not None:
                weights, momentum = self.state[rank, :, layer]
                momentum.mul_(self._lesson.momentum).add_(result)
                weights.sub_(momentum, alpha=self._lesson.rate)
            self._got[rank] = number + 1
            if self._has_finished(rank):
                self._capture(rank)

    def _capture(self, rank: int) -> None:
        if self._captures:
            images = self._images[rank]
            images[self._batches[rank]] = self.state[rank].clone()
            for step in sorted(images)[:-_SLOTS]:
                del images[step]

    def _sum(self, ranks: Collection[int], number: int, weight: float) -> Tensor:
        layer = self._lesson.layers[number % self.layers]
        return (self._gradients[list(ranks), layer] * weight).sum(0)

    def _without_the_lost(self, left: Sequence[int], move: Reduce, finish: Finish) -> Tensor | None:
        if finish is Finish.DROPPED:
            return None
        weight = move.weight(self._share) if finish is Finish.RESCALED else self._share
        return self._sum(left, move.number, weight)

    def _say(self, rank: int) -> Saying:
        got = self._got[rank]
        return Saying(
            batch=self._batches[rank], share=self._share, needs=None if self._has_finished(rank) else got,
            has=tuple(number for number in self._results if number < got),
        )  # fmt: skip

    def _has_finished(self, rank: int) -> bool:
        return self._got[rank] == self._batches[rank] * self.layers

    def _waiting(self, ranks: Collection[int], number: int) -> list[int]:
        return [rank for rank in ranks if self._got[rank] == number]
