"""Small multiples as a picture: one row a line, from 0 to 100 per cent, all with the same axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

LEFT, WIDTH, RIGHT = 290, 560, 170
HEIGHT, GAP, HEAD, FOOT = 34, 16, 46, 34
INK, FAINT, GRID, FILL, STROKE = "#24292f", "#57606a", "#d8dee4", "#c5d7e8", "#2f5d8a"


@dataclass
class Row:
    """One line; `said` and `also` are written beside it."""

    label: str
    values: Sequence[tuple[float, float]]  # seconds, per cent
    said: str
    also: str


def write_rows(path: Path, title: str, parts: dict[str, list[Row]]) -> None:
    """Parts one below the other, each with its heading."""
    longest_s = max((row.values[-1][0] for rows in parts.values() for row in rows if row.values), default=1.0)
    body, y = [_text(16, 26, title, size=16, weight=600)], 40
    for heading, rows in parts.items():
        body.append(_text(16, y + 22, heading, size=13, weight=600, colour=FAINT))
        y += HEAD
        for row in rows:
            body += _row(row, y, longest_s)
            y += HEIGHT + GAP
        body += _axis(y - GAP, longest_s)
        y += FOOT
    width = LEFT + WIDTH + RIGHT
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" height="{y}" '
        'font-family="system-ui, sans-serif">\n'
        f'<rect width="{width}" height="{y}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _row(row: Row, top: float, longest_s: float) -> list[str]:
    found = [_text(LEFT - 40, top + HEIGHT / 2 + 4, row.label, anchor="end")]
    for percent in (0, 50, 100):
        y = top + HEIGHT * (1 - percent / 100)
        found.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}" stroke="{GRID}" stroke-width="1"/>')
        if percent != 50:
            found.append(_text(LEFT - 6, y + 3, str(percent), size=9, anchor="end", colour=FAINT))
    if row.values:
        points = [
            f"{LEFT + WIDTH * when / longest_s:.1f},{top + HEIGHT * (1 - percent / 100):.1f}"
            for when, percent in row.values
        ]
        ends = [f"{point.split(',')[0]},{top + HEIGHT}" for point in (points[-1], points[0])]
        found.append(f'<polygon points="{" ".join(points + ends)}" fill="{FILL}"/>')
        found.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{STROKE}" stroke-width="1.2"/>')
    found.append(_text(LEFT + WIDTH + 14, top + HEIGHT / 2 - 1, row.said, size=13, weight=600))
    found.append(_text(LEFT + WIDTH + 14, top + HEIGHT / 2 + 14, row.also, size=10, colour=FAINT))
    return found


def _axis(top: float, longest_s: float) -> list[str]:
    each_s = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if longest_s / step <= 10)
    found = []
    for tick in range(0, int(longest_s) + 1, each_s):
        x = LEFT + WIDTH * tick / longest_s
        found.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + 4}" stroke="{FAINT}"/>')
        found.append(_text(x, top + 16, f"{tick} s", size=10, anchor="middle", colour=FAINT))
    return found


def _text(
    x: float, y: float, words: str, *, size: int = 12, weight: int = 400, anchor: str = "start", colour: str = INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(words)}</text>'
    )
