"""How trainings got on, and what accuracy costs in time, as one drawing: SVG by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10
from operator import attrgetter

from everstep.lab.outcome import Estimate
from everstep.lab.picture import LINES, opening
from everstep.lab.trial import Point, Standing, Trained

_WIDTH, _HEIGHT = 1000, 890
_WIDE, _HIGH = 400, 210  # of a panel
_TICKS = 5  # on an axis, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """A rectangle with two axes."""

    left: float
    top: float
    wide: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        across, up = (x - self.x[0]) / (self.x[1] - self.x[0]), (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + across * self.wide, self.top + (1.0 - up) * _HIGH

    def frame(self, title: str, x_says: Callable[[float], str], y_says: Callable[[float], str]) -> list[str]:
        found = [
            f'<text x="{self.left}" y="{self.top - 10}" font-weight="bold">{escape(title)}</text>',
            f'<rect x="{self.left}" y="{self.top}" width="{self.wide}" height="{_HIGH}" fill="none" stroke="#bbb"/>',
        ]
        for value in _ticks(*self.x):
            x, y = self.at(value, self.y[0])
            found.append(f'<line x1="{x:.1f}" y1="{self.top}" x2="{x:.1f}" y2="{y:.1f}" stroke="#eee"/>')
            found.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{x_says(value)}</text>')
        for value in _ticks(*self.y):
            x, y = self.at(self.x[0], value)
            found.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x + self.wide:.1f}" y2="{y:.1f}" stroke="#eee"/>')
            found.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{y_says(value)}</text>')
        return found


def svg(title: str, verdicts: Sequence[Standing], found: Sequence[Trained]) -> str:
    """Accuracy and loss over time and over steps, in the first seed; below, what accuracy costs, over all seeds."""
    colors = {one.strategy: LINES[number % len(LINES)] for number, one in enumerate(verdicts)}
    first = [one for one in found if one.seed == found[0].seed]
    parts = opening(title, _WIDTH, _HEIGHT, colors)
    for row, (what, says) in enumerate((("accuracy", _percent), ("loss", _plain))):
        for column, (axis, place) in enumerate((("time", "time"), ("steps", "step"))):
            name = f"{what} over {axis}" + (" (a step takes 1)" if axis == "time" else "")
            curves = {
                one.strategy: _line(one.curve, attrgetter(place), attrgetter(what), axis == "steps") for one in first
            }
            parts += _curves(f"{name}, seed {first[0].seed}", curves, colors, 60 + column * 490, 110 + row * 270, says)
    return "\n".join([*parts, *_trade_off(verdicts, colors, 650), "</svg>\n"])


def _line(
    curve: Iterable[Point], x: Callable[[Point], float], y: Callable[[Point], float], once: bool
) -> list[tuple[float, float]]:
    """`once`: of steps that were done again, the last time counts."""
    points = [(x(point), y(point)) for point in curve]
    return sorted(dict(points).items()) if once else points


def _curves(
    title: str, curves: dict[str, list[tuple[float, float]]], colors: dict[str, str], left: float, top: float,
    says: Callable[[float], str],
) -> list[str]:  # fmt: skip
    points = [point for curve in curves.values() for point in curve]
    panel = _Panel(
        left=left, top=top, wide=_WIDE, x=(0.0, max(x for x, _ in points)), y=_span([y for _, y in points], 0.05)
    )
    found = panel.frame(title, _plain, says)
    for strategy, curve in curves.items():
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (panel.at(*point) for point in curve))
        found.append(f'<polyline points="{drawn}" fill="none" stroke="{colors[strategy]}" stroke-width="1.4"/>')
    return found


def _trade_off(verdicts: Sequence[Standing], colors: dict[str, str], top: float) -> list[str]:
    """A dot for each strategy, with its intervals of confidence."""
    ends = [_ends(one.overhead) for one in verdicts], [_ends(one.accuracy_change) for one in verdicts]
    x, y = (_span([end for pair in axis for end in pair], 0.1) for axis in ends)
    panel = _Panel(left=60, top=top, wide=_WIDE + 490, x=x, y=y)
    title = "the trade-off: accuracy against the undisturbed training, over the time that is spent in addition to it"
    found = panel.frame(title, _percent, _percent)
    for one, across, up in zip(verdicts, *ends, strict=True):
        dot = panel.at(one.overhead.mean, one.accuracy_change.mean)
        color = colors[one.strategy]
        for begin, end in (
            (panel.at(across[0], one.accuracy_change.mean), panel.at(across[1], one.accuracy_change.mean)),
            (panel.at(one.overhead.mean, up[0]), panel.at(one.overhead.mean, up[1])),
        ):
            place = f'x1="{begin[0]:.1f}" y1="{begin[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
            found.append(f'<line {place} stroke="{color}"/>')
        label = f"<title>{escape(one.strategy)}</title>"
        found.append(f'<circle cx="{dot[0]:.1f}" cy="{dot[1]:.1f}" r="5" fill="{color}">{label}</circle>')
    return found


def _ends(estimate: Estimate) -> tuple[float, float]:
    within = estimate.within or 0.0
    return estimate.mean - within, estimate.mean + within


def _span(values: Sequence[float], room: float) -> tuple[float, float]:
    """With some room around them, also if all are the same."""
    least, most = min(values), max(values)
    around = (most - least) * room or 0.01
    return least - around, most + around


def _ticks(least: float, most: float) -> list[float]:
    """Round numbers."""
    rough = (most - least) / _TICKS
    power = 10.0 ** floor(log10(rough))
    width = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = floor(least / width) + 1
    return [number * width for number in range(first, floor(most / width) + 1)]


def _percent(value: float) -> str:
    return f"{value * 100:.3g}%".replace("-0%", "0%")


def _plain(value: float) -> str:
    return f"{value:,.6g}"
