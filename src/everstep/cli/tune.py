"""`everstep tune`: what a run has decided, or what every rule would decide on a machine: formula, inputs, result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from everstep.archive import open
from everstep.cadence import byte_count, seconds
from everstep.cli.output import Json, MemoryPath, ago, human_seconds, print_json, print_table
from everstep.errors import BadConfig
from everstep.events import NO_LOG, Chose, Degraded, Tuned, read_events
from everstep.tune.machine import Advice, Machine, advise, read_machine


def command(
    directory: Annotated[Path | None, typer.Argument(help="The run's directory: the dir= of guard().")] = None,
    machine: Annotated[
        Path | None, typer.Option("--machine", help="Offline: a JSON file with a machine's rates.")
    ] = None,
    state: Annotated[str | None, typer.Option("--state", help="Offline: the whole state, such as 1.5GB.")] = None,
    step: Annotated[str | None, typer.Option("--step", help="Offline: the time of a step, such as 110ms.")] = None,
    mtbf: Annotated[str | None, typer.Option("--mtbf", help="Offline: mean time between failures; else 6h.")] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Offline: nodes that share the state.")] = 1,
    budget: Annotated[float, typer.Option("--budget", help="Offline: overhead_budget of guard().")] = 0.03,
    json: Json = False,
    memory: MemoryPath = None,
) -> None:
    """Show how often bases and flushes happen and which strategy runs, each with its formula and its inputs.

    Offline, without a directory: what the published rules and ours give for a state, a step and a machine.
    """
    if directory is not None:
        if machine or state or step or mtbf:
            raise BadConfig("--machine, --state, --step and --mtbf are for tuning offline: leave the directory out")
        _decided(directory, json, memory)
        return
    if state is None or step is None:
        raise BadConfig("tune takes a run's directory, or --state and --step (with --machine and --mtbf if known)")
    if not 0 < budget < 1:
        raise BadConfig(f"--budget must be a share between 0 and 1, not {budget}")
    known = _read(machine) if machine is not None else Machine(assumed=tuple(_rates()))
    mtbf_s = None if mtbf is None else seconds(mtbf, name="--mtbf")
    found = advise(known, state=byte_count(state, name="--state"), step_s=seconds(step, name="--step"),
                   mtbf_s=mtbf_s, budget=budget, nodes=nodes)  # fmt: skip
    if json:
        print_json({"machine": known, "advice": found})
        return
    _show(known, found)


def _rates() -> list[str]:
    return [name for name in Machine.__dataclass_fields__ if name != "assumed"]


def _read(path: Path) -> Machine:
    try:
        values = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise BadConfig(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise BadConfig(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadConfig(f'{path} must be a table such as {{"disk": "2GB/s"}}, not {values!r}')
    return read_machine(values, file=str(path))


def _show(machine: Machine, found: list[Advice]) -> None:
    rows = [
        [one.tuning.what, str(one.tuning.value), human_seconds(one.seconds), _share(one.waste), one.tuning.formula,
         one.tuning.bound, _inputs(dict(one.tuning.inputs), one.tuning.assumed)]
        for one in found
    ]  # fmt: skip
    print_table(["what", "result", "which is", "waste", "formula", "decided by", "inputs"], rows)
    if machine.assumed:
        given = {name: getattr(machine, name) for name in machine.assumed}
        print(f"assumed, because no --machine file says it: {_inputs(given)}")


def _share(waste: float | None) -> str:
    return "" if waste is None else f"{waste:.2%}"


def _decided(directory: Path, json: bool, memory: str | None) -> None:
    events = read_events(open(directory, memory=memory).directory)
    tuned = {event.what: event for event in events if isinstance(event, Tuned)}  # the newest of each
    chosen = next((event for event in reversed(events) if isinstance(event, Chose)), None)
    refused = next((e for e in reversed(events) if isinstance(e, Degraded) and e.what == NO_LOG), None)
    if json:
        print_json({"strategy": chosen, "decisions": list(tuned.values()), "no_log": refused})
        return
    if refused is not None:
        print(f"{refused.what} ({ago(refused.time)}): {refused.reason}")
    elif chosen is None and not tuned:
        print("nothing was decided yet: the first steps are measured, or the run was told what to do")
        return
    if chosen is not None:
        print(f"strategy {chosen.strategy} since step {chosen.step} ({ago(chosen.time)}): {chosen.reason}")
        print(f"  {_inputs(chosen.inputs)}")
    rows = [
        [e.what, str(e.value), e.formula, e.bound, _inputs(e.inputs, e.assumed), ago(e.time)] for e in tuned.values()
    ]
    if rows:
        print_table(["what", "result", "formula", "decided by", "inputs", "when"], rows)


def _inputs(inputs: dict[str, Any], assumed: tuple[str, ...] = ()) -> str:
    return ", ".join(f"{name}={value:.4g}{' (assumed)' if name in assumed else ''}" for name, value in inputs.items())
