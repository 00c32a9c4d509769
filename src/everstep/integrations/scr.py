"""SCR's interface for programs that were written for it: files, cached, protected, flushed and rebuilt like bases.

    from everstep.integrations import scr

    scr.init()
    if scr.have_restart():
        scr.start_restart()
        read(scr.route_file("rank_0.ckpt"))
        scr.complete_restart()
    while not done:
        compute()
        if scr.need_checkpoint():
            scr.start_output("step_10", scr.FLAG_CHECKPOINT)
            write(scr.route_file("rank_0.ckpt"))
            scr.complete_output()
        if scr.should_exit():
            break
    scr.finalize()

All calls but config(), route_file() and status() are collective: over torch.distributed where that is initialised,
else over mpi4py where MPI runs, else there is one process alone. A call that cannot come now raises `Misuse` on all
ranks and changes nothing. docs/from-scr.md says what differs from SCR.
"""

from __future__ import annotations

import os

from everstep.errors import Misuse
from everstep.integrations.scr_job import FLAG_CHECKPOINT, FLAG_OUTPUT, Job
from everstep.integrations.scr_settings import assignment, choose

__all__ = [
    "FLAG_CHECKPOINT",
    "FLAG_OUTPUT",
    "Misuse",
    "complete_output",
    "complete_restart",
    "config",
    "current",
    "delete",
    "drop",
    "finalize",
    "have_restart",
    "init",
    "need_checkpoint",
    "route_file",
    "should_exit",
    "start_output",
    "start_restart",
    "status",
]


class _Process:
    """SCR has one job a process, and its calls do not name it."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        self.job: Job | None = None


_process = _Process()


def _job(call: str) -> Job:
    if _process.job is None:
        raise Misuse(f"{call}() comes between init() and finalize(); call init() first")
    return _process.job


def config(setting: str) -> str | None:
    """Set "NAME=value" before init(), take "NAME=" back, or ask for "NAME" alone. Returns its value."""
    if "=" not in setting:
        name = setting.strip()
        return os.environ.get(name, _process.settings.get(name))
    if _process.job is not None:
        raise Misuse("config() changes settings before init() only; finalize() first")
    pair = assignment(setting)
    if pair is None:
        raise Misuse("config() takes 'NAME=value' or 'NAME'")
    name, value = pair
    if value:
        _process.settings[name] = value
    else:
        _process.settings.pop(name, None)
    return value or None


def init() -> None:
    """Begin: take the job's caches and prefix, and see what earlier lives have left."""
    if _process.job is not None:
        raise Misuse("init() was called before; call finalize() first")
    settings = dict(_process.settings)
    _process.job = Job(lambda: choose(settings, os.environ))


def finalize() -> bool:
    """End: bring the newest checkpoint and all outputs to the prefix. False if that failed; the caches have it then."""
    is_flushed = _job("finalize").finalize()
    _process.job = None
    return is_flushed


def need_checkpoint() -> bool:
    """Whether a checkpoint is due, by SCR_CHECKPOINT_INTERVAL, _SECONDS or _OVERHEAD; always, if none is set."""
    return _job("need_checkpoint").need_checkpoint()


def should_exit() -> bool:
    """Whether to leave now: the allocation has less than SCR_HALT_SECONDS left, or somebody asked for it."""
    return _job("should_exit").should_exit()


def start_output(name: str | None = None, flags: int = FLAG_CHECKPOINT) -> None:
    """Begin a dataset. FLAG_CHECKPOINT: to restart from; FLAG_OUTPUT: files that are to lie on the prefix; or both."""
    _job("start_output").start_output(name, flags)


def route_file(name: str) -> str:
    """Where to write or read a file that is called so on the prefix. Not collective."""
    return _job("route_file").route_file(name)


def complete_output(valid: bool | int = True) -> bool:
    """All files of this rank are written and closed. False, on all ranks, if not all are valid: then it is dropped."""
    return _job("complete_output").complete_output(bool(valid))


def have_restart() -> str | None:
    """The name of the newest checkpoint that every rank can have, verified; None if there is none."""
    return _job("have_restart").have_restart()


def start_restart() -> str:
    """Begin to read the checkpoint that have_restart() named; route_file() says where its files are."""
    return _job("start_restart").start_restart()


def complete_restart(valid: bool | int = True) -> bool:
    """All files were read. False, on all ranks, if one could not: have_restart() then names the one before."""
    return _job("complete_restart").complete_restart(bool(valid))


def current(name: str) -> None:
    """Go on from this checkpoint and not from a newer one; have_restart() names it next."""
    _job("current").current(name)


def drop(name: str) -> None:
    """Never offer this checkpoint again; its bytes go when newer ones take their place."""
    _job("drop").drop(name)


def delete(name: str) -> None:
    """Remove a dataset from caches and prefix."""
    _job("delete").delete(name)


def status() -> dict[str, object]:
    """Where this rank stands: its newest dataset, and how far caches, protection and flush are. Not collective."""
    return _job("status").status()
