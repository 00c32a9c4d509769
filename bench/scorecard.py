"""What becomes of a checkpoint when something goes wrong: each peer goes through it, none is taken at its word.

    python bench/scorecard.py [--python PYTHON] [--only torch.save,Orbax] [--out DIR] [--scratch DIR]

--python: of an environment in which the peers are installed beside Everstep. A peer that is not there says so in its
row. Every cell comes from running it (bench/scorecard_peers.py): 64 MB in 16 tensors, on one machine. So does whether a
training goes on as if nothing had happened (bench/scorecard_resume.py), and what torchft's commit costs a step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import Report, Stat, Table, machine, timed
from live import Jobs, over, steady
from live_loop import Shape
from peers import end_keeper
from scorecard_peers import PACKAGES, PEERS

import everstep

HERE = Path(__file__).parent
KILLS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85)  # of the time that a save takes
SAVES = 6  # in one process, of which the first is not counted
MODEL = Shape(width=1024, depth=3)  # 12 MiB of parameters, for commits
ROUNDS = 5

NOTE = f"""\
64 MB, one process on a CPU; a peer that does not work here says so in its own words. NVRx: nvidia-resiliency-ext.

- Call: until the loop goes on. Written: until the peer says that it is. Medians and ranges of {SAVES - 1} saves
  after a first one in the same process. Everstep is asked to wait until the step is whole in memory, and its call
  has the optimizer's step in it; a loop would go on without waiting.
- Flipped: one bit in the largest file, in three places, then loaded.
- Killed in a save: one checkpoint is whole, the next is killed at {len(KILLS)} moments of its save (parts of the
  median time; a save that was quicker is killed at its end), and what a user would load then is loaded. torch.save,
  safetensors, DCP and torchsnapshot got one name for all, as in most of their examples: whoever gives each step a name
  of its own keeps the old one. Everstep's keeper goes on when the process is dead; it is killed and its memory wiped a
  moment later, but not where it was killed when the call returned.
- Synced: what the process asked of the system (fsync, fdatasync, syncfs) for files of 1 MB or more, and for their
  folder or the one above. Without it, a file that is whole after a kill may not be after a loss of power.
- Exact resume: dropout, Adam, a scheduler, shuffled data; saved at step 10, in the middle of an epoch, ended,
  loaded by a new process, at step 20 compared with an undisturbed run of the same loop. The peers were handed the
  state dicts of model, optimizer and scheduler, and the step. They keep what they are given: this says what a loop
  as in their examples leaves out, not that they lose bits. Then once more with torch's random state (now, and at
  the epoch's beginning) and the number of batches taken, which the loop itself saves and goes back to. Everstep was
  handed the objects.

DeepSpeed: without ZeRO; its all-reduce for CPUs, which it would compile first, was left out. Safetensors
keeps tensors by name, and Orbax arrays: what else a training has went into the header, and into Orbax's JSON."""

