"""What recovery does to accuracy, and what it costs: strategies side by side through the same losses.

Training is real, time is modelled, in steps: a step takes 1, of which a third is the forward pass, and the layers share
the rest. A step that is broken off takes as long as it came, and what the recovery costs is added; steps that are done
again take their time again; a checkpoint stops the training for as long as it costs. A step that is finished without
the lost takes 1, and what going forward costs. A function of (trial, seed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil

from torch import Tensor

from everstep.lab.lessons import Lesson, one_thread
from everstep.lab.mishaps import Mishap
from everstep.lab.trial import CAUSES, Point, Strategy, Trained, Trial
from everstep.lab.workers import Finish, Workers

_FORWARD_PASS = 1 / 3  # of a step
_EXAMS = 40  # in a training, at most, beside those after a recovery


def trainings(trial: Trial, tell: Callable[[int], None] = lambda step: None) -> Iterator[Trained]:
    """One after the other, seed by seed. `tell`: how far the present one is, after each step."""
    for seed in range(trial.seeds):
        digest = ""
        for strategy in trial.strategies:
            found = _Training(trial, strategy, seed, digest, tell).run()
            digest = digest or found.digest
            yield found


class _Training:
    """The workers, the clock, and what is done when somebody is lost."""

    def __init__(
        self, trial: Trial, strategy: Strategy, seed: int, undisturbed: str, tell: Callable[[int], None]
    ) -> None:
        self._trial, self._strategy, self._seed, self._tell = trial, strategy, seed, tell
        self._undisturbed = undisturbed
        self._lesson = Lesson(trial.model, workers=trial.workers, samples=trial.samples, seed=seed)
        self._workers = Workers(self._lesson, trial.workers, captures=strategy.way == "rollback")
        self._mishaps = {} if strategy.way is None else {(one.step, one.layer): one for one in trial.mishaps(seed)}
        self._failures = len(self._mishaps)
        self._checkpoint: tuple[int, Tensor] = (0, self._workers.state[0].clone())
        self._time, self._furthest, self._again, self._buckets, self._samples = 0.0, 0, 0, 0, 0
        self._wasted = dict.fromkeys(CAUSES, 0.0)
        self._curve: list[Point] = []
        self._train_loss: float | None = None  # of the last step, if it was not restored

    def run(self) -> Trained:
        step = 0
        with one_thread():
            self._examine(0)
            while step < self._trial.steps:
                step = self._do(step + 1)
                self._tell(step)
        digest = self._workers.digest()
        return Trained(
            strategy=str(self._strategy), seed=self._seed, steps=step, time=self._time, wasted=self._wasted,
            failures=self._failures, again=self._again, buckets=self._buckets, samples=self._samples,
            digest=digest, exact=digest == (self._undisturbed or digest), curve=tuple(self._curve),
        )  # fmt: skip

    def _do(self, step: int) -> int:
        """A step, or as much of it as there comes. The step that all are at then."""
        layers = self._workers.layers
        for layer in range(layers):
            mishap = self._mishaps.pop((step, layer), None)
            if mishap is not None:
                return self._recover(mishap)
            self._workers.work(self._late(step, layer + 1))
        self._finish(step)
        return step

    def _late(self, step: int, layer: int) -> tuple[int, ...]:
        """Who will not have noticed the present layer when somebody is lost at this one, the next."""
        if layer == self._workers.layers:
            step, layer = step + 1, 0
            if self._is_checkpointed(step - 1):
                return ()  # in which all take part
        mishap = self._mishaps.get((step, layer))
        return mishap.behind if mishap is not None else ()

    def _finish(self, step: int) -> None:
        self._train_loss = float(self._workers.losses.nanmean())
        self._time += 1.0
        if step <= self._furthest:
            self._again += 1
            self._wasted["done again"] += 1.0
        self._furthest = max(step, self._furthest)
        if self._is_checkpointed(step):
            self._checkpoint = step, self._workers.state[0].clone()
            self._waste("checkpoints", self._trial.costs.checkpoint)
        if step % ceil(self._trial.steps / _EXAMS) == 0 or step == self._trial.steps:
            self._examine(step)

    def _is_checkpointed(self, step: int) -> bool:
        return self._strategy.way == "restart" and step % self._strategy.interval == 0

    def _recover(self, mishap: Mishap) -> int:
        costs, workers = self._trial.costs, self._workers
        left = workers.lose(mishap.ranks)
        if self._strategy.way in ("restart", "rollback"):
            self._waste("broken off", _FORWARD_PASS + (1.0 - _FORWARD_PASS) * mishap.layer / workers.layers)
            self._train_loss = None
        if self._strategy.way == "restart":
            self._waste("recovery", costs.restart)
            workers.start_again(*self._checkpoint)
        elif self._strategy.way == "rollback":
            self._waste("recovery", costs.rollback)
            workers.go_back()
        else:
            lossy = workers.go_forward(left, Finish(self._strategy.way))
            self._buckets += lossy.buckets
            self._samples += round(lossy.batches * self._trial.samples * self._trial.workers)
            self._waste("recovery", costs.forward)
            self._finish(workers.step)
        self._examine(workers.step)
        return workers.step

    def _waste(self, cause: str, time: float) -> None:
        self._wasted[cause] += time
        self._time += time

    def _examine(self, step: int) -> None:
        if self._curve and (self._curve[-1].time, self._curve[-1].step) == (self._time, step):
            return
        loss, accuracy = self._lesson.examine(self._workers.state[self._workers.foremost, 0])
        self._curve.append(Point(time=self._time, step=step, train_loss=self._train_loss, loss=loss, accuracy=accuracy))
