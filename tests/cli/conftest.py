"""The command line, as its entry point runs it, and a run to be looked at."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lives import live, must_finish, run_directory, train_log
from said import Cli, Said, die_at_five

from everstep.cli import main


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["everstep", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            main()
        said = capsys.readouterr()
        return Said(int(leaving.value.code or 0), said.out, said.err)

    return run


@pytest.fixture(scope="session")
def chromium() -> str:
    """Debian's, installed where it is missing and may be."""
    if shutil.which("chromium") is None and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        try:
            subprocess.run(["apt-get", "install", "-y", "chromium"], capture_output=True, timeout=200, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip("chromium was not installed within 200 s: the page is not looked at")
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("there is no chromium, and it cannot be installed here: the page is not looked at")
    return found


@pytest.fixture(scope="session")
def resumed() -> Iterator[Path]:
    """A run with a log that was killed after step 5, and went on to step 12."""
    with run_directory() as directory:
        assert live(lambda: train_log(directory, die_at_five, records_a_base=100)).killed
        must_finish(lambda: train_log(directory, records_a_base=4, steps=12))
        yield directory
