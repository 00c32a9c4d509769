"""`everstep halt`: have a run end before its end, at a step boundary, with that step kept."""

from __future__ import annotations

import datetime
import re
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from everstep.archive import open
from everstep.cli.output import Directory, Json, ago, counted, print_json
from everstep.errors import BadConfig
from everstep.halt import is_in_force
from everstep.image import FORMAT
from everstep.store import halts
from everstep.types import HaltRecord


def command(
    directory: Directory,
    now: Annotated[bool, typer.Option("--now", help="After the step that is under way, or a few more.")] = False,
    after: Annotated[int | None, typer.Option("--after", min=1, help="When so many checkpoints are on disk.")] = None,
    before: Annotated[str | None, typer.Option("--before", help="Before a time: 18:30, or 2026-12-24T18:30.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", min=0, help="When the allocation has so many left; in every allocation."),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Let the run go on.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Only say what was asked for.")] = False,
    json: Json = False,
) -> None:
    """Ask a run to end: now, after checkpoints, before a time, or near the end of its allocation. It exits with 0.

    What was asked for before is forgotten. A halt is obeyed once: the job that is started again goes on. Only --seconds
    stands until --clear.
    """
    conditions = now or after is not None or before is not None or seconds is not None
    if conditions + clear + show != 1:
        raise BadConfig("say when: --now, --after, --before or --seconds; or --clear, or --show")
    past = open(directory)
    place = past.directory
    if clear:
        halts.clear(place)
    if conditions:
        moment = None if before is None else parse_time(before, time.time())
        record = HaltRecord(
            format=FORMAT, now=now, after=after, before=moment, seconds=seconds, set_time=time.time()
        )  # fmt: skip
        halts.write(place, record)
    _say(place, halts.read(place), json)
    if now and not json and not past.trainers():
        print("nobody trains it on this node now: unless others do, its next start leaves after a step or a few")
        print("--clear takes the halt back")


def parse_time(text: str, now: float) -> float:
    """`18:30` is the next time that a clock shows it; anything else is a date and a time, local unless it says so."""
    if found := re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", text):
        today = datetime.datetime.fromtimestamp(now).replace(
            hour=int(found[1]), minute=int(found[2]), second=0, microsecond=0
        )
        moment = today.timestamp()
        return moment if moment > now else (today + datetime.timedelta(days=1)).timestamp()
    try:
        moment = datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise BadConfig(f"--before must be a time such as 18:30 or 2026-12-24T18:30, not {text!r}") from None
    if moment <= now:
        raise BadConfig(f"--before must be a time to come, and {text} is over; use --now")
    return moment


def _say(directory: Path, halt: HaltRecord | None, json: bool) -> None:
    if json:
        told = {**msgspec.structs.asdict(halt), "in_force": is_in_force(halt)} if halt is not None else None
        print_json({"directory": str(directory), "halt": told})
        return
    if halt is None:
        print("no halt is asked for")
        return
    print(f"halt {' or '.join(_conditions(halt))}, asked for {ago(halt.set_time)}")
    if halt.obeyed_time is not None:
        rest = "the rest stands" if is_in_force(halt) else "it stops nobody any more"
        print(f"obeyed at step {halt.obeyed_step}, {ago(halt.obeyed_time)} ({halt.why}); {rest}")


def _conditions(halt: HaltRecord) -> list[str]:
    said = ["now"] if halt.now else []
    if halt.after is not None:
        said.append(f"after {counted(halt.after, 'checkpoint')}")
    if halt.before is not None:
        said.append(f"before {datetime.datetime.fromtimestamp(halt.before).isoformat(sep=' ', timespec='seconds')}")
    if halt.seconds is not None:
        said.append(f"with {halt.seconds:g} seconds of the allocation left")
    return said
