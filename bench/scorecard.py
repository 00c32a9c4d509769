"""What becomes of a checkpoint when something goes wrong: each peer goes through it, none is taken at its word.

    python bench/scorecard.py [--python PYTHON] [--only torch.save,Orbax] [--out DIR] [--scratch DIR]

--python: of an environment in which the peers are installed beside Everstep. A peer that is not there says so in its
row. Every cell comes from running it (bench/scorecard_peers.py): 64 MB in 16 tensors, on one machine.
"""

from __future__ import annotations

import argparse
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

from common import Report, Table, machine, timed
from scorecard_peers import PEERS

import everstep
from everstep.capture.host import arena_root
from everstep.keeper.client import keeper_pid

HERE = Path(__file__).parent
KILLS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85)  # of the time that a save takes

# Says which files are synced: what a process asks of the system, whatever it is made of.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void say(int fd) {
    char link[64], path[4096]; const char *out = getenv("SYNCED");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0 || !out) return;
    path[n] = '\n';
    int to = (int)syscall(257, AT_FDCWD, out, O_WRONLY | O_APPEND | O_CREAT, 0600);
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


class Trial:
    def __init__(self, peer: str, python: str, root: Path, shim: Path) -> None:
        self._peer, self._python, self._root, self._shim = peer, python, root, shim
        self._folders = 0

    def folder(self) -> Path:
        self._folders += 1
        made = self._root / f"{self._folders}"
        made.mkdir()
        return made

    def ask(self, what: str, folder: Path, *words: str, synced: Path | None = None) -> str:
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "src")}
        if synced is not None:
            environment |= {"LD_PRELOAD": str(self._shim), "SYNCED": str(synced)}
        program = [self._python, str(HERE / "scorecard_peers.py"), self._peer, what, str(folder), *words]
        ended = subprocess.run(
            program, capture_output=True, text=True, env=environment, timeout=180, stdin=subprocess.DEVNULL
        )
        said = [line for line in ended.stdout.splitlines() if re.match(r"saved|step|mixed|refused", line)]
        if ended.returncode == -signal.SIGKILL:
            return "killed"
        return said[-1] if said else f"refused to work: {_last_line(ended.stderr)}"

    def saved(self, step: int = 1) -> Path:
        """A folder with one whole checkpoint, and nothing of it in memory."""
        folder = self.folder()
        said = self.ask("save", folder, str(step))
        if not said.startswith("saved"):
            raise RuntimeError(said)
        _forget(folder)
        return folder

    def loaded(self, folder: Path) -> str:
        return self.ask("load", folder)


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:150] if lines else "it said nothing"


def _forget(folder: Path) -> None:
    """As after a reboot: only what is in files is left."""
    if not (folder / "run" / "run.json").exists():
        return
    run = everstep.open(folder / "run").run
    pid = keeper_pid(run)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(arena_root(None) / run, ignore_errors=True)


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def examine(trial: Trial) -> Card:
    card = Card()
    try:
        whole = trial.saved()
    except RuntimeError as error:
        return Card(error=str(error))
    if (said := trial.loaded(whole)) != "step 1":
        return Card(error=f"what was saved does not come back: {said}")
    _seconds(trial, card)
    _damage(trial, whole, card)
    _killed(trial, card)
    _synced(trial, card)
    card.pickles = sorted({path.suffix or path.name for path in whole.rglob("*") if path.is_file() and is_pickle(path)})
    return card


def _seconds(trial: Trial, card: Card) -> None:
    for _ in range(3):
        folder = trial.folder()
        _, call, done = trial.ask("save", folder, "1").split()
        card.call_s.append(float(call))
        card.done_s.append(float(done))
        _forget(folder)


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
        folder = trial.saved()
        trial.ask("save", folder, "2", "--die-after", f"{part * took:.4f}")
        _forget(folder)
        outcomes.append(_after(trial.loaded(folder)))
    card.kills = dict(Counter(outcomes))
    folder = trial.saved()
    trial.ask("save", folder, "2", "--die-at-return")
    card.at_return = _after(trial.loaded(folder))  # memory is still there: only the process died
    _forget(folder)


def _synced(trial: Trial, card: Card) -> None:
    folder, noted = trial.folder(), trial.folder() / "synced"
    trial.ask("save", folder, "1", synced=noted)
    _forget(folder)
    names = set(noted.read_text().splitlines()) if noted.exists() else set()
    inodes = {Path(name).name for name in names}
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size >= 1 << 20]
    synced = [path for path in files if str(path) in names or any(path.name in inode for inode in inodes)]
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
            "pickle in",
        ],
        note="64 MB, one process on a CPU. Flipped: one bit in the largest file, in three places, then loaded. "
        "Killed in a save: one checkpoint is whole, the next is killed at six moments of its save, and what a user "
        "would load then is loaded. Synced: what the process asked of the system (fsync, fdatasync, syncfs) for files "
        "of 1 MB or more, and for their folder or the one above. Medians of three.",
    )  # fmt: skip
    for name, card in cards.items():
        if card.error:
            table.rows.append([name, *["-"] * 8, card.error])
            continue
        table.rows.append([
            name, f"{statistics.median(card.call_s) * 1e3:.0f}", f"{statistics.median(card.done_s) * 1e3:.0f}",
            _counts(card.flips), card.cut, _counts(card.kills), card.at_return, card.files_synced, card.folder_synced,
            ", ".join(card.pickles) or "none",
        ])  # fmt: skip
    report.tables.append(table)


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", default="", help=f"some of {', '.join(PEERS)}")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--scratch", type=Path, default=None)
    given = parser.parse_args()
    chosen = [name for name in PEERS if not given.only or name in given.only.split(",")]
    report = Report("What becomes of a checkpoint", "python bench/scorecard.py --python PYTHON", machine())
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
    report.save(given.out, "scorecard")
    print(report.markdown())


if __name__ == "__main__":
    main()
