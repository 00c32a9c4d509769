"""What if: simulated runs that are decided by the code of real ones."""

from everstep.lab.outcome import Estimate, Outcome, Summary
from everstep.lab.scenario import Scenario, load_scenario
from everstep.lab.simulation import Result, outcomes, simulate

__all__ = ["Estimate", "Outcome", "Result", "Scenario", "Summary", "load_scenario", "outcomes", "simulate"]
