"""A run that is guarded in a notebook: cells break off, and are run again, in one process that goes on.

Elsewhere an error ends the process, and with it whatever holds a run. Here a loop that broke off is given up when its
cell ends, so that keys and signals mean again what they meant before; and a cell that is run again takes the place of
its former self. What is sealed stands, and is gone on with.
"""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any, Protocol

_GUARDED: dict[Path, weakref.ref[Guarded]] = {}  # in this process, by directory


class Guarded(Protocol):
    """A run, as far as it matters here."""

    is_iterated: bool  # its loop has begun

    def give_up(self) -> bool:
        """What is sealed stands. Whether it had not ended yet."""


def make_way(directory: Path) -> bool:
    """In a notebook: end the run that an earlier cell has left in this directory. Whether there ever was one."""
    earlier = _GUARDED.get(directory)
    if earlier is not None:
        _give_up(earlier(), directory)
    return earlier is not None


def begun(run: Guarded, directory: Path) -> None:
    """In a notebook: from here on its cell may break off. Not sooner: a run that was refused has nothing to give up."""
    shell = _shell()
    if shell is None:
        return
    _GUARDED[directory] = weakref.ref(run)
    if _cell_ended not in shell.events.callbacks["post_run_cell"]:
        shell.events.register("post_run_cell", _cell_ended)


def _shell() -> Any:
    """IPython's, if this process is one of its."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get() if get is not None else None


def _cell_ended(result: Any) -> None:
    if result.error_in_exec is None:
        return
    for directory, guarded in _GUARDED.items():
        run = guarded()
        if run is not None and run.is_iterated:
            _give_up(run, directory)


def _give_up(run: Guarded | None, directory: Path) -> None:
    if run is not None and run.give_up():
        words = f"everstep: the run in {directory} was left in the middle; guard() goes on from its last step"
        print(words, file=sys.stderr, flush=True)
