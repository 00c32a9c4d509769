"""Tables of several calls become one: what a part of bench/gpu.py found is kept model by model.

An entry is what one model has; it says by which command, when and where it was made. A model that fails is written
down as failed, and what an earlier call found of it stays.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import Report, Table

Entry = dict[str, Any]
LEFT_OUT = "left out: "  # so begins the reason of what nobody failed at


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def each(name: str, one: Callable[[str], Iterator[Entry]]) -> Iterator[tuple[str, Entry]]:
    """The entry of a model as it grows, or why there is none: other models must not be lost by that."""
    try:
        for entry in one(name):
            yield name, entry
    except Exception as error:
        traceback.print_exc()
        yield name, {"error": one_line(error)}


def is_there(entry: Entry, since: str, method: str = "") -> bool:
    """Whether something was found well at a date or after it, so that nobody need measure it again."""
    if not since or (method and method not in entry.get("cells", {})):
        return False
    if method:
        return entry.get("dates", {}).get(method, "") >= since and not _has_failed(method, entry["cells"][method])
    dates = [made["date"] for made in entry.get("made", [])]
    return max(dates, default="") >= since and entry.get("whole", True) and not has_failed(entry)


def earlier(out: Path, part: str) -> dict[str, Entry]:
    """All models of an earlier call, if there was one."""
    try:
        found: dict[str, Entry] = json.loads((out / f"gpu-{part}.json").read_text())["data"]["models"]
        return found
    except FileNotFoundError:
        return {}


def merge(old: Entry, new: Entry, made: dict[str, str]) -> Entry:
    """A new entry over an old one. Methods and lives that were not run again stay, and so does how they were made."""
    if "error" in new:
        return {**old, "error": f"{new['error']} ({made['date']})"}
    entry = {key: value for key, value in {**old, **new}.items() if key != "error"}
    entry["made"] = [made]
    for kind in {"cells", "lives"} & new.keys():
        before, dates = old.get(kind, {}), old.get("dates", {})
        found = {m: _with_longer(before.get(m, {}), dates.get(m, ""), one) for m, one in new[kind].items()}
        entry[kind] = {**{m: one for m, one in before.items() if kind == "cells" or not one["error"]}, **found}
        entry["dates"] = {**dates, **dict.fromkeys(new[kind], made["date"])}
        runs = (run for one in entry[kind].values() for run in one.get("runs", ()))
        used = {*(entry["dates"].get(m) for m in entry[kind]), *(run.get("date") for run in runs)}
        entry["made"] = [*(one for one in old.get("made", ()) if one["date"] in used and one != made), made]
    return entry


def _with_longer(old: Entry, date: str, new: Entry) -> Entry:
    """A method whose search was ended by its time keeps what a longer search of an earlier call, of then, has found."""
    if not new.get("ended"):
        return new
    most = max(run["interval"] for run in new["runs"])
    longer = [{**run, "date": run.get("date") or date} for run in old.get("runs", ()) if run["interval"] > most]
    return {**new, "runs": [*new["runs"], *longer], "ended": old["ended"]} if longer else new


def has_failed(entry: Entry) -> bool:
    """As a whole, in one of its methods or in one of its lives; or it came back with other bits."""
    cells = any(_has_failed(name, cell) for name, cell in entry.get("cells", {}).items())
    lives = any(life.get("error") for life in entry.get("lives", {}).values())
    return bool(entry.get("error") or entry.get("errors")) or cells or lives or entry.get("exact") is False


def _has_failed(name: str, cell: Entry) -> bool:
    """Not so what there was no room for; and that a method of others fails is what was found."""
    return name.startswith("Everstep") and bool(cell.get("error")) and not cell["error"].startswith(LEFT_OUT)


def add_origins(report: Report, models: dict[str, Entry]) -> None:
    """By which commands the entries were made, and which models failed."""
    rows = [
        [name, f"`{made['command']}`", made["date"], made["where"]]
        for name, entry in models.items()
        for made in entry.get("made", [])
    ]
    report.tables.append(Table("Made by", ["model", "command", "date", "machine"], rows))
    failed = [[name, entry["error"]] for name, entry in models.items() if "error" in entry]
    if failed:
        report.tables.append(Table("Failed", ["model", "why"], failed))
