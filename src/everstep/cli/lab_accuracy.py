"""`everstep lab accuracy`: what losing ranks does to a model that is really trained, strategy by strategy."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from everstep.cli.output import INTERRUPTED, Json, bar, print_json, print_table, to_json
from everstep.lab.mishaps import Place
from everstep.lab.trial import INTERVALS, LAYERS, MOST, WAYS, Costs, Standing, Trained, Trial, judge

_FAILURES = 3  # that are drawn if nobody says anything
_COSTS = Costs()
_POINT = ("time", "step", "train_loss", "loss", "accuracy")


def _words(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _cost(what: str) -> Any:
    return typer.Option(help=f"What {what} costs, in steps.")


def command(
    model: Annotated[str, typer.Option(help=f"One of {_words(LAYERS)}.")] = "mlp",
    workers: Annotated[int, typer.Option(help=f"From 2 to {MOST['workers']}.")] = 8,
    steps: Annotated[int, typer.Option(help="Updates in a training.")] = 300,
    fail: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STEP:RANK:LAYER",
            help="Lose a rank in a step, when so many layers are averaged. Several in a step are lost at once.",
        ),
    ] = None,
    failures: Annotated[
        int | None, typer.Option(help=f"Draw so many losses for each seed; {_FAILURES} without --fail.")
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {_words(WAYS)}; all if none is named."),
    ] = None,
    interval: Annotated[
        list[int] | None, typer.Option(help=f"Steps per checkpoint, for restart; {_words(INTERVALS)}.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many trainings of each strategy.")] = 3,
    restart_cost: Annotated[float, _cost("a restart of all, with loading,")] = _COSTS.restart,
    rollback_cost: Annotated[float, _cost("noticing a loss, meeting and going back in memory")] = _COSTS.rollback,
    forward_cost: Annotated[float, _cost("noticing a loss, meeting and going forward")] = _COSTS.forward,
    checkpoint_cost: Annotated[float, _cost("a checkpoint")] = _COSTS.checkpoint,
    json: Json = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write curves.csv, result.json and accuracy.svg there.")
    ] = None,
) -> None:
    """Train a small model with virtual workers, lose some of them inside steps, and see what becomes of its accuracy.

    What those who are left do is decided by the code of real runs. Training is real; time is modelled, in steps. The
    same arguments give the same numbers. Ctrl-C ends it with the trainings that are done, and exit code 130.
    """
    places = tuple(map(Place.parse, fail or ()))
    trial = Trial(
        model=model, workers=workers, steps=steps, places=places, seeds=seeds,
        failures=failures if failures is not None else min(steps, 0 if places else _FAILURES),
        ways=tuple(strategy or WAYS), intervals=tuple(interval or INTERVALS),
        costs=Costs(
            restart=restart_cost, rollback=rollback_cost, forward=forward_cost, checkpoint=checkpoint_cost
        ),
    )  # fmt: skip
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    found: list[Trained] = []
    interrupted = False
    try:
        _train(trial, found)
    except KeyboardInterrupt:
        interrupted = True
    _tell(trial, found, json)
    if out is not None:
        _write(out, trial, found)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _train(trial: Trial, found: list[Trained]) -> None:
    with bar("training", trial.trainings * trial.steps) as show:
        from everstep.lab.accuracy import trainings

        for one in trainings(trial, lambda step: show(len(found) * trial.steps + step)):
            found.append(one)


def _result(trial: Trial, found: Sequence[Trained]) -> dict[str, Any]:
    return {
        "trial": trial, "done": len(found), "of": trial.trainings, "verdicts": judge(found),
        "trainings": [{**asdict(one), "overhead": one.overhead} for one in found],
    }  # fmt: skip


def _tell(trial: Trial, found: Sequence[Trained], json: bool) -> None:
    if json:
        print_json(_result(trial, found))
        return
    done = f"{len(found)} trainings" + (f" of {trial.trainings}, interrupted" if len(found) < trial.trainings else "")
    print(f"{trial}: {done}")
    costs = trial.costs
    print(
        f"time is modelled, in steps: a step 1, a restart {costs.restart:g}, a rollback {costs.rollback:g}, "
        f"going forward {costs.forward:g}, a checkpoint {costs.checkpoint:g}"
    )
    if found:
        columns = ["strategy", "accuracy", "change", "loss", "overhead", "again", "lost", "exact"]
        print_table(columns, [_row(one) for one in judge(found)])


def _row(one: Standing) -> list[str]:
    return [
        one.strategy, one.accuracy.percent(), one.accuracy_change.percent("+"), f"{one.loss.mean:.4f}",
        f"{one.overhead.mean:.1%}", f"{one.again:,.4g}",
        f"{one.buckets:,.4g} layers\n{one.samples:,.4g} samples" if one.buckets else "", f"{one.exact} of {one.seeds}",
    ]  # fmt: skip


def _write(folder: Path, trial: Trial, found: Sequence[Trained]) -> None:
    from everstep.lab.curves import svg
    from everstep.report.whole import whole_file

    with whole_file(folder / "curves.csv") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["strategy", "seed", *_POINT])
        for one in found:
            for point in one.curve:
                writer.writerow([one.strategy, one.seed, *(getattr(point, name) for name in _POINT)])
    with whole_file(folder / "result.json") as file:
        file.write(to_json(_result(trial, found)) + "\n")
    if found:
        with whole_file(folder / "accuracy.svg") as file:
            file.write(svg(str(trial), judge(found), found))
