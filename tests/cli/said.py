"""What the command line says, and of what."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import everstep


@dataclass
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Said]

_TELLING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from everstep.cli import main
from everstep.lab import MODULE
class Telling(MODULE.MAKER):
    def run(self):
        found = super().run()
        print("made one", file=sys.stderr, flush=True)
        return found
MODULE.MAKER = Telling
main()
"""


def interrupted(module: str, maker: str, *words: object) -> Said:
    """A command as a process of its own, and Ctrl-C in the middle of it. `maker`: a class of the lab whose run() makes
    a result: when the second is made, the first has been taken in."""
    code = _TELLING.replace("MODULE", module).replace("MAKER", maker)
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    made = 0
    while made < 2:
        line = process.stderr.readline()
        assert line, "it ended by itself"
        made += "made one" in line
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return Said(process.returncode, out, err)


def die_at_five(run: everstep.Run) -> None:
    """With step 3 on disk, and steps up to 5 in memory."""
    if run.step == 3:
        run.wait()
    if run.step == 5:
        run.wait("sealed")
        os.kill(os.getpid(), signal.SIGKILL)
