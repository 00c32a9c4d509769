"""`everstep inject`: do to a real run what a scenario says, and see what becomes of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everstep.archive import open as open_run
from everstep.cli.output import INTERRUPTED, Json, human_bytes, human_seconds, print_json, print_table
from everstep.errors import BadConfig

if TYPE_CHECKING:
    from everstep.lab.agreement import Agreement, Calibration
    from everstep.lab.verdict import Fate, Verdict

_DIFFERS = 4


def command(
    words: Annotated[
        list[str],
        typer.Argument(metavar="SCENARIO -- COMMAND...", help="A .toml file, and what to start; {dir} in it is --dir."),
    ],
    directories: Annotated[
        list[Path], typer.Option("--dir", help="The run's directory; several if nodes have their own.")
    ],
    reference: Annotated[
        Path | None, typer.Option("--reference", help="A run of the same that nothing was done to, to compare with.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Several scenarios, really and simulated, side by side, under --dir.")
    ] = False,
    json: Json = False,
) -> None:
    """Start a command, and kill, stop, slow down, cut off, wipe, flip bits or fill the disk as the scenario says.

    Only processes that came of the command are touched. Afterwards: what was done when, steps lost, how long until the
    next step, exact or not. Exit code 0 if the command ended well and all was done to it; 4 if its end is not the
    reference's; else 1. Ctrl-C ends the command with all that came of it, and tells what was seen so far.
    """
    from everstep.lab.scenario import load_inject

    count = next((n for n, word in enumerate(words) if not word.endswith(".toml")), len(words))
    if not count or count == len(words):
        raise BadConfig("inject takes a scenario, then --, then the command: everstep inject s.toml -- torchrun ...")
    if reference is not None:
        open_run(reference)
    if simulate:
        if reference is not None:
            raise BadConfig("--simulate compares with what is simulated; --reference is for one scenario alone")
        _both_ways(words[:count], words[count:], directories, json)
        return
    if count > 1:
        raise BadConfig(f"one scenario at a time, not {', '.join(words[:count])}; --simulate takes several")
    from everstep.lab.injector import Injector
    from everstep.lab.verdict import NOT_COMPARED, compare, judge

    inject, scenario = load_inject(words[0])
    places = [directory.absolute() for directory in directories]
    started = [word.replace("{dir}", str(places[0])) for word in words[count:]]
    played = Injector(started, inject, scenario, places, to_stderr=json).play()
    compared = NOT_COMPARED
    if reference is not None and played.code is not None:
        compared = compare(places[0], reference)
    verdict = judge(played, compared)
    if json:
        print_json(verdict)
    else:
        _tell(verdict)
    if played.is_interrupted:
        raise typer.Exit(INTERRUPTED)
    if verdict.exact is False:
        raise typer.Exit(_DIFFERS)
    raise typer.Exit(0 if verdict.is_well and (reference is None or verdict.exact) else 1)


def _tell(verdict: Verdict) -> None:
    if verdict.fates:
        columns = ["after", "step", "what was done", "steps lost", "next step after", "went on by"]
        print_table(columns, [_row(one) for one in verdict.fates])
    for line in verdict.not_made:
        print(f"not done: {line}")
    print(
        f"the command {verdict.command} after {human_seconds(verdict.seconds)}, at step {verdict.steps}; "
        f"steps lost: {verdict.steps_lost}"
    )
    print(verdict.compared)


def _row(fate: Fate) -> list[str]:
    step = "none yet" if fate.step is None else str(fate.step)
    following = "never" if fate.next_step_s is None else f"{fate.next_step_s:.2f} s"
    return [f"{fate.after_s:.1f} s", step, fate.what, str(fate.steps_lost), following, fate.went_on]


def _both_ways(names: list[str], command: list[str], directories: list[Path], json: bool) -> None:
    from everstep.lab.agreement import agree, calibrate, planned

    if len(directories) != 1 or not any("{dir}" in word for word in command):
        raise BadConfig("--simulate needs one --dir, for a run of each scenario in it, and {dir} in the command")
    folder = directories[0].absolute()
    scenarios = planned(names, folder)
    calibration, found, is_interrupted = None, list["Agreement"](), False
    try:
        calibration = calibrate(command, folder)
        for one in agree(scenarios, command, calibration):
            found.append(one)  # one by one: what is there stays when it does not come to the end
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        _tell_both(calibration, found, json)
    raise typer.Exit(INTERRUPTED if is_interrupted else 0 if all(one.agrees for one in found) else 1)


def _tell_both(calibration: Calibration | None, found: list[Agreement], json: bool) -> None:
    if json:
        scenarios = [{**asdict(one), "off": one.off, "agrees": one.agrees} for one in found]
        print_json({"calibration": calibration, "scenarios": scenarios})
        return
    if calibration is None:
        print("not measured: the run that measures the machine did not come to its end")
        return
    disk = calibration.disk_bytes_per_s
    written = "nothing was written" if disk is None else f"the disk took {human_bytes(int(disk))}/s"
    print(
        f"measured: {calibration.steps} steps of {calibration.step_s * 1000:.1f} ms, "
        f"{human_bytes(calibration.state_bytes)} copied in {calibration.copy_s * 1000:.1f} ms, {written}, "
        f"a restart took {calibration.restart_s:.2f} s"
    )
    rows = [
        [one.scenario, f"{one.real_lost}", f"{one.simulated_lost}", f"{one.real_wasted_s:.2f} s",
         f"{one.simulated_wasted_s:.2f} s", f"{one.off:+.0%}", "" if one.agrees else "they do not agree"]
        for one in found
    ]  # fmt: skip
    print_table(["scenario", "steps lost", "foretold", "wasted", "foretold", "off by", ""], rows)
