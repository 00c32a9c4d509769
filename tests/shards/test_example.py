"""The example of docs/sharded.md: killed, started again, and started with other ranks and another layout."""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
from pathlib import Path

import harness
from harness import Stage
from lives import MeetingPlace, way_to

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_fsdp.py"


def _main(words: list[str], rank: int, world: int, port: int, said: Path) -> None:
    """As torchrun would start it, in a process that has torch already."""
    with said.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {**{name: str(value) for name, value in names.items()}, **way_to(port)}
    sys.argv = [str(EXAMPLE), *words]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def started(directory: Path, *words: str, world: int = 2, ends: int = 0) -> str:
    """What the ranks of one life said. `ends`: how the last of them ended."""
    place = MeetingPlace()
    files = [directory / f"said-{rank}" for rank in range(world)]
    arguments = ["--dir", str(directory / "run"), *words]
    ranks = [
        harness._forked.Process(target=_main, args=(arguments, rank, world, place.port, files[rank]))
        for rank in range(world)
    ]
    try:
        for process in ranks:
            process.start()
        for process in reversed(ranks):
            process.join(120.0)
            if ends:
                break
        said = "\n".join(file.read_text() for file in files)
        assert ranks[-1].exitcode == ends, said
    finally:
        for process in ranks:
            process.kill()
            process.join()
        place.close()
    return said


def bits(said: str) -> set[str]:
    return set(re.findall(r"step 12, \d+ tensors, bits (\w{16})", said))


def test_the_example_is_killed_and_goes_on_with_the_same_bits_and_then_in_another_layout(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for place in (one, two):
        place.mkdir()
    try:
        unbroken = bits(started(one, "--steps", "12"))
        started(two, "--steps", "12", "--kill-at", "6", ends=-signal.SIGKILL)
        again = started(two, "--steps", "12")
        begun = {int(step) for step in re.findall(r"goes on from step (\d+)", again)}
        assert len(begun) == 1 and begun <= {4, 5, 6}
        assert len(unbroken) == 1 and bits(again) == unbroken
        alone = started(two, "--steps", "12", "--layout", "single", world=1)
        assert "rank 0 of 1, single: goes on from step 12" in alone and bits(alone) == unbroken
    finally:
        for place in (one, two):
            Stage("fsdp", place).clean_up()
