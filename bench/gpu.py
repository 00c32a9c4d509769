"""Everstep and its peers on one CUDA device.

    python bench/gpu.py frequency [--only resnet18,gpt2] [--method NAME]   how often, what a step costs, how busy it is
    python bench/gpu.py recovery [--only gpt2]                             from SIGKILL to the first new step
    python bench/gpu.py exact [--only gpt2]                                kill -9, resume, compare bits
    python bench/gpu.py paced                                              captures beside an all-reduce
    python bench/gpu.py scaling                                            what bytes and tensors cost
    python bench/gpu.py all (or --all)                                     each of them, in at most 25 minutes
    python bench/gpu.py all --since 2026-11-18                             what was not found well since then

Blocks of steps with and without captures take turns on one model in one process, so every ratio comes from one run.
Random weights and inputs; nothing is downloaded. What a call finds of a model takes the place of what an earlier one
has left in --out; other models, and methods that are not run, stay. It is saved as it is found. --tables measures
nothing: the tables of what is in --out are written again, by the program as it is now. Several parts may be named.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gpu_models
import torch
from common import Report, machine
from gpu_all import bench_all, write_all_again
from gpu_exact import EXACT, bench_exact, exact_child, exact_report
from gpu_frequency import LONGEST_S, MODELS_S, bench_frequency, frequency_report
from gpu_merge import Entry, add_origins, earlier, has_failed, is_there, merge
from gpu_models import CASES
from gpu_paced import bench_paced, paced_report
from gpu_recovery import MODELS, bench_recovery, recovery_report
from gpu_scaling import STATES, bench_scaling, scaling_report
from gpu_utilisation import draw_busy
from gpu_ways import METHODS

HERE = Path(__file__).parent
STAND_INS = HERE.parent / "build" / "gpu-stand-ins"  # numbers of a CPU are nobody's results


Plan = dict[str, list[str]]  # models, and the methods of each if the part has any


@dataclass
class Part:
    """One table or some, over models. `bench` gives the entry of a model as often as it has grown."""

    names: tuple[str, ...]
    bench: Callable[[Plan, Path, argparse.Namespace], Iterator[tuple[str, Entry]]]
    report: Callable[[Report, dict[str, Entry]], None]
    has_methods: bool = False
    draw: Callable[[dict[str, Entry], Path], None] | None = None


def _methods(given: argparse.Namespace) -> list[str]:
    methods = [name for name in METHODS if name.startswith(tuple(given.method.split(";")))]
    if not methods:
        raise SystemExit(f"no method begins with {given.method!r}; there are {'; '.join(METHODS)}")
    return methods


def _frequency(plan: Plan, scratch: Path, given: argparse.Namespace) -> Iterator[tuple[str, Entry]]:
    return bench_frequency(
        plan, scratch, longest_s=given.longest, deadline=given.deadline, spares=not given.method
    )  # fmt: skip


PARTS = {
    "frequency": Part(tuple(MODELS_S), _frequency, frequency_report, has_methods=True, draw=draw_busy),
    "scaling": Part(
        tuple(STATES), lambda plan, scratch, given: bench_scaling(list(plan), scratch, given.deadline), scaling_report
    ),
    "recovery": Part(
        MODELS, lambda plan, scratch, given: bench_recovery(list(plan), scratch, given.deadline, given.method),
        recovery_report,
    ),
    "paced": Part(
        ("gpt2",), lambda plan, scratch, given: bench_paced(list(plan), scratch, given.deadline), paced_report
    ),
    "exact": Part(EXACT, lambda plan, scratch, given: bench_exact(list(plan), scratch), exact_report),
}  # fmt: skip


def missing(name: str, given: argparse.Namespace) -> Plan:
    """What is to be measured: all that the part has of what was asked for, less what is there since a given date."""
    part = PARTS[name]
    chosen = [model for model in part.names if model in given.only.split(",")] if given.only else list(part.names)
    methods = _methods(given) if part.has_methods else [""]
    old = earlier(given.out, name)
    plan = {m: [one for one in methods if not is_there(old.get(m, {}), given.since, one)] for m in chosen}
    return {model: left for model, left in plan.items() if left}


def run_part(name: str, given: argparse.Namespace) -> bool:
    """Whether no model failed. The report is saved whenever a model has more to say."""
    part, plan = PARTS[name], missing(name, given)
    if not plan and not given.since:
        raise SystemExit(f"{name} has no model among {given.only}; it has {', '.join(part.names)}")
    if not plan:
        print(f"{name}: all of it was found well since {given.since}")
        return True
    words = [f"--{option} {value!r}" for option in ("only", "method") if (value := getattr(given, option))]
    words += [f"--longest {given.longest:g}"] if part.has_methods and given.longest != LONGEST_S else []
    command = " ".join(["python bench/gpu.py", name, *words])
    here = machine()
    where = {key: value for key, value in here.items() if key in ("gpu", "cpu", "torch")}
    made = {"command": command, "date": here["date"], "where": "; ".join(where.values())}
    old = earlier(given.out, name)
    models, failed = dict(old), set()
    with tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=given.scratch, ignore_cleanup_errors=True) as folder:
        for model, entry in part.bench(plan, Path(folder), given):
            before = models if "error" in entry else old  # what was found until it failed stays
            models[model] = merge(before.get(model, {}), entry, made)
            failed |= {model} if has_failed(entry) else set()
            report = Report("Everstep on one GPU", command, here, data={"models": models})
            save_tables(name, report, given.out)
    print(report.markdown())
    return not failed


def save_tables(name: str, report: Report, out: Path) -> None:
    part, models = PARTS[name], report.data["models"]
    part.report(report, models)
    add_origins(report, models)
    report.save(out, f"gpu-{name}")
    if part.draw is not None:
        part.draw(models, out / f"gpu-{name}.svg")


def write_again(name: str, out: Path) -> None:
    """The tables of what was measured before, as they are made now."""
    path = out / f"gpu-{name}.json"
    if not path.exists():
        print(f"{path} is not there: nothing of {name} was measured")
        return
    old = json.loads(path.read_text())
    save_tables(name, Report(old["title"], old["command"], old["machine"], data=old["data"]), out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="+", choices=[*PARTS, "all"])
    parser.add_argument("--only", default="", help=f"some of {', '.join(CASES)}")
    parser.add_argument(
        "--method", default="", help="how names of methods begin, or of recovery: of ways, with ; between"
    )
    parser.add_argument(
        "--longest", type=float, default=LONGEST_S, help="frequency: seconds of training between two saves"
    )
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds after which no new measurement begins")
    parser.add_argument("--since", default="", help="a date as in the tables, or a day: what is there since then stays")
    parser.add_argument("--out", type=Path, default=None, help="where tables are, and where those of earlier calls lie")
    parser.add_argument("--scratch", type=Path, default=None, help="a directory on the disk to write to")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: stand-ins for the models")
    parser.add_argument("--tables", action="store_true", help="measure nothing: write the tables in --out again")
    parser.add_argument("--exact-child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(["all" if word == "--all" else word for word in sys.argv[1:]])
    if given.device == "cuda" and not given.tables and not torch.cuda.is_available():
        raise SystemExit("bench/gpu.py needs a CUDA device, and torch sees none here. The CPU side is bench/cpu.py.")
    gpu_models.DEVICE = given.device
    if given.device == "cpu":
        torch.set_num_threads(1)
    given.out = given.out or (HERE / "results" if given.device == "cuda" else STAND_INS)
    given.deadline = time.monotonic() + given.budget
    parts = [name for name in PARTS if name in given.part or "all" in given.part]
    if given.tables:
        for name in parts:
            write_again(name, given.out)
        write_all_again(given.out)
    elif given.exact_child:
        exact_child(given.exact_child, given.scratch, given.kill)
    elif "all" in given.part or len(parts) > 1:
        sys.exit(0 if bench_all(parts, given, missing) else 1)
    else:
        sys.exit(0 if run_part(parts[0], given) else 1)


if __name__ == "__main__":
    main()
