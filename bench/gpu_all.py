"""All parts of bench/gpu.py, each in a process of its own: a device that one has broken is whole for the next.

What takes longest comes first, and last what is of use without its end. Each unit has a time after which it begins
nothing new, and a little later it is ended, with all that it has started.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import Report, Table, Target, machine
from gpu_frequency import GRACE_S, MODELS_S
from gpu_methods import SHM, UNIT
from peers import until_freed

from everstep.capture.host import arena_root

END_S = GRACE_S + 25.0  # that a unit may take longer than its time: for the last of its measurements, and to clean up
LEAST_S = 20.0  # nothing is begun with less
KEEPER = "everstep.keeper.process"
WELL, THERE = "well", "is there already"


@dataclass(frozen=True)
class Unit:
    part: str
    limit_s: float
    only: tuple[str, ...] = ()  # of its models; none: all


UNITS = (
    Unit("frequency", MODELS_S["gpt2-xl"], ("gpt2-xl",)),
    Unit("frequency", 660.0, tuple(name for name in MODELS_S if name != "gpt2-xl")),
    Unit("recovery", 330.0),
    Unit("exact", 60.0),
    Unit("paced", 90.0),
    Unit("scaling", 230.0),
)


def bench_all(
    parts: list[str], given: argparse.Namespace, missing: Callable[[str, argparse.Namespace], dict[str, list[str]]]
) -> bool:
    """Whether all went well. What a part has found is saved by itself; this writes down how each ended."""
    table = Table("All parts", ["part", "models", "seconds", "ended"])
    report = Report("Everstep on one GPU: all parts", f"python bench/gpu.py {' '.join(given.part)}", machine(), [table])
    wanted = set(given.only.split(",")) if given.only else set()
    for unit in (unit for unit in UNITS if unit.part in parts):
        ours = copy.copy(given)
        ours.only = ",".join(name for name in unit.only if not wanted or name in wanted) if unit.only else given.only
        if unit.only and not ours.only:
            continue
        left_s, began = given.deadline - time.monotonic(), time.monotonic()
        if not missing(unit.part, argparse.Namespace(**{**vars(ours), "since": ""})):
            continue  # it has none of the models that were asked for
        models = missing(unit.part, ours)
        if not models:
            outcome = THERE
        elif left_s < LEAST_S:
            outcome = "no time was left"
        else:
            outcome = _ended(unit.part, min(unit.limit_s, left_s), ours)
        table.rows.append([unit.part, ", ".join(models) or "-", f"{time.monotonic() - began:.0f}", outcome])
        print(f"-- {' '.join(table.rows[-1])}; {given.deadline - time.monotonic():.0f} s are left", flush=True)
        report.targets = _targets(given.out)
        report.save(given.out, "gpu-all")
    print(report.markdown(), flush=True)
    return all(row[3] in (WELL, THERE) for row in table.rows)


def _targets(out: Path) -> list[Target]:
    """What was wanted of every part that was ever measured, in one place."""
    found = []
    for part in dict.fromkeys(unit.part for unit in UNITS):
        path = out / f"gpu-{part}.json"
        targets = json.loads(path.read_text())["targets"] if path.exists() else []
        found += [Target(**{**one, "what": f"{part}: {one['what']}"}) for one in targets]
    return found


def write_all_again(out: Path) -> None:
    """The table of how the parts ended, with what was wanted of them as their own tables say it now."""
    path = out / "gpu-all.json"
    if path.exists():
        old = json.loads(path.read_text())
        tables = [Table(**one) for one in old["tables"]]
        Report(old["title"], old["command"], old["machine"], tables, _targets(out)).save(out, "gpu-all")


def _ended(part: str, limit_s: float, given: argparse.Namespace) -> str:
    """How a unit did."""
    token = secrets.token_hex(4)
    scratch = Path(tempfile.mkdtemp(prefix=f"everstep-bench-{token}-", dir=given.scratch))
    words = [part, "--budget", f"{limit_s:.0f}", "--out", str(given.out), "--device", given.device]
    words += ["--longest", str(given.longest), "--scratch", str(scratch)]
    for option in ("only", "method", "since"):
        words += [f"--{option}", getattr(given, option)] if getattr(given, option) else []
    print(f"-- python bench/gpu.py {' '.join(words)}", flush=True)
    process = subprocess.Popen(
        [sys.executable, "-u", str(Path(__file__).with_name("gpu.py")), *words], start_new_session=True,
        env={**os.environ, UNIT: token},
    )  # fmt: skip
    try:
        code = process.wait(timeout=limit_s + END_S)
        return WELL if code == 0 else f"with exit code {code}: see the table of what failed, or its traceback"
    except subprocess.TimeoutExpired:
        return f"was ended after {limit_s + END_S:.0f} s; what it had found is saved"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        end_unit(token)
        shutil.rmtree(scratch, ignore_errors=True)


def end_unit(token: str) -> None:
    """Whatever a unit has left: processes that have its token in their environment, and memory that bears it."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"{UNIT}={token}".encode() not in (place / "environ").read_bytes().split(b"\0"):
                continue
            words = (place / "cmdline").read_text().split("\0")
            os.kill(int(place.name), signal.SIGKILL)
        except OSError:
            continue  # it has ended, or is somebody else's
        until_freed(int(place.name))
        for run in words[words.index(KEEPER) + 1 :][:1] if KEEPER in words else []:
            for root in arena_root(None).parent.glob(f"{arena_root(None).name}*"):  # of every node
                shutil.rmtree(root / run, ignore_errors=True)
    for folder in SHM.glob(f"everstep-bench-{token}-*"):
        shutil.rmtree(folder, ignore_errors=True)
