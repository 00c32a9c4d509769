"""The page of a simulation: who gets how much done, what the rest of the time went into, and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

from rich.filesize import decimal

from everstep.lab.outcome import CAUSES, Summary
from everstep.report.figures import LINES, blank
from everstep.report.markup import cards, drawn, headline, inputs_of, section, table, warning, write_html
from everstep.report.outcomes import Simulated

_COLOURS = dict(zip(CAUSES, LINES, strict=True))
_ROW = 30  # pixels that a strategy takes


def write_simulated(simulated: Simulated, file: TextIO) -> None:
    write_html(simulated.title, _parts(simulated), file)


def _parts(simulated: Simulated) -> Iterator[str]:
    gpus = sorted({one.gpus for one in simulated.summaries})
    sizes = f"{gpus[0]:,} GPUs" if len(gpus) == 1 else f"{gpus[0]:,} to {gpus[-1]:,} GPUs"
    yield headline(simulated.title, f"A simulation: {sizes}, {simulated.runs} runs on a virtual clock.")
    if simulated.runs < simulated.of:
        yield warning([f"It was interrupted: {simulated.runs} of {simulated.of} runs are here."])
    yield cards(_facts(simulated))
    note = "The share of the time in which steps were made that were kept."
    if any(one.goodput.within for one in simulated.summaries):
        note += " Lines: where the mean of infinitely many seeds lies, 95 times of 100."
    yield section("Goodput", note, drawn(_by_size(simulated) if simulated.is_sized else _goodput(simulated)))
    yield section("Wasted time", "What the rest of the time went into, by cause.", drawn(_wasted(simulated)))
    where = f" on {gpus[-1]:,} GPUs" if simulated.is_sized else ""
    note = f"What had been wasted until then, in one run of each strategy (seed {_first_seed(simulated)}){where}."
    yield section("Wasted over time", note, drawn(_over_time(simulated)))
    yield section("Side by side", "Of a run, on the average of its seeds.", _side_by_side(simulated))
    yield section("What the tuner decided", "Each number with its formula and what went into it.", _decided(simulated))


def _facts(simulated: Simulated) -> dict[str, str]:
    largest = max(one.gpus for one in simulated.summaries)
    there = [one for one in simulated.summaries if one.gpus == largest]
    best, worst = (choose(there, key=lambda one: one.goodput.mean) for choose in (max, min))
    return {
        f"goodput of {best.strategy}, the most": best.goodput.percent(),
        f"goodput of {worst.strategy}, the least": worst.goodput.percent(),
        "failures in a run": _plain(best.failures.mean),
        "hours, the longest run": _plain(max(one.elapsed_s for one in simulated.runs_by_seed) / 3600),
        "nodes": f"{max(one.nodes for one in simulated.summaries):,}",
        "seeds": str(max(one.seeds for one in simulated.summaries)),
    }  # fmt: skip


def _plain(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _named(one: Summary, simulated: Simulated) -> str:
    return f"{one.gpus:,} GPUs, {one.strategy}" if simulated.is_sized else one.strategy


def _rows(simulated: Simulated, **layout: Any) -> Any:
    """Strategies from top to bottom, in the order of the scenario."""
    figure = blank(110 + _ROW * len(simulated.summaries), bargap=0.3, **layout)
    names = [_named(one, simulated) for one in simulated.summaries]
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1], automargin=True, fixedrange=True)
    return figure


def _goodput(simulated: Simulated) -> Any:
    figure = _rows(simulated, showlegend=False)
    found = simulated.summaries
    figure.add_bar(
        y=[one.strategy for one in found], x=[100 * one.goodput.mean for one in found], orientation="h",
        marker={"color": "#54a24b"}, text=[one.goodput.percent() for one in found], textposition="inside",
        insidetextanchor="start", error_x=_error(found),
        hovertemplate="%{y}: %{text}<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title="goodput, per cent of the time", range=[0, 100])
    return figure


def _error(found: list[Summary]) -> dict[str, object]:
    """How far each goodput may be off, if several seeds tell."""
    return {
        "array": [100 * (one.goodput.within or 0.0) for one in found],
        "visible": found[0].goodput.within is not None,
    }


def _by_size(simulated: Simulated) -> Any:
    figure = blank(380)
    for number, strategy in enumerate(dict.fromkeys(one.strategy for one in simulated.summaries)):
        line = sorted((one for one in simulated.summaries if one.strategy == strategy), key=lambda one: one.gpus)
        figure.add_scatter(
            x=[one.gpus for one in line], y=[100 * one.goodput.mean for one in line], mode="lines+markers",
            name=strategy, line=_line(number),
            error_y=_error(line),
        )  # fmt: skip
    sizes = sorted({one.gpus for one in simulated.summaries})
    figure.update_xaxes(title="GPUs", type="log", tickvals=sizes, ticktext=[f"{size:,}" for size in sizes])
    figure.update_yaxes(title="goodput, per cent")
    return figure


def _wasted(simulated: Simulated) -> Any:
    figure = _rows(simulated, barmode="stack")
    for cause in CAUSES:
        shares = [100 * one.wasted[cause].mean for one in simulated.summaries]
        if max(shares) < 0.005:
            continue  # nobody would see it
        figure.add_bar(
            y=[_named(one, simulated) for one in simulated.summaries], x=shares, orientation="h", name=cause,
            marker={"color": _COLOURS[cause]}, hovertemplate=f"%{{y}}<br>{cause}: %{{x:.2f}} %<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title="per cent of the time")
    figure.update_layout(legend_traceorder="normal")
    return figure


def _line(number: int) -> dict[str, object]:
    """One that no other looks like, of twice as many as there are colours."""
    return {"width": 2, "color": LINES[number % len(LINES)], "dash": "dash" if number >= len(LINES) else "solid"}


def _first_seed(simulated: Simulated) -> int:
    return min(one.seed for one in simulated.runs_by_seed)


def _over_time(simulated: Simulated) -> Any:
    figure = blank(380)
    largest, seed = max(one.nodes for one in simulated.runs_by_seed), _first_seed(simulated)
    shown = [one for one in simulated.runs_by_seed if one.nodes == largest and one.seed == seed]
    for number, one in enumerate(shown):
        figure.add_scatter(
            x=[when / 3600 for when, _ in one.series], y=[(when - useful) / 3600 for when, useful in one.series],
            mode="lines", name=one.strategy, line=_line(number),
            hovertemplate="%{y:.3g} h wasted in %{x:.3g} h<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title="hours since the run began")
    figure.update_yaxes(title="hours wasted", rangemode="tozero")
    return figure


def _side_by_side(simulated: Simulated) -> str:
    columns = ["strategy", "goodput", "steps", "steps lost", "failures", "went on by", "restored from", "written"]
    rows = []
    for one in simulated.summaries:
        written = ", ".join(f"{decimal(int(size))} {tier}" for tier, size in one.bytes.items() if size)
        numbers = [f"{one.steps.mean:,.0f}", f"{one.steps_lost.mean:,.4g}", f"{one.failures.mean:,.4g}"]
        rows.append(
            [_named(one, simulated), one.goodput.percent(), *numbers, _times(one.recoveries), _times(one.restored_from),
             written]
        )  # fmt: skip
    return table(columns, rows)


def _times(counts: dict[str, float]) -> str:
    return ", ".join(f"{times:,.4g} {name}" for name, times in counts.items() if times)


def _decided(simulated: Simulated) -> str:
    rows = [
        [_named(one, simulated), tuning.what, tuning.value, tuning.formula, tuning.bound,
         inputs_of(tuning.inputs, tuning.assumed)]
        for one in simulated.summaries
        for tuning in one.decisions
    ]  # fmt: skip
    if not rows:
        return "<p>Nothing was decided: the scenario says how often.</p>"
    return table(["strategy", "what", "result", "formula", "decided by", "inputs"], rows)
