"""What is known of a run: its events and its timeline, and what of them is missing.

Whatever is broken is left out and named; only a directory that has nothing of a run is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from everstep.errors import EverstepError
from everstep.events import AnyEvent, read_events_and_torn
from everstep.store.disk import DiskTier
from everstep.store.manifest import RUN_RECORD, run_name
from everstep.store.places import not_a_run
from everstep.timeline import Track, read_devices, read_timeline


@dataclass(frozen=True)  # without slots: what is asked for each of a hundred thousand bars is remembered
class Story:
    directory: Path
    run: str  # empty: it cannot be read
    events: list[AnyEvent]  # in the order of time
    tracks: list[Track]
    missing: list[str]  # sentences
    devices: list[Track] = field(default_factory=list)  # of each node: how busy its accelerators were

    @cached_property
    def began(self) -> float:
        """The first moment of which anything is known."""
        return min(self._moments(), default=0.0)

    @cached_property
    def seconds(self) -> float:
        """From there to the last one."""
        return max(self._moments(), default=0.0) - self.began

    def _moments(self) -> list[float]:
        ends = [moment for t in self.tracks if t.spans for moment in (t.spans[0].begin, max(s.end for s in t.spans))]
        return [event.time for event in self.events] + ends


def read_story(directory: Path) -> Story:
    missing: list[str] = []
    directory = directory.absolute()
    files = [*directory.glob("events-*.jsonl"), *directory.glob("timeline-*.bin")]
    run = ""
    try:
        run = run_name(DiskTier(directory))
    except (FileNotFoundError, NotADirectoryError):
        if not files:
            raise not_a_run(directory) from None
        missing.append(f"{RUN_RECORD} is not there.")
    except EverstepError as error:
        missing.append(f"{RUN_RECORD}: {error}")
    events, torn = read_events_and_torn(directory)
    if not events:
        missing.append("There are no events.")
    if torn:
        missing.append(f"{torn} lines of the events are torn or unknown, and left out.")
    tracks = read_timeline(directory)
    if not any(track.spans for track in tracks):
        missing.append("There is no timeline: no file timeline-*.bin has a span that can be read.")
    devices = read_devices(directory)
    broken = [(track.name, problem) for track in (*tracks, *devices) for problem in track.problems]
    missing += [f"The timeline of {name}: {problem}." for name, problem in broken]
    return Story(directory, run, events, tracks, missing, devices)
