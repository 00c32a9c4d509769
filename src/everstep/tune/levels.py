"""How often to each level: cheap copies for what happens often, dear ones for what happens seldom.

Every level has a price and a rate of failures that it is the cheapest to survive. A failure of that kind loses half of
the level's interval, so levels are independent and each has Young's optimum, as far as they nest: a deeper level is
made from the one before it, so its interval is a multiple of that one's. A level that would be rarer than the deeper
one after it is taken together with that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt

from everstep.tune.models import UNBOUNDED, Tuning

LEVEL = "sqrt(2 C / L) / T"


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelCosts:
    name: str
    stall_s: float  # that a checkpoint to this level costs the loop
    write_s: float  # until it is there, in the background: the next one does not begin before
    failures_per_s: float  # that this level survives, and the one before it does not


def schedule(levels: Sequence[LevelCosts], step_s: float) -> tuple[Tuning, ...]:
    """`levels`: the cheapest first. Steps between two checkpoints to each."""
    found: list[Tuning] = []
    every = 1
    for block in _blocks(levels):
        stall_s = sum(one.stall_s for one in block)
        rate = sum(one.failures_per_s for one in block)
        write_s = max(one.write_s for one in block)
        wanted_s, bound = _wanted(stall_s, rate), "the formula"
        if write_s > wanted_s:
            wanted_s, bound = write_s, "time to write"
        every *= max(_best_multiple(stall_s, rate, wanted_s, every * step_s), ceil(write_s / (every * step_s)), 1)
        for one in block:
            others = ", ".join(other.name for other in block if other is not one)
            why = f"{bound}; together with {others}" if others else bound
            inputs = {"C": stall_s, "L": rate, "T": step_s, "write_s": write_s}
            what = f"steps per checkpoint to {one.name}"
            found.append(Tuning(what=what, value=every, formula=LEVEL, inputs=inputs, bound=why, assumed=()))
    return tuple(found)


def waste_of_levels(levels: Sequence[LevelCosts], every_s: Sequence[float]) -> float:
    """The share of time that goes into checkpoints to all levels, and into work that failures of all kinds lose."""
    return sum(_waste(one.stall_s, one.failures_per_s, at) for one, at in zip(levels, every_s, strict=True))


def _wanted(stall_s: float, failures_per_s: float) -> float:
    if stall_s <= 0:
        return 0.0
    return sqrt(2 * stall_s / failures_per_s) if failures_per_s > 0 else inf


def _best_multiple(stall_s: float, rate: float, wanted_s: float, unit_s: float) -> int:
    fewer = max(1, int(min(wanted_s / unit_s, UNBOUNDED)))
    return min((fewer, fewer + 1), key=lambda times: _waste(stall_s, rate, times * unit_s))


def _waste(stall_s: float, failures_per_s: float, every_s: float) -> float:
    return stall_s / every_s + failures_per_s * every_s / 2


def _blocks(levels: Sequence[LevelCosts]) -> list[list[LevelCosts]]:
    """Levels that are taken together: neighbours of which the deeper would be the more frequent."""
    blocks: list[list[LevelCosts]] = []
    for level in levels:
        blocks.append([level])
        while len(blocks) > 1 and _of(blocks[-2]) > _of(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return blocks


def _of(block: Sequence[LevelCosts]) -> float:
    formula = _wanted(sum(one.stall_s for one in block), sum(one.failures_per_s for one in block))
    return max(formula, *(one.write_s for one in block))
