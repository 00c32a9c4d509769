"""Which ranks are lost in which step, at which layer: named by somebody, or drawn by a seed.

Layers are counted in the order in which their gradients come, so that a layer's number is how many layers the step has
averaged and updated by then. Not all ranks have noticed the last of these: some are a layer behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from everstep.errors import BadConfig


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where one rank is lost."""

    step: int  # from 1
    rank: int
    layer: int  # from 0

    @classmethod
    def parse(cls, word: str) -> Place:
        parts = word.split(":")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
            raise BadConfig(f"--fail {word} must be STEP:RANK:LAYER, three whole numbers")
        return cls(*map(int, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mishap:
    """Those who are lost at once."""

    step: int
    layer: int
    ranks: tuple[int, ...]
    behind: tuple[int, ...]  # of the others: who still waits for the layer before


def check_places(places: Iterable[Place], *, steps: int, workers: int, layers: int) -> None:
    """What is named can happen."""
    layer_of: dict[int, int] = {}
    lost: dict[int, set[int]] = {}
    for place in places:
        said = f"--fail {place.step}:{place.rank}:{place.layer}"
        for what, value, least, most in (
            ("step", place.step, 1, steps), ("rank", place.rank, 0, workers - 1), ("layer", place.layer, 0, layers - 1)
        ):  # fmt: skip
            if not least <= value <= most:
                raise BadConfig(f"{said}: the {what} must be from {least} to {most}, not {value}")
        if layer_of.setdefault(place.step, place.layer) != place.layer:
            raise BadConfig(f"{said}: who is lost in the same step is lost at the same layer, {layer_of[place.step]}")
        lost.setdefault(place.step, set()).add(place.rank)
        if len(lost[place.step]) == workers:
            raise BadConfig(f"{said}: nobody would be left; of {workers} workers {workers - 1} may be lost at once")


def draw_places(count: int, *, steps: int, workers: int, layers: int, seed: int) -> list[Place]:
    """One rank each, in steps that differ."""
    rng = np.random.default_rng([seed, 0])
    drawn = sorted(int(step) + 1 for step in rng.choice(steps, count, replace=False))
    return [Place(step, int(rng.integers(workers)), int(rng.integers(layers))) for step in drawn]


def mishaps_of(places: Sequence[Place], *, workers: int, seed: int) -> list[Mishap]:
    """With those who are behind, about half of the others and never all of them, drawn by the seed."""
    rng = np.random.default_rng([seed, 1])
    found = []
    for step in sorted({place.step for place in places}):
        here = sorted({place for place in places if place.step == step})
        ranks = tuple(place.rank for place in here)
        layer = here[0].layer
        left = [rank for rank in range(workers) if rank not in ranks]
        behind = [rank for rank in left if rng.integers(2)]
        if len(behind) == len(left):
            behind.pop()
        if (step, layer) == (1, 0):
            behind = []  # there is no layer before
        found.append(Mishap(step=step, layer=layer, ranks=ranks, behind=tuple(behind)))
    return found
