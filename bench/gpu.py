"""Everstep and its peers on one CUDA device.

    python bench/gpu.py frequency [--only resnet18,gpt2] [--method NAME]   how often, and what every step costs
    python bench/gpu.py recovery [--only gpt2]                             from SIGKILL to the first new step
    python bench/gpu.py exact [--only gpt2]                                kill -9, resume, compare bits
    python bench/gpu.py utilisation [--only gpt2] [--method NAME]          how busy the device is with each method
    python bench/gpu.py paced                                              captures beside an all-reduce
    python bench/gpu.py all                                                each of them, in at most 25 minutes

Blocks of steps with and without captures take turns on one model in one process, so every ratio comes from one run.
Random weights and inputs; nothing is downloaded. What a call finds of a model takes the place of what an earlier one
has left in --out; other models, and methods that are not run, stay. It is saved as it is found. --tables measures
nothing: the tables of what is in --out are written again, by the program as it is now.
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
from gpu_all import bench_all
from gpu_exact import EXACT, bench_exact, exact_child, exact_report
from gpu_frequency import METHODS, bench_frequency, frequency_report
from gpu_merge import Entry, add_origins, earlier, has_failed, merge
from gpu_models import CASES
from gpu_paced import bench_paced, paced_report
from gpu_recovery import MODELS, bench_recovery, recovery_report
from gpu_utilisation import bench_utilisation, draw_utilisation, utilisation_report

HERE = Path(__file__).parent
STAND_INS = HERE.parent / "build" / "gpu-stand-ins"  # numbers of a CPU are nobody's results


@dataclass
class Part:
    """One table or some, over models. `bench` gives the entry of a model as often as it has grown."""

    names: tuple[str, ...]
    bench: Callable[[list[str], Path, argparse.Namespace], Iterator[tuple[str, Entry]]]
    report: Callable[[Report, dict[str, Entry]], None]
    others: tuple[str, ...] = ()  # models that it takes only if they are named
    draw: Callable[[dict[str, Entry], Path], None] | None = None


def _methods(given: argparse.Namespace) -> list[str]:
    methods = [name for name in METHODS if name.startswith(tuple(given.method.split(";")))]
    if not methods:
        raise SystemExit(f"no method begins with {given.method!r}; there are {'; '.join(METHODS)}")
    return methods


def _frequency(names: list[str], scratch: Path, given: argparse.Namespace) -> Iterator[tuple[str, Entry]]:
    return bench_frequency(names, _methods(given), scratch, longest_s=given.longest, deadline=given.deadline)


def _utilisation(names: list[str], scratch: Path, given: argparse.Namespace) -> Iterator[tuple[str, Entry]]:
    return bench_utilisation(names, _methods(given), scratch, deadline=given.deadline)


PARTS = {
    "frequency": Part(CASES, _frequency, frequency_report),
    "recovery": Part(
        MODELS, lambda names, scratch, given: bench_recovery(names, scratch, given.deadline), recovery_report
    ),
    "utilisation": Part(
        ("gpt2",), _utilisation, utilisation_report,
        others=tuple(name for name in CASES if name != "gpt2"), draw=draw_utilisation,
    ),
    "paced": Part(
        ("gpt2",), lambda names, scratch, given: bench_paced(names, scratch, given.deadline), paced_report
    ),
    "exact": Part(EXACT, lambda names, scratch, given: bench_exact(names, scratch), exact_report),
}  # fmt: skip


def run_part(name: str, given: argparse.Namespace) -> bool:
    """Whether no model failed. The report is saved whenever a model has more to say."""
    part = PARTS[name]
    known = (*part.names, *part.others)
    chosen = [model for model in known if model in given.only.split(",")] if given.only else list(part.names)
    if not chosen:
        raise SystemExit(f"{name} has no model among {given.only}; it has {', '.join(known)}")
    words = [f"--{option} {value!r}" for option in ("only", "method") if (value := getattr(given, option))]
    command = " ".join(["python bench/gpu.py", name, *words])
    here = machine()
    where = {key: value for key, value in here.items() if key in ("gpu", "cpu", "torch")}
    made = {"command": command, "date": here["date"], "where": "; ".join(where.values())}
    old = earlier(given.out, name)
    models, failed = dict(old), set()
    with tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=given.scratch, ignore_cleanup_errors=True) as folder:
        for model, entry in part.bench(chosen, Path(folder), given):
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
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--only", default="", help=f"some of {', '.join(CASES)}")
    parser.add_argument(
        "--method", default="", help="frequency, utilisation: how names of methods begin, with ; between"
    )
    parser.add_argument("--longest", type=float, default=6.0, help="frequency: seconds of training between two saves")
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds after which no new measurement begins")
    parser.add_argument("--out", type=Path, default=None, help="where tables are, and where those of earlier calls lie")
    parser.add_argument("--scratch", type=Path, default=None, help="a directory on the disk to write to")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: stand-ins for the models")
    parser.add_argument("--tables", action="store_true", help="measure nothing: write the tables in --out again")
    parser.add_argument("--exact-child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device == "cuda" and not given.tables and not torch.cuda.is_available():
        raise SystemExit("bench/gpu.py needs a CUDA device, and torch sees none here. The CPU side is bench/cpu.py.")
    gpu_models.DEVICE = given.device
    if given.device == "cpu":
        torch.set_num_threads(1)
    given.out = given.out or (HERE / "results" if given.device == "cuda" else STAND_INS)
    given.deadline = time.monotonic() + given.budget
    if given.tables:
        for name in PARTS if given.part == "all" else [given.part]:
            write_again(name, given.out)
    elif given.exact_child:
        exact_child(given.exact_child, given.scratch, given.kill)
    elif given.part == "all":
        sys.exit(0 if bench_all(list(PARTS), given) else 1)
    else:
        sys.exit(0 if run_part(given.part, given) else 1)


if __name__ == "__main__":
    main()
