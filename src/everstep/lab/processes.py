"""A command that was started here, and every process that came of it, whoever its parent is by now.

Nobody else is ever sent a signal. A keeper leaves its trainer to live on; what has lost its parent becomes a child of
this process, so it is still known whose it is.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from everstep.errors import BadConfig, EverstepError
from everstep.topology import process_alive

_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_GONE_S = 10.0  # until a killed process must be gone
_LOOK_S = 0.01


class Tree:
    def __init__(self, words: Sequence[str], *, to_stderr: bool) -> None:
        """`to_stderr`: all that the command says; standard output is for others."""
        self._others = set(_children().get(os.getpid(), ()))
        ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1)
        try:
            self._command = subprocess.Popen(words, start_new_session=True, stdout=sys.stderr if to_stderr else None)
        except OSError as error:
            raise BadConfig(f"{words[0]} cannot be started: {error.strerror}") from None

    @property
    def code(self) -> int | None:
        """How the command ended; None while it runs. A signal is a negative number."""
        return self._command.poll()

    def pids(self) -> set[int]:
        """Of all that came of the command and is alive."""
        children = _children()
        first = [pid for pid in children.get(os.getpid(), ()) if pid not in self._others]
        return {pid for pid in _families(first, children) if process_alive(pid)}

    def with_descendants(self, pids: Collection[int]) -> set[int]:
        """Those of them that came of the command, with all that came of them."""
        return _families(self.pids().intersection(pids), _children())

    def signal(self, pids: Iterable[int], number: int) -> None:
        """To those that came of the command, and to nobody else."""
        ours = self.pids()
        for pid in pids:
            if pid in ours:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass  # it has just ended by itself

    def kill(self, pids: Collection[int]) -> float:
        """Until they are gone. When that was."""
        self.signal(pids, signal.SIGKILL)
        killed = time.time()
        deadline = time.monotonic() + _GONE_S
        while any(process_alive(pid) for pid in pids):
            self.bury()
            if time.monotonic() > deadline:
                left = sorted(pid for pid in pids if process_alive(pid))
                raise EverstepError(f"processes {left} did not end within {_GONE_S:g} s of SIGKILL")
            time.sleep(_LOOK_S)
        return killed

    def limit_files(self, pids: Collection[int], size: int | None) -> None:
        """No file may grow beyond so many bytes, as on a disk that is full; None: as before."""
        ours = self.pids()
        for pid in pids:
            if pid in ours:
                hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))

    def end(self, grace_s: float) -> None:
        """All of it. The command is asked first, so that ranks can save; whoever is left then is killed."""
        self.signal(self.pids(), signal.SIGCONT)  # who stands still hears nothing
        if self._command.poll() is None:
            self._command.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self._command.poll() is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        deadline = time.monotonic() + _GONE_S
        while (left := self.pids()) and time.monotonic() < deadline:
            self.signal(left, signal.SIGKILL)
            self.bury()
            self._command.poll()
            time.sleep(_LOOK_S)

    def bury(self) -> None:
        """Children that we did not start ourselves, and that have ended, wait for somebody to take note of it."""
        for pid in _children().get(os.getpid(), ()):
            if pid != self._command.pid and pid not in self._others and not process_alive(pid):
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    pass  # somebody else has taken note of it


def environment_of(pid: int) -> dict[str, str]:
    """With which a process was started."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(os.fsdecode(word).split("=", 1) for word in words if b"=" in word)


def _families(pids: Iterable[int], children: Mapping[int, Sequence[int]]) -> set[int]:
    """These, and all that came of them."""
    found, unseen = set[int](), list(pids)
    while unseen:
        pid = unseen.pop()
        found.add(pid)
        unseen += children.get(pid, ())
    return found


def _children() -> dict[int, list[int]]:
    """Of every process of this machine."""
    found: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as stat:
                    parent = int(stat.read().rsplit(b")", 1)[1].split()[1])
            except OSError:
                continue
            found.setdefault(parent, []).append(int(entry))
    return found
