"""What `everstep simulate --json` has written, read back."""

from __future__ import annotations

from pathlib import Path

import msgspec

from everstep.errors import BadConfig
from everstep.lab.outcome import Outcome, Summary


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    runs: int  # that were done,
    of: int  # of so many
    summaries: list[Summary]
    runs_by_seed: list[Outcome]

    @property
    def is_sized(self) -> bool:
        """Whether the same is simulated for clusters of several sizes."""
        return len({one.nodes for one in self.summaries}) > 1


def read_simulation(path: Path) -> Simulated:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Simulated)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadConfig(f"{path} is not what `everstep simulate --json` writes: {error}") from None
    if not found.summaries or not found.runs_by_seed:
        raise BadConfig(f"{path} has no run that was simulated to its end")
    return found
