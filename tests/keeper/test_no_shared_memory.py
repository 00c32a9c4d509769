"""Without /dev/shm the keeper holds the arena, and a killed run still loses nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from lives import fork_keeper, live, must_finish, run_directory, run_of, train_tiny

import everstep
from everstep.capture import host
from everstep.events import Started, read_events
from everstep.keeper import client


def test_a_run_without_shared_memory_is_killed_and_resumed_from_what_the_keeper_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host, "SHARED_MEMORY", Path("/nonexistent"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(client, "start", fork_keeper)
    with run_directory() as whole, run_directory() as directory:
        expected = must_finish(lambda: train_tiny(whole, keeper="process"))["digest"]

        def die(run: everstep.Run) -> None:
            if run.step == 4:
                run.wait("sealed")
                os.kill(os.getpid(), 9)

        assert live(lambda: train_tiny(directory, die, keeper="process")).killed
        result = must_finish(lambda: train_tiny(directory, keeper="process"))
        assert [e.source for e in read_events(directory) if isinstance(e, Started)] == ["nothing", "memory"]
        shutil.rmtree(tmp_path / f"everstep-{os.getuid()}" / run_of(directory), ignore_errors=True)
    assert result["digest"] == expected
    assert result["resumed_from"] == 4
