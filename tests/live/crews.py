"""`everstep run --nproc` as a child of the test, and programs for it to start that need no torch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from everstep.keeper.process import environment

COMMAND = "from everstep.cli import main; main()"


class Job:
    """One supervised job. What its processes say, and what the supervisor says of them, is in one file."""

    def __init__(self, folder: Path, *words: object, before: str = "", launcher: Sequence[str] = ()) -> None:
        """`before`: done in the supervisor before it begins. `launcher`: another one instead."""
        self._said = folder / "said"
        ours = ["-c", f"{before}\n{COMMAND}", "run"]
        command = [sys.executable, *(launcher or ours), *map(str, words)]
        with self._said.open("ab") as said:
            self.process = subprocess.Popen(
                command, env=environment(), stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    @property
    def lines(self) -> list[str]:
        """Of the supervisor, without the numbers of processes."""
        return re.sub(r"process \d+", "process N", self.said.replace("everstep: ", "")).splitlines()

    def until(self, holds: Callable[[], object], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline and self.process.poll() is None, self.said
            time.sleep(0.01)

    def wait(self, timeout_s: float = 120.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)  # and its children end with it
            self.process.wait()
            raise AssertionError(f"it did not end in {timeout_s} s: {self.said}") from None


class Program:
    """A program for a crew. Every process of it notes its pid as the kind that it is: `rank-1`, or `spare`."""

    def __init__(self, folder: Path, body: str) -> None:
        self.path, self._notes = folder / "program.py", folder / "notes"
        self._notes.mkdir()
        self.path.write_text(
            f"""
import os, pathlib, signal, sys, time
from everstep.live.crew import tell_crew
rank = None if os.environ["EVERSTEP_SPARE"] else int(os.environ["RANK"])
kind = "spare" if rank is None else f"rank-{{rank}}"
notes = pathlib.Path({str(self._notes)!r})
def started(kind):
    return len(list(notes.glob(f"{{kind}}.*")))
def wait_for(name):
    while not (notes / name).exists():
        time.sleep(0.01)
def say(*words):
    os.write(1, (" ".join(words) + "\\n").encode())  # in one piece, beside those of others
def die():
    os.kill(os.getpid(), signal.SIGKILL)
(notes / f"{{kind}}.{{os.getpid()}}").touch()
{body}
"""
        )

    def pids(self, kind: str) -> list[int]:
        return [int(note.suffix[1:]) for note in sorted(self._notes.glob(f"{kind}.*"), key=os.path.getmtime)]

    def note(self, name: str) -> None:
        (self._notes / name).touch()

    def has(self, name: str) -> bool:
        return (self._notes / name).exists()
