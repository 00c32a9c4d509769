"""Steps that exist only as a base and records: read, exported and proven without the program that trained them."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lives import digest, forget_memory, run_directory
from logged import END, Make, adamw, alive, damage, forge, own, past, sgd, tidy
from torch import nn

import everstep
from everstep import Disk
from everstep.capture import form, gradients
from everstep.errors import BadConfig, Damaged, Diverged, EverstepError, NothingToRestore, ReplayedElsewhere
from everstep.store.disk import DiskTier
from everstep.store.manifest import committed_steps


def digest_often() -> None:
    gradients._DIGEST_EVERY = 4


@pytest.fixture(scope="module")
def run() -> Iterator[Path]:
    """After a reboot: bases of some steps, and records of all after the first."""
    with past(before=digest_often) as directory:
        tidy(directory)
        yield directory


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    (tmp_path / "run").parent.mkdir(exist_ok=True)
    return Path(shutil.copytree(run, tmp_path / "run"))


def bases(directory: Path) -> list[int]:
    return committed_steps(DiskTier(directory))


def assert_as_it_was(directory: Path, step: int, states: Path, tmp_path: Path) -> None:
    out = tmp_path / f"exported-{step}"
    assert everstep.open(directory).export(out, step, format="torch") == step
    found, lived = torch.load(out, weights_only=True), alive(states, step)
    for part in ("model", "optimizer", "schedulers"):
        assert digest(found[part]) == digest(lived[part]), (step, part)
    assert found["step"] == step


@pytest.mark.parametrize("make", [adamw, sgd], ids=["adamw", "sgd"])
def test_every_step_is_exported_with_the_bits_that_it_had(make: Make, tmp_path: Path) -> None:
    with past(make) as directory:
        archive = everstep.open(directory)
        assert archive.steps() == list(range(1, END + 1))
        assert len(bases(directory)) < END / 2
        for step in archive.steps():
            assert_as_it_was(directory, step, directory, tmp_path)


def test_a_step_of_the_log_reads_like_a_base(run: Path) -> None:
    archive = everstep.open(run)
    base, between = archive.load(bases(run)[0]), archive.load(bases(run)[0] + 1)
    assert between.keys() == base.keys()
    assert between["step"] == base["step"] + 1
    assert archive.load()["step"] == archive.latest() == END
    plan = archive.plan()
    assert (plan.step, plan.base) == (END, bases(run)[-1])
    assert sum(one.last - one.first + 1 for one in plan.records) == END - bases(run)[-1]
    with pytest.raises(NothingToRestore, match=f"cannot restore step {END + 1}.*newest before it that can be is {END}"):
        archive.load(END + 1)
    assert [(k.step, k.base == k.step) for k in archive.kept()] == [(s, s in bases(run)) for s in archive.steps()]


def test_steps_are_read_from_memory_too(tmp_path: Path) -> None:
    with past(reboot=False) as directory:
        for path in directory.glob("log-*"):
            shutil.rmtree(path)
        archive = everstep.open(directory)
        assert archive.latest() == END
        assert_as_it_was(directory, END, directory, tmp_path)
        assert archive.kept()[-1].sources == ("memory",)


def test_damage_in_the_log_is_named_and_everything_before_it_is_used(copy: Path, run: Path, tmp_path: Path) -> None:
    broken = bases(copy)[-1] + 2
    path = damage(copy, broken)
    archive = everstep.open(copy)
    (found,) = [finding for finding in archive.verify() if finding.problem]
    assert (found.step, found.rank, found.source) == (broken, 0, "disk")
    assert found.file == str(path.relative_to(copy))
    assert f"the bytes of step {broken} do not match their checksum" in found.problem
    assert archive.plan().step == broken - 1
    assert archive.load()["step"] == broken - 1
    assert_as_it_was(copy, broken - 1, run, tmp_path)
    for step in range(broken, END + 1):
        with pytest.raises(Damaged, match=rf"(?s)cannot restore step {step}; .* {broken - 1}\n.*do not match"):
            archive.load(step)
    assert not any(finding.problem for finding in archive.verify(broken - 1))
    assert any(finding.problem for finding in archive.verify(broken))


def test_a_lost_base_is_stepped_over_by_the_records_before_it(copy: Path, run: Path, tmp_path: Path) -> None:
    newest = bases(copy)[-1]
    data = copy / f"step-{newest:010d}" / "rank-00000.safetensors"
    data.write_bytes(bytes(data.stat().st_size))
    for step in (newest, END):
        assert_as_it_was(copy, step, run, tmp_path)
    assert everstep.open(copy).plan().base == bases(copy)[0]


def test_a_torn_tail_is_a_note_and_no_damage(copy: Path) -> None:
    path = copy / everstep.open(copy).log(END)[0][0].file
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5000)
    archive = everstep.open(copy)
    assert archive.latest() == END - 1
    findings = archive.verify()
    assert not any(finding.problem for finding in findings)
    assert any("a torn tail" in finding.note for finding in findings)


def test_replaying_proves_every_record_by_the_next_base_or_a_digest(run: Path) -> None:
    proven = [f for f in everstep.open(run).verify(replay=True) if f.rank == -1]
    assert [f.problem for f in proven] == [""] * len(bases(run))
    assert [f.step for f in proven] == [*bases(run)[1:], END]
    assert "proven by base" in proven[0].note
    assert f"proven by a digest of step {END}" in proven[-1].note


def test_another_gradient_with_right_checksums_is_found_by_repeating_only(copy: Path) -> None:
    base = bases(copy)[-1]
    forge(copy, base + 1)
    archive = everstep.open(copy)
    assert not any(finding.problem for finding in archive.verify())
    (bad,) = [finding for finding in archive.verify(replay=True) if finding.problem]
    assert bad.step == END and "not what it was in training" in bad.problem
    with pytest.raises(Diverged, match=f"Step {base} is a base, and exact"):
        archive.load(END)
    assert archive.load(base)["step"] == base


def test_another_gradient_is_found_by_the_next_base_too() -> None:
    with past() as directory:  # so few steps that there is no digest among them
        first, second = bases(directory)[:2]
        forge(directory, first + 1)
        (bad,) = [f for f in everstep.open(directory).verify(replay=True) if f.problem]
        assert bad.step == second and f"is not what base {second} has" in bad.problem


def test_an_optimizer_that_is_not_of_torch_needs_its_program_between_bases(tmp_path: Path) -> None:
    with past(own) as directory:
        archive = everstep.open(directory)
        first = bases(directory)[0]
        with pytest.raises(EverstepError, match=r"Own is not one of torch.optim.*There are bases of steps 1, "):
            archive.load(first + 1)
        assert_as_it_was(directory, first, directory, tmp_path)
        findings = archive.verify(replay=True)
        assert not any(finding.problem for finding in findings)
        assert any("not repeated" in finding.note for finding in findings)


def on_another_device() -> None:
    digest_often()
    form.ImageInfo = lambda **fields: everstep.types.ImageInfo(**{**fields, "devices": ("cuda",)})  # type: ignore


def test_whoever_reads_what_a_device_trained_is_told_that_the_host_may_round_otherwise() -> None:
    with past(before=on_another_device) as directory:
        archive, base = everstep.open(directory), bases(directory)[-1]
        with pytest.warns(ReplayedElsewhere, match=f"trained on cuda.*digests prove it up to step {END}.*Step {base}"):
            archive.load(END)
        forge(directory, base + 1)
        with pytest.raises(Diverged, match=f"trained on cuda, and the host rounds otherwise. Step {base} is a base"):
            archive.load(END)


def test_a_base_that_the_newest_step_needs_is_not_removed(copy: Path) -> None:
    archive = everstep.open(copy)
    first, newest = bases(copy)[0], bases(copy)[-1]
    for path in list(copy.glob("log-*")):
        if int(path.name.removeprefix("log-")) < newest:
            shutil.rmtree(path)  # so that nothing leads to the newest base
    with pytest.raises(BadConfig, match=f"{newest + 1} to {END} can only be restored from step {newest}"):
        archive.remove(newest)
    assert archive.latest() == END
    assert archive.remove(first) == []
    with pytest.raises(BadConfig, match="last one on disk"):
        archive.remove(newest)
    with pytest.raises(NothingToRestore, match=r"a base and records; remove its base"):
        archive.remove(END)


def test_removing_an_old_base_says_what_goes_with_it_and_gc_takes_its_records(
    copy: Path, run: Path, tmp_path: Path
) -> None:
    archive = everstep.open(copy)
    first, second = bases(copy)[:2]
    assert archive.clean()["segments"] == []
    assert archive.remove(first) == list(range(first + 1, second))
    assert archive.steps() == list(range(second, END + 1))
    spent = archive.clean()["segments"]
    assert spent == [first]
    assert not (copy / f"log-{first:010d}").exists()
    assert_as_it_was(copy, END, run, tmp_path)


def test_removing_a_base_in_the_middle_loses_nothing(copy: Path, run: Path, tmp_path: Path) -> None:
    assert everstep.open(copy).remove(bases(copy)[1]) == []
    assert_as_it_was(copy, END, run, tmp_path)


# -- of two ranks


def as_rank(rank: int, directory: Path) -> None:
    """Parameters are common, what the batches leave in the buffers is this rank's own."""
    store = dist.FileStore(str(directory.parent / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)), broadcast_buffers=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = everstep.guard(model, optimizer, dir=directory, strategy="log", keeper="inline", tiers=[Disk(every=100)])
    torch.manual_seed(rank)
    while run.step < 6:
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.done()
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, directory.parent / f"{run.step}-of-{rank}.pt")
        run.wait()
        dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_records_of_two_ranks_give_what_they_had_in_common_and_what_each_had_alone(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with run_directory() as directory:
        ranks = [context.Process(target=as_rank, args=(rank, directory)) for rank in range(2)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(60)
            one.kill()
        forget_memory(directory)
        archive = everstep.open(directory)
        assert archive.steps() == list(range(1, 7))
        for step in archive.steps():
            for rank in range(2):
                lived = torch.load(directory.parent / f"{step}-of-{rank}.pt", weights_only=True)
                found = archive.load(step, rank=rank)
                assert digest({name: found[f"model.{name}"] for name in lived["model"]}) == digest(lived["model"])
            archive.export(tmp_path / f"{step}", step, format="torch")
            optimizer = torch.load(tmp_path / f"{step}", weights_only=True)["optimizer"]
            assert digest(optimizer) == digest(lived["optimizer"])
        assert not any(finding.problem for finding in archive.verify(replay=True))
        with pytest.raises(BadConfig, match="rank must be from 0 to 1"):
            archive.load(6, rank=2)
        log = directory / archive.log(4)[0][1].file
        assert log.name == "rank-00001.log"
        log.unlink()
        with pytest.raises(Damaged, match="no record of rank 1 of step 2"):
            archive.load(4)


def test_what_is_scavenged_was_read_and_damage_on_the_way_is_passed_over(copy: Path) -> None:
    newest = bases(copy)[-1]
    assert everstep.open(copy).scavenge() == (END, "disk")
    damage(copy, END)
    assert everstep.open(copy).scavenge() == (END - 1, "disk")
    data = copy / f"step-{newest:010d}" / "rank-00000.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    assert everstep.open(copy).scavenge()[0] == everstep.open(copy).load()["step"] == END - 1
    assert everstep.open(copy).plan().base == bases(copy)[-2]
