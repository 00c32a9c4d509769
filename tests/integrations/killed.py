"""An example that is killed after a step, started again, and compared with one that nothing happened to."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import live, must_finish, run_directory, told

import everstep
from everstep.events import Started
from everstep.keeper.process import environment
from everstep.run import Run

EXAMPLES = Path(__file__).parents[2] / "examples"
OF_EACH_RUN = ("runtime", "_per_second", "best_model_checkpoint")  # what a Trainer says of the clock and the folder
ENDED_TWICE = ("finished_at",)  # a run that dies between its last step and its end has that step without the end


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


def life(program: Callable[[], Any], directory: Path, *words: object, kill_after: int | None = None) -> bool:
    """Whether the life was killed; it was either that, or it came to its end."""

    def main() -> dict[str, Any]:
        os.environ["HF_HUB_OFFLINE"] = "1"
        random.seed(1)  # a program that does not do so itself begins with whatever this process has
        np.random.seed(1)
        sys.argv = ["example", "--dir", str(directory), *map(str, words)]
        if kill_after is not None:
            die_after(kill_after)
        program()
        return {}

    if kill_after is None:
        must_finish(main)
        return False
    outcome = live(main)
    assert outcome.killed, f"exit {outcome.code}: {outcome.error}"
    return True


def last_state(directory: Path) -> dict[str, Any]:
    return everstep.open(directory).load()


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two states are not the same, bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in {**one, **other} if not str(key).endswith(OF_EACH_RUN + ENDED_TWICE)]
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


DRIVER = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from killed import die_after, example
name, step = sys.argv[1:3]
del sys.argv[1:3]
if step != "never":
    die_after(int(step))
example(name).main()
"""
OF_LAUNCHERS = ("OMPI_", "PMIX_", "SLURM", "EVERSTEP_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC")


def job(name: str, directory: Path, step: int | str, *words: object) -> int:
    """How a job of two ranks under torchrun has ended."""
    driver = directory.with_name("driver.py")
    driver.write_text(DRIVER)
    clean = {key: value for key, value in environment().items() if not key.startswith(OF_LAUNCHERS)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, driver, name, step, "--dir", directory, *words]
    offline = {**clean, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(list(map(str, command)), env=offline, timeout=280, stdin=subprocess.DEVNULL).returncode


def check_ranks_resumed_bit_for_bit(name: str, *words: object, kill: int) -> None:
    """Two ranks of DDP: both are killed after a step, and the same command goes on."""
    with run_directory() as whole, run_directory() as killed:
        assert job(name, whole, "never", *words) == 0
        assert job(name, killed, kill, *words) != 0
        assert job(name, killed, "never", *words) == 0
        began = {(event.world, event.step) for event in told(killed, Started)}
        assert (2, 0) in began and began & {(2, kill - 1), (2, kill)}, began
        different = differences(last_state(killed), last_state(whole))
        assert not different, f"not the same: {different}"
