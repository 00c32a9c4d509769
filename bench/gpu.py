"""Everstep and its peers on one CUDA device.

    python bench/gpu.py frequency [--only resnet18,gpt2] [--method NAME]   how often, and what every step costs
    python bench/gpu.py recovery [--only gpt2]                             from SIGKILL to the first new step
    python bench/gpu.py exact [--only gpt2]                                kill -9, resume, compare bits

Blocks of steps with and without captures take turns on one model in one process, so every ratio comes from one run.
Random weights and inputs; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import gpu_models
import torch
from common import Report, machine
from gpu_exact import EXACT, bench_exact, exact_child, exact_report
from gpu_frequency import METHODS, bench_frequency, frequency_report
from gpu_models import CASES
from gpu_recovery import MODELS, bench_recovery, recovery_report

HERE = Path(__file__).parent
PARTS = {"frequency": CASES, "recovery": MODELS, "exact": EXACT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--only", default="", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--method", default="", help="frequency: some of the methods, with ; between")
    parser.add_argument("--pairs", type=int, default=3, help="frequency: blocks with and without, of each method")
    parser.add_argument("--longest", type=float, default=35.0, help="frequency: seconds of training between two saves")
    parser.add_argument("--budget", type=float, default=900.0, help="seconds after which no new measurement begins")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--scratch", type=Path, default=None, help="a directory on the disk to write to")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: stand-ins for the models")
    parser.add_argument("--exact-child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench/gpu.py needs a CUDA device, and torch sees none here. The CPU side is bench/cpu.py.")
    gpu_models.DEVICE = given.device
    if given.exact_child:
        exact_child(given.exact_child, given.scratch, given.kill)
        return
    chosen = [name for name in PARTS[given.part] if not given.only or name in given.only.split(",")]
    words = [f"--{name} {value!r}" for name in ("only", "method") if (value := getattr(given, name))]
    command = " ".join(["python bench/gpu.py", given.part, *words])
    report = Report(title="Everstep on one GPU", command=command, machine=machine())
    with tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=given.scratch, ignore_cleanup_errors=True) as folder:
        if given.part == "exact":
            report.data = bench_exact(chosen, Path(folder))
            exact_report(report, report.data)
        elif given.part == "recovery":
            report.data = bench_recovery(chosen, Path(folder), given.budget)
            recovery_report(report, report.data)
        else:
            methods = [name for name in METHODS if not given.method or name in given.method.split(";")]
            report.data = bench_frequency(
                chosen, methods, Path(folder), pairs=given.pairs, longest_s=given.longest, budget_s=given.budget
            )
            frequency_report(report, report.data)
    report.save(given.out, f"gpu-{given.part}")
    print(report.markdown())


if __name__ == "__main__":
    main()
