"""`everstep run` becomes the command, with tiers, node and domain in its environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from said import Cli, Said

from everstep import Partner, Shared
from everstep.keeper.replica import environment
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
    ],
)
def test_what_is_wrong_is_said_before_anything_is_started(words: list[str], said: str, cli: Cli) -> None:
    answer = cli("run", *words)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err
