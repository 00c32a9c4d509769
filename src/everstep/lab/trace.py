"""Recorded comings and goings of nodes, as a CSV file: a time, `add` or `remove`, the name of a node.

Who comes takes the first empty seat, or waits as a spare until one is empty. The run begins when all seats are taken
for the first time. A file that cannot have happened (times that go back, a node that leaves without being there, a
missing cell) is refused, with its line.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from pathlib import Path

from everstep.errors import BadConfig

TIME_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A seat loses its node, and gets another one."""

    seat: int
    lost_s: float
    back_s: float  # infinite if nobody comes any more


def read_trace(path: Path, *, unit_s: float, nodes: int) -> tuple[tuple[Visit, ...], int]:
    """Since all seats were taken for the first time; and how many nodes there were at once, at most."""
    seat_of: dict[str, int] = {}
    waiting: list[str] = []  # in the order in which they came
    empty = list(range(nodes))
    lost: dict[int, float] = {}
    visits: list[Visit] = []
    began: float | None = None
    most = 0
    for line, now, event, name in _rows(path, unit_s):
        is_there = name in seat_of or name in waiting
        if is_there == (event == "add"):
            has = "is already there" if is_there else "is not there"
            raise BadConfig(f"{path}, line {line}: node = {name!r} {has}, so it cannot {event}: is a row missing?")
        if event == "add":
            waiting.append(name)
        elif name in waiting:
            waiting.remove(name)
        else:
            seat = seat_of.pop(name)
            heappush(empty, seat)
            lost[seat] = now
        while empty and waiting:
            seat = heappop(empty)
            seat_of[waiting.pop(0)] = seat
            if began is not None and seat in lost:
                visits.append(Visit(seat=seat, lost_s=lost.pop(seat) - began, back_s=now - began))
        most = max(most, len(seat_of) + len(waiting))
        if began is None and not empty:
            began = now
            lost.clear()
    visits += [Visit(seat=seat, lost_s=at - (began or 0.0), back_s=inf) for seat, at in sorted(lost.items())]
    return tuple(sorted(visits, key=lambda one: (one.lost_s, one.seat))), most


def _rows(path: Path, unit_s: float) -> Iterator[tuple[int, float, str, str]]:
    before = 0.0
    try:
        file = path.open(newline="")
    except OSError as error:
        raise BadConfig(f"{path} cannot be read: {error.strerror}") from None
    with file:
        for line, row in enumerate(csv.reader(file), start=1):
            if line == 1 and row and not _is_number(row[0]):
                continue  # the names of the columns
            cells = [cell.strip() for cell in row]
            if len(cells) != 3 or not all(cells):
                raise BadConfig(f"{path}, line {line}: {','.join(row)!r} must be time, add or remove, node")
            if not _is_number(cells[0]) or float(cells[0]) < before:
                raise BadConfig(f"{path}, line {line}: time = {cells[0]!r} must be a number from {before:g}")
            if cells[1] not in ("add", "remove"):
                raise BadConfig(f"{path}, line {line}: event = {cells[1]!r} must be add or remove")
            before = float(cells[0])
            yield line, before * unit_s, cells[1], cells[2]


def _is_number(text: str) -> bool:
    try:
        return 0 <= float(text) < inf
    except ValueError:
        return False
