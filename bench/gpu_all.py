"""All parts of bench/gpu.py, each in a process of its own: a device that one has broken is whole for the next.

The order is that of their length; `frequency` comes last and has whatever time is left.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from common import Report, Table, machine

LIMITS_S = {"exact": 120.0, "paced": 240.0, "utilisation": 180.0, "recovery": 420.0}
START_S = 30.0  # for a process to begin, and for the last of its measurements to end


def bench_all(parts: list[str], given: argparse.Namespace) -> bool:
    """Whether all went well. What a part has found is saved by itself; this writes down how each ended."""
    table = Table("All parts", ["part", "seconds", "ended"])
    report = Report("Everstep on one GPU: all parts", "python bench/gpu.py all", machine(), [table])
    for part in sorted(parts, key=lambda part: LIMITS_S.get(part, float("inf"))):
        left_s = given.deadline - time.monotonic()
        limit_s = min(LIMITS_S.get(part, left_s), left_s)
        began = time.monotonic()
        outcome = _ended(part, limit_s, given) if limit_s > START_S else "no time was left"
        table.rows.append([part, f"{time.monotonic() - began:.0f}", outcome])
        print(f"-- {part}: {outcome}", flush=True)
        report.save(given.out, "gpu-all")
    print(report.markdown())
    return all(row[2] == "well" for row in table.rows)


def _ended(part: str, limit_s: float, given: argparse.Namespace) -> str:
    words = [part, "--budget", str(limit_s - START_S), "--out", str(given.out), "--device", given.device]
    words += ["--longest", str(given.longest), "--only", given.only]
    words += ["--scratch", str(given.scratch)] if given.scratch is not None else []
    print(f"-- python bench/gpu.py {' '.join(words)}", flush=True)
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("gpu.py")), *words], start_new_session=True
    )  # fmt: skip
    try:
        code = process.wait(timeout=limit_s + 2 * START_S)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return f"was ended after {limit_s + 2 * START_S:.0f} s; what it had found is saved"
    return "well" if code == 0 else f"with exit code {code}: see the table of what failed, or its traceback"
