"""What is to be compared, and what came of it: strategies through the same losses, over several seeds.

Needs no torch: what is wrong with a trial is said at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import mean

from everstep.errors import BadConfig
from everstep.lab.mishaps import Mishap, Place, check_places, draw_places, mishaps_of
from everstep.lab.outcome import Estimate

WAYS = ("restart", "rollback", "forward", "forward-unscaled", "forward-dropped")
INTERVALS = (10, 50)
LAYERS = {"mlp": 3, "cnn": 4, "gpt": 4}  # of each model
MOST = {"workers": 64, "steps": 100_000, "seeds": 1000}
UNDISTURBED = "undisturbed"
CAUSES = ("broken off", "done again", "recovery", "checkpoints")
_BATCH = 128  # samples of a step, as nearly as the workers can share them


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """In steps. By default about what bench/live.py measured, if a step takes 0.2 s."""

    restart: float = 35.0
    rollback: float = 1.2
    forward: float = 0.1
    checkpoint: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    way: str | None  # None: nothing is lost
    interval: int = 0  # steps per checkpoint

    def __str__(self) -> str:
        if self.way is None:
            return UNDISTURBED
        return f"restart, every {self.interval}" if self.way == "restart" else self.way.replace("-", ", ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """All that is asked for. `places`: where ranks are lost; if there are none, `failures` are drawn for each seed."""

    model: str = "mlp"
    workers: int = 8
    steps: int = 300
    places: tuple[Place, ...] = ()
    failures: int = 0
    ways: tuple[str, ...] = WAYS
    intervals: tuple[int, ...] = INTERVALS
    seeds: int = 3
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        if self.model not in LAYERS:
            raise BadConfig(f"--model {self.model} must be one of {', '.join(LAYERS)}")
        for way in self.ways:
            if way not in WAYS:
                raise BadConfig(f"--strategy {way} must be one of {', '.join(WAYS)}")
        _check("--workers", self.workers, 2, MOST["workers"])
        _check("--steps", self.steps, 1, MOST["steps"])
        _check("--seeds", self.seeds, 1, MOST["seeds"])
        if self.places and self.failures:
            raise BadConfig("--fail names what fails, and --failures draws it: give one of them")
        _check("--failures", self.failures, 0, self.steps)
        check_places(self.places, steps=self.steps, workers=self.workers, layers=LAYERS[self.model])
        for interval in self.intervals:
            _check("--interval", interval, 1, MOST["steps"])
        for name, cost in asdict(self.costs).items():
            if not 0 <= cost <= 1e6:
                raise BadConfig(f"--{name}-cost must be from 0 to 1000000 steps, not {cost:g}")

    @property
    def samples(self) -> int:
        """Of each worker in a step."""
        return _BATCH // self.workers

    @property
    def strategies(self) -> list[Strategy]:
        """The undisturbed training first: all others are compared with it."""
        found = [Strategy(way=None)]
        for way in dict.fromkeys(self.ways):
            intervals = dict.fromkeys(self.intervals) if way == "restart" else (0,)
            found += [Strategy(way=way, interval=interval) for interval in intervals]
        return found

    @property
    def trainings(self) -> int:
        return self.seeds * len(self.strategies)

    def __str__(self) -> str:
        lost = f"{len(self.places)} named" if self.places else f"{self.failures} drawn for each seed"
        return (
            f"{self.model}, {self.workers} workers, {self.steps} steps of {self.workers * self.samples} samples, "
            f"losses: {lost}"
        )

    def mishaps(self, seed: int) -> list[Mishap]:
        places = self.places or draw_places(
            self.failures, steps=self.steps, workers=self.workers, layers=LAYERS[self.model], seed=seed
        )
        return mishaps_of(places, workers=self.workers, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """How far a training was at a time: loss in the last step, and in an exam."""

    time: float
    step: int
    train_loss: float | None  # None: of what was restored
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One strategy through the losses of one seed. Steps and wasted time are all of the time."""

    strategy: str
    seed: int
    steps: int
    time: float
    wasted: dict[str, float]  # by cause
    failures: int
    again: int  # steps that were done again
    buckets: int  # layers that were updated without the lost, or not at all
    samples: int  # that the lost took with them
    digest: str  # of weights and momentum of all workers
    exact: bool  # the same bits as undisturbed
    curve: tuple[Point, ...]

    @property
    def overhead(self) -> float:
        return self.time / self.steps - 1.0

    @property
    def last(self) -> Point:
        return self.curve[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One strategy over its seeds. Changes are from the undisturbed training of the same seed."""

    strategy: str
    seeds: int
    accuracy: Estimate
    accuracy_change: Estimate
    loss: Estimate
    loss_change: Estimate
    time: Estimate
    overhead: Estimate
    wasted: dict[str, float]
    failures: float
    again: float
    buckets: float
    samples: float
    exact: int  # in how many seeds the bits are those of the undisturbed training


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BadConfig(f"{name} must be from {least} to {most}, not {value}")


def judge(found: Iterable[Trained]) -> list[Standing]:
    """In the order in which they came."""
    groups: dict[str, list[Trained]] = {}
    for one in found:
        groups.setdefault(one.strategy, []).append(one)
    return [_verdict(group, groups[UNDISTURBED]) for group in groups.values()]


def _verdict(group: list[Trained], undisturbed: list[Trained]) -> Standing:
    pairs = list(zip(group, undisturbed, strict=False))  # of the same seeds; the last may have been interrupted
    return Standing(
        strategy=group[0].strategy, seeds=len(group),
        accuracy=Estimate.of([one.last.accuracy for one in group]),
        accuracy_change=Estimate.of([one.last.accuracy - other.last.accuracy for one, other in pairs]),
        loss=Estimate.of([one.last.loss for one in group]),
        loss_change=Estimate.of([one.last.loss - other.last.loss for one, other in pairs]),
        time=Estimate.of([one.time for one in group]),
        overhead=Estimate.of([one.overhead for one in group]),
        wasted={cause: mean(one.wasted[cause] for one in group) for cause in CAUSES},
        failures=mean(one.failures for one in group), again=mean(one.again for one in group),
        buckets=mean(one.buckets for one in group), samples=mean(one.samples for one in group),
        exact=sum(one.exact for one in group),
    )  # fmt: skip
