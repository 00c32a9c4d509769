"""An arena in other hands than those that made it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import live, must_finish, run_directory, run_of, train_tiny
from torch import nn

import everstep
from everstep.capture import host
from everstep.capture.arena import Arena
from everstep.capture.host import SHARED_MEMORY
from everstep.errors import NotEnoughMemory
from everstep.image import FORMAT, lay_out
from everstep.types import ImageInfo


def die(run: everstep.Run) -> None:
    if run.step == 3:
        run.wait("sealed")
        os.kill(os.getpid(), signal.SIGKILL)


def links() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # closed in this moment


def test_memory_that_a_new_model_outgrew_is_really_given_back() -> None:
    held: list[str] = ["nobody looked"]

    def look(run: everstep.Run) -> None:
        deadline = time.monotonic() + 60
        while run.step == 8 and time.monotonic() < deadline:  # the keeper looks when it has the time
            held[:] = [link for link in links() if run_of(directory) in link and link.endswith("(deleted)")]
            if not held:
                break

    def larger() -> dict[str, Any]:
        model = nn.Linear(8, 30)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with everstep.guard(model, optimizer, dir=directory, steps=9, keeper="inline", strict=False) as run:
            while not run.done():
                model(torch.ones(1, 8)).sum().backward()
                optimizer.step()
                look(run)
        return {"held": held}

    with run_directory() as directory:
        assert live(lambda: train_tiny(directory, die)).killed
        assert must_finish(larger)["held"] == []


def test_whoever_takes_over_a_damaged_arena_does_not_seal_into_its_damage(tmp_path: Path) -> None:
    run = "ab" * 16
    layout = lay_out([], ImageInfo(format=FORMAT, run=run, rank=0, world=1), 100)
    arena = Arena.create(tmp_path, run=run, rank=0, world=1, layout=layout, slots=2)
    arena.slots[1][20] ^= 1
    successor = Arena.open(Path(arena.place))
    successor.adopt(layout)
    assert [buffer[: len(layout.header)] for buffer in arena.slots] == [layout.header] * 2
    successor.close()
    arena.close()


@pytest.mark.parametrize(("overcommit", "kilobytes"), [("0", 100), ("1", 100), ("2", 50)])
def test_a_system_that_promises_no_more_than_it_has_says_what_is_left_to_promise(
    overcommit: str, kilobytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 100 kB\nCommitLimit: 80 kB\nCommitted_AS: 30 kB\nPages: 7\n")
    (tmp_path / "overcommit").write_text(f"{overcommit}\n")
    monkeypatch.setattr(host, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(host, "_OVERCOMMIT", tmp_path / "overcommit")
    assert host.free_memory(None) == kilobytes * 1024


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """Shared memory of 6 MiB."""
    place = Path(tempfile.mkdtemp(prefix="everstep-test-", dir=SHARED_MEMORY))
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(place)], capture_output=True).returncode:
        place.rmdir()
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)  # whoever failed may still have it open
    place.rmdir()


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_memory_is_taken_at_once_or_refused(
    kernel: str, small_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Else the first copy would end the process with a signal."""
    if kernel == "old":
        monkeypatch.setattr(host, "_POPULATE_WRITE", 99)  # which no kernel knows
    run = "ab" * 16
    layout = lay_out([], ImageInfo(format=FORMAT, run=run, rank=0, world=1), 2 << 20)
    with pytest.raises(NotEnoughMemory, match="MB are free"):
        Arena.create(small_memory, run=run, rank=0, world=1, layout=layout, slots=3)
    assert os.statvfs(small_memory).f_bavail * os.statvfs(small_memory).f_frsize == 6 << 20  # nothing is left of it
    arena = Arena.create(small_memory, run=run, rank=0, world=1, layout=layout, slots=2)
    free = os.statvfs(small_memory).f_bavail * os.statvfs(small_memory).f_frsize
    assert free < (6 << 20) - 2 * (2 << 20)
    arena.close()
