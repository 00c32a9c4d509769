"""What people are told whose program begins, goes on or ends otherwise than they may have meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import everstep
from everstep import events
from everstep.errors import Mismatch, RunOver


class _Numbers(Dataset[Tensor]):
    def __init__(self, count: int = 32) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class _Program:
    """A life of a small training."""

    def __init__(self, directory: Path, *, batch: int = 4, items: int = 32, lr: float = 0.01, **options: Any) -> None:
        torch.manual_seed(7)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.loader = DataLoader(_Numbers(items), batch, shuffle=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4) if options.pop("schedules", False) else None
        if options.pop("tells", False):
            options["scheduler"] = self.scheduler
        self.run = everstep.guard(
            self.model, self.optimizer, self.loader, dir=directory, keeper="inline", **options
        )  # fmt: skip
        self.seen: list[float] = []

    def step(self, batch: Tensor) -> None:
        self.model(batch).sum().backward()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()
        self.seen += batch[:, 0].tolist()

    def train(self, steps: int) -> list[float]:
        """Until the run has made so many steps in this life."""
        for count, batch in enumerate(self.run, 1):
            self.step(batch)
            if count == steps:
                self.run.done()
                break
        self.run.close()
        return self.seen


@pytest.fixture(autouse=True)
def _nobody_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_SAID", {})


def test_whoever_goes_on_hears_from_where(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _Program(tmp_path).train(3)
    assert capfd.readouterr().err == ""
    _Program(tmp_path).train(8)
    assert capfd.readouterr().err == f"everstep: {tmp_path} goes on from step 3 (disk)\n"
    _Program(tmp_path).run.close()
    assert "goes on from step 8 (disk), where it had come to its end: nothing is left to do" in capfd.readouterr().err


@pytest.mark.parametrize("updates", [2, 60])
def test_a_loop_over_the_loader_instead_of_the_run_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], updates: int
) -> None:
    program = _Program(tmp_path, items=4 * 60)
    for _, batch in zip(range(updates), program.loader, strict=False):
        program.step(batch)
    said = capfd.readouterr().err
    assert ("50 updates, and nobody has said where a step ends" in said) == (updates == 60)
    program.run.close()
    said += capfd.readouterr().err
    assert said.count("iterate the run and not the loader") == 1


def test_a_loop_that_makes_many_updates_in_a_step_is_not_told_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = _Program(tmp_path)
    for batch in program.run:
        for _ in range(60 if program.run.step else 1):
            program.step(batch)
    assert capfd.readouterr().err == ""


def test_a_run_that_is_over_gives_no_batches_and_takes_no_steps(tmp_path: Path) -> None:
    program = _Program(tmp_path)
    for batch in program.run:
        program.step(batch)
    with pytest.raises(RunOver, match=r"over, at step 8: iterating it once gives the batches of all its epochs"):
        next(iter(program.run))
    with pytest.raises(RunOver, match="over"):
        program.run.done()


def test_settings_of_the_program_that_are_not_used_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _Program(tmp_path).train(2)
    program = _Program(tmp_path, lr=0.5)
    said = capfd.readouterr().err
    assert "lr of optimizer, group 0, was 0.01 and is 0.5 in this program; 0.01 is used" in said
    assert program.optimizer.param_groups[0]["lr"] == 0.01
    assert said.count("lr") == 1 and "betas" not in said
    program.run.close()


def test_a_learning_rate_that_changes_in_the_loop_is_no_other_setting(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _Program(tmp_path, schedules=True, tells=True).train(5)
    program = _Program(tmp_path, schedules=True, tells=True)
    assert program.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    program.run.close()
    assert capfd.readouterr().err == f"everstep: {tmp_path} goes on from step 5 (disk)\n"


def test_a_scheduler_of_whom_guard_was_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _Program(tmp_path, schedules=True).run.close()
    assert "a learning rate scheduler was not given to guard()" in capfd.readouterr().err


@pytest.mark.parametrize("batch", [2, 6, 12])
def test_batches_of_another_size_go_on_with_the_very_next_sample(tmp_path: Path, batch: int) -> None:
    whole = _Program(tmp_path / "whole", items=48).train(12)
    before = _Program(tmp_path / "run", items=48).train(3)
    after = _Program(tmp_path / "run", items=48, batch=batch).train(100)
    assert before + after == whole


def test_batches_of_a_size_that_would_lose_samples_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _Program(tmp_path).train(3)
    with pytest.raises(Mismatch, match="a batch had 4 samples and has 8: 12 were taken"):
        _Program(tmp_path, batch=8)
    program = _Program(tmp_path, batch=8, strict=False)
    assert "a batch had 4 samples and has 8" in capfd.readouterr().err
    program.run.close()


def test_a_data_set_that_has_grown_is_refused_in_the_middle_of_a_pass(tmp_path: Path) -> None:
    _Program(tmp_path).train(3)
    with pytest.raises(Mismatch, match="the data set had 32 items and has 64"):
        _Program(tmp_path, items=64)
    _Program(tmp_path).train(100)
    assert len(_Program(tmp_path, items=64, epochs=2).train(100)) == 64


def test_a_partner_that_one_node_cannot_have_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zmq")
    _Program(tmp_path, tiers=[everstep.Partner()]).run.close()
    assert "no step is protected: other nodes are to do that, and this job has only one" in capfd.readouterr().err


def test_a_data_set_that_cannot_say_its_length_is_as_good(tmp_path: Path) -> None:
    class Endless(_Numbers):
        def __len__(self) -> int:
            raise TypeError("it has none")

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Endless(), 4, sampler=range(12))
    with everstep.guard(model, optimizer, loader, dir=tmp_path, keeper="inline") as run:
        assert len(list(run)) == 3


def test_after_the_last_batch_of_a_pass_another_size_loses_nothing(tmp_path: Path) -> None:
    _Program(tmp_path, items=10, epochs=2).train(3)
    assert len(_Program(tmp_path, items=10, batch=5, epochs=2).train(100)) == 10
