"""`everstep run` becomes the command, with tiers, node and domain in its environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from said import Cli, Said

from everstep import Partner, Shared
from everstep.keeper.process import environment
from everstep.tiers import gather, parse

SHOW = "import os; print(*(os.environ.get(f'EVERSTEP_{name}', '-') for name in ('TIERS', 'NODE', 'DOMAIN')), sep='|')"


def start(*words: object, cwd: Path) -> Said:
    command = [sys.executable, "-m", "everstep.cli", "run", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, env=environment())
    return Said(ended.returncode, ended.stdout, ended.stderr)


def test_it_becomes_the_command_with_everything_chosen(tmp_path: Path) -> None:
    tiers = 'Partner(), Shared("/lustre/run7", every=10)'
    said = start("--tiers", tiers, "--node", "n1", "--domain", "rack-2", "--", sys.executable, "-c", SHOW, cwd=tmp_path)
    words, node, domain = said.out.strip().split("|")
    assert gather(parse(words, "it")) == gather([Partner(), Shared("/lustre/run7", every=10)])
    assert (said.code, said.err, node, domain) == (0, "", "n1", "rack-2")
    (tmp_path / "my.toml").write_text("[partner]\n[shared]\npath = '/lustre/run7'\nevery = 10\n")
    assert start("--config", "my.toml", sys.executable, "-c", SHOW, cwd=tmp_path).out == f"{words}|-|-\n"
    assert start(sys.executable, "-c", SHOW, cwd=tmp_path).out == "-|-|-\n"
    assert start("--", sys.executable, "-c", "raise SystemExit(9)", cwd=tmp_path).code == 9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tiers", "Partner(copies=0)", "true"], "--tiers: Partner(copies=) must be at least 1, not 0"),
        (["--config", "none.toml", "true"], "none.toml cannot be read"),
        (["--config", "none.toml", "--tiers", "Partner()", "true"], "one of them is enough"),
        (["--node", "a/b", "true"], "--node must be a name of letters, digits"),
        (["--domain", "", "true"], "--domain must be a name of letters, digits"),
        (["--", "no-such-program"], "no-such-program cannot be started: No such file or directory"),
        ([], "Missing argument"),
        (["--nproc", "0", "train.py"], "--nproc must be at least 1, not 0"),
        (["--nproc", "2", "--spares", "-1", "train.py"], "--spares must be at least 0, not -1"),
        (["--spares", "1", "train.py"], "--spares says how workers are started, and needs --nproc"),
        (["--nproc", "2", "--nodes", "2", "train.py"], "several nodes need --master HOST:PORT"),
        (["--nproc", "2", "--nodes", "2", "--node-rank", "2", "train.py"], "--node-rank must be from 0 to 1, not 2"),
        (["--nproc", "2", "--master", "here", "train.py"], "--master must be HOST:PORT, not 'here'"),
        (["--nproc", "2", "--", "no-such-program"], "no-such-program cannot be started: No such file or directory"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_started(words: list[str], said: str, cli: Cli) -> None:
    answer = cli("run", *words)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err


def test_under_srun_each_node_has_its_workers_and_all_meet_on_the_first(tmp_path: Path) -> None:
    slurm = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu[7-8]"}
    names = "('RANK', 'WORLD_SIZE', 'MASTER_ADDR')"
    show = f"import os; os.write(1, ' '.join([os.environ[n] for n in {names}]).encode() + bytes([10]))"  # at once
    command = [sys.executable, "-m", "everstep.cli", "run", "--nproc", "2", "--", sys.executable, "-c", show]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment() | slurm, cwd=tmp_path)
    assert (ended.returncode, sorted(ended.stdout.splitlines())) == (0, ["2 4 gpu7", "3 4 gpu7"]), ended.stderr
