"""`everstep tune`: what the run has decided by itself: formula, inputs, result."""

from __future__ import annotations

from typing import Any

from everstep.archive import open
from everstep.cli.output import Directory, Json, MemoryPath, ago, print_json, print_table
from everstep.events import Chose, Tuned, read_events


def command(directory: Directory, json: Json = False, memory: MemoryPath = None) -> None:
    """Show how often bases and flushes happen and which strategy runs, each with its formula and its inputs."""
    events = read_events(open(directory, memory=memory).directory)
    tuned = {event.what: event for event in events if isinstance(event, Tuned)}  # the newest of each
    chosen = next((event for event in reversed(events) if isinstance(event, Chose)), None)
    if json:
        print_json({"strategy": chosen, "decisions": list(tuned.values())})
        return
    if chosen is None and not tuned:
        print("nothing was decided yet: the first steps are measured, or the run was told what to do")
        return
    if chosen is not None:
        print(f"strategy {chosen.strategy} since step {chosen.step} ({ago(chosen.time)}): {chosen.reason}")
        print(f"  {_inputs(chosen.inputs)}")
    rows = [
        [e.what, str(e.value), e.formula, e.bound, _inputs(e.inputs, e.assumed), ago(e.time)] for e in tuned.values()
    ]
    if rows:
        print_table(["what", "result", "formula", "decided by", "inputs", "when"], rows)


def _inputs(inputs: dict[str, Any], assumed: tuple[str, ...] = ()) -> str:
    return ", ".join(f"{name}={value:.4g}{' (assumed)' if name in assumed else ''}" for name, value in inputs.items())