# Says which files are synced: what a process asks of the system, whatever it is made of.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static void say(int fd) {
    char link[64], path[4096]; const char *out = getenv("SYNCED");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0 || !out) return;
    path[n] = '\n';
    int to = open(out, O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (to >= 0) { if (write(to, path, n + 1) < 0) {} close(to); }
}
int fsync(int fd) { say(fd); return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd); }
int fdatasync(int fd) { say(fd); return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd); }
int syncfs(int fd) { say(fd); return ((int (*)(int))dlsym(RTLD_NEXT, "syncfs"))(fd); }
"""


@dataclass
class Card:
    """What was seen of one peer."""

    error: str = ""
    call_s: list[float] = field(default_factory=list)  # until the loop goes on
    done_s: list[float] = field(default_factory=list)  # until it says that it is written
    flips: dict[str, int] = field(default_factory=dict)
    cut: str = ""
    kills: dict[str, int] = field(default_factory=dict)
    at_return: str = ""
    files_synced: str = ""
    folder_synced: str = ""
    pickles: list[str] = field(default_factory=list)
    resumed: str = ""
    resumed_by_hand: str = ""


class Trial:
    def __init__(self, peer: str, python: str, root: Path, shim: Path) -> None:
        self._peer, self._python, self._root, self._shim = peer, python, root, shim
        self._folders = 0
        self._undisturbed = ""

    def folder(self) -> Path:
        self._folders += 1
        made = self._root / f"{self._folders}"
        made.mkdir()
        return made

    def ask(self, what: str, folder: Path, *words: str, synced: Path | None = None) -> list[str]:
        """What it said of its saves and of what it found."""
        noted = {"LD_PRELOAD": str(self._shim), "SYNCED": str(synced)} if synced is not None else {}
        return self._run("scorecard_peers.py", self._peer, what, str(folder), *words, more=noted)

    def _run(self, program: str, *words: str, more: dict[str, str] | None = None) -> list[str]:
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "src"), **(more or {})}
        ended = subprocess.run(
            [self._python, str(HERE / program), *words], capture_output=True, text=True, env=environment, timeout=180,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        said = [line for line in ended.stdout.splitlines() if re.match(r"saved|step|mixed|refused|trained", line)]
        if ended.returncode == -signal.SIGKILL:
            return [*said, "killed"]
        return said or [f"refused {_last_line(ended.stderr)}"]

    def saved(self, *words: str) -> Path:
        """A folder with whole checkpoints, and nothing of them in memory."""
        folder = self.folder()
        said = self.ask("save", folder, *words)
        if not said[-1].startswith("saved"):
            raise RuntimeError(said[-1])
        _forget(folder)
        return folder

    def loaded(self, folder: Path) -> str:
        return self.ask("load", folder)[-1]

    def resumed(self, *, by_hand: bool) -> str:
        """What is not as it is without a disturbance, or "yes"."""
        folder, words = self.folder(), ["--by-hand"] * by_hand
        self._undisturbed = self._undisturbed or self._lived(self.folder(), "undisturbed")
        lives = [self._lived(folder, "begin", *words), self._lived(folder, "resume", *words), self._undisturbed]
        wrong = [life for life in lives if not life.startswith(("saved", "trained"))]
        if wrong:
            return wrong[0].removeprefix("refused ")
        resumed, undisturbed = (json.loads(life.removeprefix("trained ")) for life in lives[1:])
        differs = [part for part in undisturbed if resumed[part] != undisturbed[part]]
        return f"differ: {', '.join(differs)}" if differs else "yes"

    def _lived(self, folder: Path, *words: str) -> str:
        said = self._run("scorecard_resume.py", self._peer, str(folder), *words)[-1]
        _forget(folder)
        return said


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:150] if lines else "it said nothing"


def _forget(folder: Path) -> None:
    """As after a reboot: only what is in files is left."""
    if (folder / "run" / "run.json").exists():
        end_keeper(everstep.open(folder / "run").run)


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def examine(trial: Trial) -> Card:
    card = Card()
    try:
        whole = trial.saved("1")
    except RuntimeError as error:
        return Card(error=str(error).removeprefix("refused "))
    if (said := trial.loaded(whole)) != "step 1":
        return Card(error=f"what was saved does not come back: {said}")
    _seconds(trial, card)
    _damage(trial, whole, card)
    _killed(trial, card)
    _synced(trial, card)
    card.pickles = sorted({path.suffix or path.name for path in whole.rglob("*") if path.is_file() and is_pickle(path)})
    card.resumed = trial.resumed(by_hand=False)
    card.resumed_by_hand = "nothing to add" if card.resumed == "yes" else trial.resumed(by_hand=True)
    return card


def _seconds(trial: Trial, card: Card) -> None:
    folder = trial.folder()
    for line in trial.ask("save", folder, *map(str, range(1, SAVES + 1)))[1:]:
        _, call, done = line.split()
        card.call_s.append(float(call))
        card.done_s.append(float(done))
    _forget(folder)
    shutil.rmtree(folder)


def _damage(trial: Trial, whole: Path, card: Card) -> None:
    flips = []
    path = largest(whole)
    data = path.read_bytes()
    for part in (0.31, 0.52, 0.73):
        at = int(len(data) * part)
        path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        flips.append(_verdict(trial.loaded(whole)))
    card.flips = dict(Counter(flips))
    path.write_bytes(data[: len(data) // 2])
    card.cut = _verdict(trial.loaded(whole))
    path.write_bytes(data)


def _killed(trial: Trial, card: Card) -> None:
    outcomes = []
    took = statistics.median(card.done_s)
    for part in KILLS:
        folder = trial.folder()
        trial.ask("save", folder, "1", "2", "--die-after", f"{part * took:.4f}")
        _forget(folder)
        outcomes.append(_after(trial.loaded(folder)))
        shutil.rmtree(folder)
    card.kills = dict(Counter(outcomes))
    folder = trial.folder()
    trial.ask("save", folder, "1", "2", "--die-at-return")
    card.at_return = _after(trial.loaded(folder))  # memory is still there: only the process died
    _forget(folder)


def _synced(trial: Trial, card: Card) -> None:
    folder, noted = trial.folder(), trial.folder() / "synced"
    trial.ask("save", folder, "1", synced=noted)
    _forget(folder)
    names = set(noted.read_text().splitlines()) if noted.exists() else set()
    synced_names = {Path(name).name for name in names}  # a file may have been renamed since: `x` was `x.tmp`
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size >= 1 << 20]
    synced = [path for path in files if any(path.name in name for name in synced_names)]
    folders = {str(path.parent) for path in files}
    card.files_synced = "yes" if len(synced) == len(files) else f"{len(synced)} of {len(files)}" if synced else "no"
    card.folder_synced = "yes" if folders <= names or any(str(Path(f).parent) in names for f in folders) else "no"


def is_pickle(path: Path) -> bool:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    with path.open("rb") as file:
        head = file.read(2)
        file.seek(max(0, path.stat().st_size - 1))
        return len(head) == 2 and head[0] == 0x80 and 2 <= head[1] <= 5 and file.read(1) == b"."


def _verdict(said: str) -> str:
    return {"step 1": "right all the same", "mixed": "loads it"}.get(said, "noticed")


def _after(said: str) -> str:
    return {"step 1": "the old one", "step 2": "the new one", "mixed": "neither: mixed"}.get(said, "nothing loads")


def report_on(report: Report, cards: dict[str, Card]) -> None:
    report.data = {name: asdict(card) for name, card in cards.items()}
    table = Table(
        "Scorecard",
        [
            "peer", "call ms", "written ms", "a flipped bit (3)", "a file cut in half",
            f"killed in a save ({len(KILLS)})", "killed when the call returned", "files synced", "folder synced",
            "pickle in", "exact resume", "with random state and place in the data by hand",
        ],
        note=NOTE,
    )  # fmt: skip
    for name, card in cards.items():
        if card.error:
            table.rows.append([name, card.error, *["-"] * 10])
            continue
        table.rows.append([
            name, Stat(card.call_s).text(1e3), Stat(card.done_s).text(1e3), _counts(card.flips), card.cut,
            _counts(card.kills), card.at_return, card.files_synced, card.folder_synced,
            ", ".join(card.pickles) or "none", card.resumed, card.resumed_by_hand,
        ])  # fmt: skip
    report.tables.append(table)


def commits(report: Report, python: str) -> None:
    """What it costs that every step is agreed upon, or captured."""
    table = Table("Per-step commit", ["replicas", "way", "step, ms", "over plain", "processor time, ms", "over plain"])
    report.tables.append(table)
    found = subprocess.run([python, "-c", "import torchft"], capture_output=True, text=True)
    ways = ["plain", "guard", *([] if found.returncode else ["torchft"])]
    jobs, asked = Jobs(python, None, python=python, shape=MODEL), Stat()
    for count in (1, 2):
        steps, processor = {way: Stat() for way in ways}, {way: Stat() for way in ways}
        for number in range(ROUNDS):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                job = steady(jobs, count, way, steps=40)
                steps[way].values.append(job.step_s)
                processor[way].values.append(job.processor_s)
                asked.values += job.commits_s
        for way in ways:
            cells = [[of[way].text(1e3), over(of[way], of["plain"]).text(100) + " %"] for of in (steps, processor)]
            table.rows.append([str(count), way, *cells[0], *cells[1]])
            print(*table.rows[-1], sep=" | ", flush=True)
    quarters = [f"{value * 1e3:.2f}" for value in statistics.quantiles(asked.values)] if asked.values else []
    table.note = (
        "DDP over gloo on loopback, 12 MiB of parameters, AdamW, one thread each. plain: neither; guard: every step is "
        "captured; torchft: every step is agreed upon by way of a lighthouse and a manager for each replica; nothing "
        f"is saved. Jobs take turns, {ROUNDS} of each; the median step of each, with its range over jobs, and the "
        "processor time of a step by all ranks. "
    ) + (
        f"torchft's should_commit alone takes {quarters[1]} ms (middle half {quarters[0]} to {quarters[2]})."
        if quarters
        else f"torchft: {_last_line(found.stderr)}"
    )


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(found.items()))


def versions(python: str) -> dict[str, str]:
    """Of the peers, where they are installed."""
    program = (
        "import importlib.metadata as m, json, sys\n"
        "found = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "print(json.dumps({name: found.get(name, 'not there') for name in sys.argv[1:]}))"
    )
    said = subprocess.run([python, "-c", program, *PACKAGES], capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = json.loads(said)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", default="", help=f"some of {', '.join(PEERS)}")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--scratch", type=Path, default=None)
    given = parser.parse_args()
    chosen = [name for name in PEERS if not given.only or name in given.only.split(",")]
    report = Report("What becomes of a checkpoint", "python bench/scorecard.py --python PYTHON", machine())
    report.machine |= versions(given.python)
    cards: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=given.scratch, ignore_cleanup_errors=True) as folder:
        shim = Path(folder) / "shim.so"
        (Path(folder) / "shim.c").write_text(SHIM)
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-o", str(shim), str(Path(folder) / "shim.c"), "-ldl"], check=True
        )  # fmt: skip
        for name in chosen:
            root = Path(folder) / re.sub(r"\W", "-", name)
            root.mkdir()
            with timed() as timer:
                cards[name] = examine(Trial(name, given.python, root, shim))
            print(f"{name:24} {timer.seconds:5.0f} s  {cards[name]}", flush=True)
            shutil.rmtree(root)
    report_on(report, cards)
    if not given.only:
        commits(report, given.python)
    report.save(given.out, "scorecard")
    print(report.markdown())


if __name__ == "__main__":
    main()
