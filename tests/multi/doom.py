"""Keepers and ranks of one node that die at a chosen moment, or whose media refuse: what a test changes in them.

A keeper that is to be changed is forked from a rank, so that it has what the test has changed. One dies: whoever takes
its place lives.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from lives import fork_keeper

from everstep.keeper import client
from everstep.keeper.exchange import RemoteTier
from everstep.store.disk import DiskTier

Prepare = Callable[[str], None]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10)  # the signal may take a moment to arrive


def keeper_with(change: Callable[[], None], *nodes: str) -> Prepare:
    """Every keeper of these nodes is changed before it begins."""

    def prepare(node: str) -> None:
        if node in nodes:
            client.start = lambda run, directory: fork_keeper(run, directory, change)  # type: ignore[assignment]

    return prepare


def dies_before(operation: str, marker: Path, *, after: int = 0) -> Callable[[], None]:
    """SIGKILL before an operation whose name has this in it, on any tier; `after`: so many of them pass."""
    left = [after]

    def before(name: str) -> None:
        if operation in name:
            left[0] -= 1
            if left[0] < 0:
                marker.touch()
                die()

    def change() -> None:
        if not marker.exists():
            for tier in (DiskTier, RemoteTier):
                tier.before = staticmethod(before)  # type: ignore[assignment]

    return change
