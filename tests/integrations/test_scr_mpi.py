"""The same interface under mpirun, and in a program of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from ranks import Nodes

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "scr_app.py"
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
LAUNCH = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe"]

with_mpi = pytest.mark.skipif(MPIRUN is None or find_spec("mpi4py") is None, reason="needs OpenMPI's mpirun and mpi4py")

ROUND_TRIP = f"""
import sys
sys.path[:0] = [{str(ROOT / "tests")!r}, {str(ROOT / "tests/integrations")!r}]
from mpi4py import MPI
from ranks import read_back, write
from everstep.integrations import scr
rank = MPI.COMM_WORLD.Get_rank()
scr.init()
name = read_back(rank)
number = int(name.removeprefix("step")) + 1 if name else 1
for following in (number, number + 1):
    assert write(following, rank)
assert scr.finalize()
print("rank %d restarted from %s" % (rank, name), flush=True)  # in one piece: others print, too
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Any]:
    made: list[Nodes] = []

    def make(*ranks: int, **settings: Any) -> Nodes:
        made.append(Nodes(tmp_path / f"m{len(made)}", ranks, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def environment(job: Nodes, node: str) -> dict[str, str]:
    return {**os.environ, **job.environment(node), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def under_mpi(job: Nodes, program: list[str]) -> str:
    """One start of a program on all nodes of a job; what it printed."""
    command = list(LAUNCH)
    for node in job.names:
        own = [word for name, value in job.environment(node).items() for word in ("-x", f"{name}={value}")]
        command += [*own, "-n", str(job.ranks[node]), sys.executable, *program, ":"]
    ended = subprocess.run(
        command[:-1], cwd=job.prefix, env=environment(job, job.names[0]), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@with_mpi
@pytest.mark.soak
def test_ranks_of_mpi_on_two_nodes_write_and_restart(nodes: Any) -> None:
    job = nodes(2, 1, SCR_COPY_TYPE="XOR", SCR_FLUSH=1)
    assert under_mpi(job, ["-c", ROUND_TRIP]).count("restarted from None") == 3
    assert under_mpi(job, ["-c", ROUND_TRIP]).count("restarted from step2") == 3
    job.lose(*job.names)  # what follows comes from the prefix
    assert under_mpi(job, ["-c", ROUND_TRIP]).count("restarted from step4") == 3


@pytest.mark.soak
@with_mpi
def test_a_node_that_mpi_lost_is_made_good_over_mpi(nodes: Any) -> None:
    job = nodes(1, 1, SCR_COPY_TYPE="PARTNER", SCR_FLUSH=0)
    assert under_mpi(job, ["-c", ROUND_TRIP]).count("restarted from None") == 2
    job.lose(job.names[1])
    assert under_mpi(job, ["-c", ROUND_TRIP]).count("restarted from step2") == 2


@pytest.mark.soak
@with_mpi
def test_the_example_runs_under_mpi(nodes: Any) -> None:
    job = nodes(2, SCR_CHECKPOINT_INTERVAL=10, SCR_FLUSH=2)
    first = under_mpi(job, [str(APP), "--steps", "20"])
    assert "restarted" not in first
    assert "restarted from step 20" in under_mpi(job, [str(APP), "--steps", "30"])


def warmth(said: str) -> str:
    return re.findall(r"warmth (\S+)", said)[0]


@pytest.mark.soak
def test_the_example_is_killed_and_ends_as_if_it_had_not_been(nodes: Any) -> None:
    job, calm = nodes(1, SCR_CHECKPOINT_INTERVAL=5), nodes(1, SCR_CHECKPOINT_INTERVAL=5)
    command = [sys.executable, str(APP), "--steps", "30"]
    running = subprocess.Popen(
        [*command, "--step-seconds", "0.05"], cwd=job.prefix, env=environment(job, job.names[0]), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("step 15"):
            running.send_signal(signal.SIGKILL)
            break
    running.wait()
    said = {}
    for one in (job, calm):
        ended = subprocess.run(
            command, cwd=one.prefix, env=environment(one, one.names[0]), capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == 0, ended.stderr
        said[one] = ended.stdout
    assert "restarted from step 15" in said[job] or "restarted from step 20" in said[job]
    assert warmth(said[job]) == warmth(said[calm])
    assert len(APP.read_text().splitlines()) < 80
