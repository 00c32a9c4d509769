"""The command line, as its entry point runs it."""

from __future__ import annotations

import sys

import pytest
from said import Cli, Said

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
