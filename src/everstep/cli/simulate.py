"""`everstep simulate`: what would become of a run, strategy by strategy, if things broke as a scenario says."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.cli.output import INTERRUPTED, Json, bar, human_bytes, print_json, print_table
from everstep.errors import BadConfig

if TYPE_CHECKING:
    from everstep.lab.outcome import Outcome, Summary
    from everstep.lab.scenario import Scenario

_FIXED = (
    "strategy", "nodes", "gpus", "seed", "elapsed_s", "useful_s", "goodput", "steps", "steps_lost", "failures"
)  # fmt: skip


def command(
    scenario: Annotated[str | None, typer.Argument(help="A .toml file, or the name of a scenario that ships.")] = None,
    names: Annotated[bool, typer.Option("--list", help="Name the scenarios that ship.")] = False,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="How many runs; else as the scenario says.")
    ] = None,
    json: Json = False,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Every run as a line.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="A drawing: .svg or .html.")] = None,
) -> None:
    """Simulate strategies side by side: goodput, wasted time by cause, steps lost, bytes to each tier.

    Decisions are those of the code that real runs use. The same scenario and seed give the same numbers. Ctrl-C ends
    it with what is done so far, and exit code 130.
    """
    from everstep.lab.scenario import load_scenario, shipped
    from everstep.lab.simulation import count

    if names:
        print_table(["scenario", "what it is"], [list(one) for one in shipped().items()])
        return
    if scenario is None:
        raise BadConfig("simulate takes a .toml file or the name of a scenario; --list shows those that ship")
    if plot is not None and plot.suffix not in (".svg", ".html"):
        raise BadConfig(f"--plot = {str(plot)!r} must end in .svg or .html")
    loaded = load_scenario(scenario)
    total, done, interrupted = count(loaded, seeds), list["Outcome"](), False
    try:
        for one in _watched(loaded, seeds, total):
            done.append(one)
    except KeyboardInterrupt:
        interrupted = True
    _tell(loaded, done, total, json)
    if csv_file is not None:
        _write_csv(csv_file, done)
    if plot is not None and done:
        _draw(plot, loaded, done)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _watched(scenario: Scenario, seeds: int | None, total: int) -> Iterator[Outcome]:
    """All outcomes, with a bar on stderr once it takes long."""
    from everstep.lab.simulation import outcomes

    with bar("simulating", total) as show:
        for done, one in enumerate(outcomes(scenario, seeds), 1):
            show(done)
            yield one


def _tell(scenario: Scenario, done: list[Outcome], total: int, json: bool) -> None:
    from everstep.lab.outcome import summarize

    summaries = summarize(done)
    if json:
        print_json({
            "title": scenario.title, "runs": len(done), "of": total, "summaries": summaries,
            "runs_by_seed": [{**asdict(one), "goodput": one.goodput} for one in done],
        })  # fmt: skip
        return
    print(f"{scenario.title}: {len(done)} runs" + (f" of {total}, interrupted" if len(done) < total else ""))
    if done:
        sized = len({one.nodes for one in summaries}) > 1
        columns = ["strategy", "goodput", "wasted by", "steps lost", "went on by", "written"]
        print_table((["GPUs"] if sized else []) + columns, [_row(one, sized) for one in summaries])


def _row(one: Summary, sized: bool) -> list[str]:
    worst = sorted(one.wasted.items(), key=lambda item: -item[1].mean)
    wasted = "\n".join(f"{share.mean:.2%} {cause}" for cause, share in worst if share.mean >= 5e-5)
    went_on = "\n".join(f"{times:,.4g} {policy}" for policy, times in one.recoveries.items())
    written = "\n".join(f"{human_bytes(int(size))} {tier}" for tier, size in one.bytes.items() if size)
    row = [one.strategy, one.goodput.percent(), wasted, f"{one.steps_lost.mean:,.4g}", went_on, written]
    return [f"{one.gpus:,}", *row] if sized else row


def _write_csv(path: Path, done: list[Outcome]) -> None:
    from everstep.lab.outcome import CAUSES

    tiers = sorted({tier for one in done for tier in one.bytes})
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        causes = [f"{cause.replace(' ', '_')}_s" for cause in CAUSES]
        writer.writerow([*_FIXED, *causes, *(f"{tier}_bytes" for tier in tiers)])
        for one in done:
            values: list[Any] = [getattr(one, name) for name in _FIXED]
            values += [one.wasted_s[cause] for cause in CAUSES]
            writer.writerow(values + [one.bytes.get(tier, 0) for tier in tiers])


def _draw(path: Path, scenario: Scenario, done: list[Outcome]) -> None:
    from everstep.lab.outcome import summarize
    from everstep.lab.picture import page, svg

    draw = svg if path.suffix == ".svg" else page
    path.write_text(draw(scenario.title, summarize(done), done))
