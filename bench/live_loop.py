"""What the loops of `bench/live.py` have in common, with Everstep and with others: model, data, and what they note."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

BATCH, DIES_AT = 256, 12


@dataclass(frozen=True)
class Shape:
    """Of a model, square layers; as one word, `384x6`."""

    width: int = 384
    depth: int = 6

    def __str__(self) -> str:
        return f"{self.width}x{self.depth}"

    @classmethod
    def of(cls, word: str) -> Shape:
        return cls(*map(int, word.split("x")))


def model_of(shape: Shape) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(shape.width, shape.width) for _ in range(shape.depth)))


def data_of(shape: Shape) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(16 * BATCH, shape.width)


def note(folder: Path, step: int) -> None:
    """A step is finished: when, and with how much processor time of this process so far."""
    with (folder / f"steps-{os.getpid()}").open("a") as file:
        file.write(f"{step} {time.time()!r} {time.process_time()!r}\n")


def note_commit(folder: Path, seconds: float) -> None:
    with (folder / f"commits-{os.getpid()}").open("a") as file:
        file.write(f"{seconds!r}\n")


def commits_in(folder: Path) -> list[float]:
    """How long each took, of all processes."""
    return [float(line) for path in folder.glob("commits-*") for line in path.read_text().splitlines()]


def note_death(folder: Path) -> None:
    (folder / "killed").write_text(repr(time.time()))


def is_noted_death(folder: Path) -> bool:
    return (folder / "killed").exists()


def steps_in(folder: Path) -> list[tuple[int, float]]:
    """All that was noted, in the order of time."""
    lines = [line.split() for path in folder.glob("steps-*") for line in path.read_text().splitlines()]
    return sorted(((int(step), float(when)) for step, when, _ in lines), key=lambda item: item[1])


def times_of_one(folder: Path) -> list[float]:
    """When one of the processes finished its steps."""
    path = min(folder.glob("steps-*"))
    return [float(line.split()[1]) for line in path.read_text().splitlines()]


def processor_time(folder: Path, first: int) -> float:
    """Of a step, by all ranks together, without the first ones."""
    ranks = [[float(line.split()[2]) for line in path.read_text().splitlines()] for path in folder.glob("steps-*")]
    return sum((times[-1] - times[first]) / (len(times) - 1 - first) for times in ranks)
