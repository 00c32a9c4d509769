"""A disk that takes no more: training goes on, and people hear of it where they look."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import everstep
from everstep import events
from everstep.cli import status

_LONG_S = 60.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", str(place)], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LONG_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_full_disk_is_told_by_the_program_and_by_status_until_there_is_room(
    small_disk: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_SAID", {})
    model = nn.Linear(512, 512)  # of a megabyte
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    directory = small_disk / "run"

    def step() -> None:
        model(torch.ones(512)).sum().backward()
        optimizer.step()
        run.done()

    def trouble() -> str:
        return str(everstep.open(directory).status()["trouble"])

    with everstep.guard(model, optimizer, dir=directory, tiers=[everstep.Disk(every=1)], strategy="snapshot") as run:
        step()
        run.wait("durable")
        assert trouble() == "" and capfd.readouterr().err == ""
        filler = small_disk / "filler"
        with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        step()
        _until(lambda: "free" in trouble())
        assert "is tried again" in capfd.readouterr().err
        status.command(str(directory))
        shown = capfd.readouterr().out
        assert "trouble: " in shown and "durable on disk: 1" in shown
        filler.unlink()
        run.wait("durable")
        _until(lambda: trouble() == "")
        status.command(str(directory))
        assert "trouble" not in capfd.readouterr().out
