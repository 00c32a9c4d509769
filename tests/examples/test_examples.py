"""The examples run, and show what they say."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lives import must_finish, run_directory, train_tiny

from everstep.keeper.process import environment

EXAMPLES = Path(__file__).parents[2] / "examples"
OF_LAUNCHERS = ("OMPI_", "PMIX_", "SLURM", "EVERSTEP_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")


def run(*command: object, timeout_s: float = 240.0) -> str:
    clean = {name: value for name, value in environment().items() if not name.startswith(OF_LAUNCHERS)}
    clean["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{clean['PATH']}"
    ended = subprocess.run(
        [str(word) for word in command], env=clean, capture_output=True, text=True, timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*_*.*")), ids=lambda path: path.name)
def test_an_example_fits_a_page(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 80


@pytest.mark.soak
def test_a_lost_node_is_replaced_by_an_empty_one_and_the_job_goes_on_from_the_very_step(tmp_path: Path) -> None:
    said = run("bash", EXAMPLES / "two_nodes.sh", tmp_path)
    begun = re.findall(r"rank \d on (\w+): goes on from step (\w+)", said)
    assert begun == [("one", "20"), ("two", "20"), ("one", "None"), ("two", "None")]
    assert len(re.findall(r"step 40, weights \w{16}", said)) == 4
    assert len(set(re.findall(r"weights (\w{16})", said))) == 1, said


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun_starts_a_job_and_starts_it_again(tmp_path: Path) -> None:
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
    train = [*mpirun, EXAMPLES / "mpirun_train.py", "--dir", tmp_path / "run"]
    assert "2 ranks, resumed from step None, now at step 40" in run(*train)
    assert "2 ranks, resumed from step 40, now at step 60" in run(*train, "--steps", "60")


def test_the_demo_says_where_its_page_is_or_why_there_is_none(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="the report needs plotly: pip install 'everstep[report]'")
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    assert spec is not None and spec.loader is not None
    demo = sys.modules["demo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    page = tmp_path / "runs" / "report.html"
    with run_directory() as directory:
        must_finish(lambda: train_tiny(directory))
        assert demo.draw(directory, page) == f"\nthe third run, to look at: {page.as_uri()}"
    assert "<h2>Timeline</h2>" in page.read_text()
    nothing = tmp_path / "nothing"
    assert demo.draw(nothing, page).startswith(f"everstep: {nothing} is not a run's directory")
