"""Where the time went, and how runs got on, as one drawing: SVG by itself, or in a page of HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from everstep.lab.outcome import CAUSES, Outcome, Summary

_COLORS = dict(
    zip(
        ("useful", *CAUSES),
        ("#2a9d8f", "#f4a261", "#d62828", "#6a4c93", "#9e9e9e", "#e9c46a", "#457b9d", "#8ecae6", "#bdb2ff"),
        strict=True,
    )
)
LINES = ("#1d3557", "#e63946", "#2a9d8f", "#f4a261", "#6a4c93", "#457b9d", "#8a5a00", "#ff006e", "#606c38", "#000000")
_WIDTH, _LEFT, _RIGHT, _ROW, _TOP, _GRAPH = 1000, 260, 130, 26, 90, 260


def svg(title: str, summaries: Sequence[Summary], outcomes: Sequence[Outcome]) -> str:
    """Bars of useful and wasted time for every strategy; below, useful time over time in the first seed."""
    sized = len({one.nodes for one in summaries}) > 1
    bars_end = _TOP + _ROW * len(summaries)
    height = bars_end + (40 if sized else _GRAPH + 100)
    parts = opening(title, _WIDTH, height, _COLORS)
    for row, one in enumerate(summaries):
        name = f"{one.gpus:,} GPUs, {one.strategy}" if sized else one.strategy
        parts += _bar(name, one, _TOP + row * _ROW)
    if not sized:
        first = min(one.seed for one in outcomes)
        parts += _progress([one for one in outcomes if one.seed == first], bars_end + 50)
    return "\n".join([*parts, "</svg>\n"])


def page(title: str, summaries: Sequence[Summary], outcomes: Sequence[Outcome]) -> str:
    drawing = svg(title, summaries, outcomes)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<body style="margin:2em auto;max-width:{_WIDTH}px">\n{drawing}</body></html>\n'
    )


def opening(title: str, width: float, height: float, colors: Mapping[str, str]) -> list[str]:
    """Of a drawing: its size, its title, and which colour means what."""
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" ',
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="20" y="26" font-size="16" font-weight="bold">{escape(title)}</text>',
    ]
    x = 20
    for name, color in colors.items():
        found.append(f'<rect x="{x}" y="44" width="12" height="12" fill="{color}"/>')
        found.append(f'<text x="{x + 16}" y="54">{escape(name)}</text>')
        x += 36 + 7 * len(name)
    return found


def _bar(name: str, one: Summary, y: float) -> list[str]:
    wide = _WIDTH - _LEFT - _RIGHT
    shares = [("useful", one.goodput.mean), *((cause, share.mean) for cause, share in one.wasted.items())]
    found, x = [f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>'], float(_LEFT)
    for cause, share in shares:
        label = f"<title>{cause}: {share:.2%}</title>"
        found.append(
            f'<rect x="{x:.2f}" y="{y}" width="{share * wide:.2f}" height="{_ROW - 6}" fill="{_COLORS[cause]}">'
            f"{label}</rect>"
        )
        x += share * wide
    return [*found, f'<text x="{_WIDTH - _RIGHT + 8}" y="{y + 15}">{one.goodput.percent()}</text>']


def _progress(outcomes: Sequence[Outcome], y: float) -> list[str]:
    wide, longest = _WIDTH - _LEFT - _RIGHT, max(one.elapsed_s for one in outcomes)
    found = [
        f'<text x="{_LEFT}" y="{y - 12}" font-weight="bold">useful time over time, seed {outcomes[0].seed}</text>',
        f'<rect x="{_LEFT}" y="{y}" width="{wide}" height="{_GRAPH}" fill="none" stroke="#bbb"/>',
        f'<text x="{_LEFT}" y="{y + _GRAPH + 16}">0 h</text>',
        f'<text x="{_LEFT + wide}" y="{y + _GRAPH + 16}" text-anchor="end">{longest / 3600:.3g} h</text>',
    ]
    for number, one in enumerate(outcomes):
        color = LINES[number % len(LINES)]
        points = " ".join(
            f"{_LEFT + at / longest * wide:.1f},{y + _GRAPH * (1 - done / longest):.1f}" for at, done in one.series
        )
        found.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        found.append(f'<text x="20" y="{y + 14 + 18 * number}" fill="{color}">{escape(one.strategy)}</text>')
    return found
