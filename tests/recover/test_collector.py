"""The garbage collector waits while a program is listed and a checkpoint viewed and applied, and no longer."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lives import run_directory
from torch import nn

import everstep
from everstep.capture.layout import Listing, Subjects
from everstep.errors import Damaged
from everstep.recover import assemble
from everstep.recover.needs import Needs


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    gc.enable() if was_on else gc.disable()


@pytest.mark.parametrize("is_on", [True, False])
def test_it_is_as_it_was_after_an_error(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile = []

    def uncovered(_: object) -> str:
        meanwhile.append(gc.isenabled())
        return "half of it"

    monkeypatch.setattr(assemble, "uncovered", uncovered)
    gc.enable() if is_on else gc.disable()
    with pytest.raises(Damaged, match="half of it"):
        assemble.view({}, 1, Needs(None, 0, 1))
    assert meanwhile == [False]
    assert gc.isenabled() is is_on


def test_it_waits_while_a_program_is_listed_which_a_resume_does_once_beside_the_check_of_guard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model of thousands of tensors takes longer to list than to read."""
    meanwhile: list[bool] = []
    listing = Subjects.listing

    def watched(self: Subjects) -> Listing:
        meanwhile.append(gc.isenabled())
        return listing(self)

    def life(directory: Path, steps: int) -> int | None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with everstep.guard(model, optimizer, dir=directory, keeper="inline", strategy="snapshot") as run:
            for _ in range(steps):
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
                run.done()
        return run.resumed_from

    gc.enable()
    with run_directory() as directory:
        assert life(directory, 1) is None
        monkeypatch.setattr(Subjects, "listing", watched)
        assert life(directory, 0) == 1
    assert meanwhile.count(False) == 2
    assert gc.isenabled()
