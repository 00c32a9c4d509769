"""An example that is killed after a step, started again, and compared with one that nothing happened to."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import MeetingPlace, live, must_finish, run_directory, told, way_to

import everstep
from everstep.capture.sharded import is_sharded
from everstep.events import Started
from everstep.run import Run

EXAMPLES = Path(__file__).parents[2] / "examples"
OF_EACH_RUN = ("runtime", "_per_second", "best_model_checkpoint")  # what a Trainer says of the clock and the folder
ENDED_TWICE = ("finished_at",)  # the last step may be on the disk before the end of the run, which is then not written


def example(name: str) -> Any:
    """An example as a module, loaded once: lives are forked from here and need not load a framework each."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def die_after(step: int) -> None:
    """This process is killed as soon as it has made the cut of that step, whatever is under way then."""
    cut = Run._cut

    def and_die(run: Run) -> None:
        cut(run)
        if run.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    Run._cut = and_die  # type: ignore[method-assign]


def note_sharding(rank: int) -> None:
    """Whether what is trained is in parts is seen at the first cut, and noted beside the run."""
    cut = Run._cut

    def and_note(run: Run) -> None:
        cut(run)
        if run.step == 1 and any(is_sharded(p) for model in run._state.subjects.models for p in model.parameters()):
            (run.settings.directory / f"sharded-{rank}").touch()

    Run._cut = and_note  # type: ignore[method-assign]


def life(program: Callable[[], Any], directory: Path, *words: object, kill_after: int | None = None) -> bool:
    """Whether the life was killed; it was either that, or it came to its end."""
    main = _main(program, directory, *words, kill_after=kill_after)
    if kill_after is None:
        must_finish(main)
        return False
    outcome = live(main)
    assert outcome.killed, f"exit {outcome.code}: {outcome.error}"
    return True


def _main(
    program: Callable[[], Any], directory: Path, *words: object, kill_after: int | None
) -> Callable[[], dict[str, Any]]:
    def main() -> dict[str, Any]:
        os.environ["HF_HUB_OFFLINE"] = "1"
        random.seed(1)  # a program that does not do so itself begins with whatever this process has
        np.random.seed(1)
        sys.argv = ["example", "--dir", str(directory), *map(str, words)]
        if kill_after is not None:
            die_after(kill_after)
        program()
        return {}

    return main


def last_state(directory: Path, rank: int = 0) -> dict[str, Any]:
    return everstep.open(directory).load(rank=rank)


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two states are not the same, bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        leave_out = OF_EACH_RUN + ENDED_TWICE
        if one.get("finished_at") != other.get("finished_at"):
            leave_out += ("position",)  # that of the last step, or of the end
        keys = [key for key in {**one, **other} if not str(key).endswith(leave_out)]
        return [d for key in keys for d in differences(one.get(key), other.get(key), f"{path}.{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return [d for i, (a, b) in enumerate(zip(one, other, strict=True)) for d in differences(a, b, f"{path}[{i}]")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        same = same and one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))
    else:
        same = type(one) is type(other) and one == other
    return [] if same else [path]


def check_resumed_bit_for_bit(program: Callable[[], Any], *words: object, kills: tuple[int, ...]) -> dict[str, Any]:
    """The last state of a run with these deaths, which is that of a run without."""
    with ExitStack() as stack:
        whole, killed = stack.enter_context(run_directory()), stack.enter_context(run_directory())
        life(program, whole, *words)
        for step in kills:
            assert life(program, killed, *words, kill_after=step)
        life(program, killed, *words)
        began = [event.step for event in told(killed, Started)]
        assert began[0] == 0 and len(began) == len(kills) + 1
        for step, resumed in zip(kills, began[1:], strict=True):
            assert step - 1 <= resumed <= step, f"killed after step {step}, resumed from {resumed}"
        state, expected = last_state(killed), last_state(whole)
        different = differences(state, expected)
        assert not different, f"not the same: {different}"
        return state


WORLD = 2
OF_LAUNCHERS = ("OMPI_", "PMIX_", "SLURM", "EVERSTEP_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC")


def job(program: Callable[[], Any], directory: Path, *words: object, kill_after: int | None = None) -> None:
    """Two ranks, with what torchrun tells them: all come to their end, or one is killed and the others fail or hang."""
    meeting, main = MeetingPlace(), _main(program, directory, *words, kill_after=kill_after)
    said = [directory.with_name(f"said-by-{rank}") for rank in range(WORLD)]
    ranks = {_fork_rank(rank, meeting.port, said[rank], main): rank for rank in range(WORLD)}
    ended: dict[int, int] = {}
    deadline = time.monotonic() + 200
    while ranks:
        for pid in list(ranks):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                ended[ranks.pop(pid)] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if any(ended.values()):
            deadline = min(deadline, time.monotonic() + 5)
        for pid in ranks if time.monotonic() > deadline else ():
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    meeting.close()
    words_of_all = "\n".join(file.read_text() for file in said if file.exists())
    if kill_after is None:
        assert set(ended.values()) == {0}, words_of_all
    else:
        assert -signal.SIGKILL in ended.values() and 0 not in ended.values(), words_of_all


def _fork_rank(rank: int, port: int, said: Path, main: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for name in [name for name in os.environ if name.startswith(OF_LAUNCHERS)]:
                del os.environ[name]
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
            os.environ |= {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), **way_to(port)}
            os.environ |= {"TORCHELASTIC_RUN_ID": "test"}
            torch.set_num_threads(1)
            note_sharding(rank)
            main()
            code = 0
        except BaseException:
            said.write_text(traceback.format_exc())
        os._exit(code)
    return pid


def check_ranks_resumed_bit_for_bit(
    program: Callable[[], Any], *words: object, kill: int, sharded: bool = False
) -> dict[str, Any]:
    """Two ranks: both are killed after a step, and the same command goes on. The last state of rank 0."""
    with run_directory() as whole, run_directory() as killed:
        job(program, whole, *words)
        job(program, killed, *words, kill_after=kill)
        job(program, killed, *words)
        began = {(event.rank, event.world, event.step) for event in told(killed, Started)}
        assert began in [{(rank, WORLD, step) for rank in range(WORLD) for step in (0, at)} for at in (kill - 1, kill)]
        assert sharded == all((killed / f"sharded-{rank}").exists() for rank in range(WORLD))
        for rank in range(WORLD):
            different = differences(last_state(killed, rank), last_state(whole, rank))
            assert not different, f"not the same on rank {rank}: {different}"
        return last_state(killed)
