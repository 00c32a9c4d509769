"""A scenario, simulated: every strategy through the failures of every seed. A function of (scenario, seed)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.lab.failures import draw
from everstep.lab.lifetime import Lifetime
from everstep.lab.outcome import Outcome, Summary, summarize
from everstep.lab.scenario import Scenario, load_scenario, scenario_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    scenario: Scenario
    outcomes: tuple[Outcome, ...]
    of: int  # how many there would be, had nobody interrupted

    @property
    def summaries(self) -> list[Summary]:
        return summarize(self.outcomes)


def simulate(scenario: Scenario | str | Path | Mapping[str, Any], *, seeds: int | None = None) -> Result:
    """`scenario`: parsed, a file, a table as such a file has it, or the name of one that ships."""
    if isinstance(scenario, Mapping):
        scenario = scenario_of(scenario)
    elif not isinstance(scenario, Scenario):
        scenario = load_scenario(scenario)
    found = tuple(outcomes(scenario, seeds))
    return Result(scenario=scenario, outcomes=found, of=len(found))


def count(scenario: Scenario, seeds: int | None = None) -> int:
    return (seeds or scenario.seeds) * len(scenario.strategies) * max(1, len(scenario.sweep))


def outcomes(scenario: Scenario, seeds: int | None = None) -> Iterator[Outcome]:
    """One after the other, seed by seed: what is there when somebody interrupts can be compared."""
    for seed in range(seeds or scenario.seeds):
        for sized in [scenario.with_nodes(nodes) for nodes in scenario.sweep] or [scenario]:
            failures = draw(sized, seed)
            for strategy in sized.strategies:
                yield Lifetime(sized, strategy, failures, seed).run()
