"""When to write a checkpoint, and when to leave: rank 0 looks at its clock, and all do what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.integrations.scr_settings import Choices

_END_TIMES = ("EVERSTEP_END_TIME", "SLURM_JOB_END_TIME")  # when the allocation ends, in seconds since the epoch


@dataclass(slots=True)
class Pace:
    choices: Choices
    ended_at: float  # the last checkpoint, or the beginning
    calls: int = 0
    written: int = 0
    cost_s: float = 0.0  # of all that were written, from start_output to complete_output

    def wrote(self, began: float, now: float) -> None:
        self.written, self.cost_s, self.ended_at = self.written + 1, self.cost_s + now - began, now

    def needs_one(self, now: float) -> bool:
        """Whichever limit comes first; always, if none is set."""
        self.calls += 1
        chosen = self.choices
        if not (chosen.interval or chosen.seconds or chosen.overhead):
            return True
        if chosen.interval and self.calls % chosen.interval == 0:
            return True
        since = now - self.ended_at
        if chosen.seconds and since >= chosen.seconds:
            return True
        if not chosen.overhead:
            return False
        if not self.written:
            return True  # what one costs is not known before there was one
        cost = self.cost_s / self.written
        return 100 * cost <= chosen.overhead * (cost + since)


def is_near_end(choices: Choices, environment: Mapping[str, str], now: float) -> bool:
    """Whether less of the allocation is left than SCR_HALT_SECONDS."""
    for name in _END_TIMES:
        end = environment.get(name, "")
        if end.replace(".", "", 1).isdigit():
            return choices.halt_s > 0 and float(end) - now < choices.halt_s
    return False
