"""The command line on runs whose steps are bases and records."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import digest, run_of
from logged import END, alive, damage, own, past, tidy
from said import Cli

import everstep
from everstep import Disk, Memory
from everstep.capture import form
from everstep.keeper.logbook import Logbook
from everstep.recover.reach import kept_steps
from everstep.store.disk import DiskTier
from everstep.store.manifest import committed_steps
from everstep.types import Holding, ImageInfo, Records, Source, Survey

HELD = 3  # records that only a ring has

SEE_WHAT_WAS_LOADED = """
import sys
from everstep.cli import app
app(sys.argv[1:], standalone_mode=False)
sys.stderr.write(" ".join(name for name in ("torch",) if name in sys.modules))
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Path]:
    """After a reboot."""
    with past() as directory:
        tidy(directory)
        yield directory


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def bases(directory: Path) -> list[int]:
    return committed_steps(DiskTier(directory))


def keep_the_last_in_the_ring() -> None:
    """The keeper dies with its trainer before it has written the last records."""
    take = Logbook.take

    def some(self: Logbook, ring: Any, **how: Any) -> int:
        newest = max((seal.step for seal in ring.seals().values()), default=0)
        return 0 if newest > END - HELD else take(self, ring, **how)

    Logbook.take = some  # type: ignore[method-assign]


def wait_while_it_writes(run: everstep.Run) -> None:
    run.wait("durable" if run.step <= END - HELD else "sealed")


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """Killed with records in the ring that are nowhere else; its memory is in `memory` beside tmp_path's own."""
    memory = tmp_path / "memory"
    memory.mkdir()
    tiers = [Disk(every=10**6), Memory(path=str(memory))]
    with past(before=keep_the_last_in_the_ring, at_step=wait_while_it_writes, tiers=tiers, reboot=False) as directory:
        yield directory


@pytest.mark.parametrize("words", ["ls", "show --log", "show --log --step 3", "status", "verify", "plan"])
def test_reading_the_log_starts_without_torch(words: str, run: Path) -> None:
    command = [sys.executable, "-c", SEE_WHAT_WAS_LOADED, *words.split(), str(run)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    assert ended.stdout


def test_ls_has_a_row_for_each_base_and_one_for_the_records_after_it(cli: Cli, run: Path) -> None:
    out = cli("ls", run).out
    rows = re.findall(r"^│ +([\d-]+) .*│ (.*?) +│$", out, re.MULTILINE)
    first, second = bases(run)
    assert rows == [
        (str(first), "base"),
        (f"{first + 1}-{second - 1}", f"{second - first - 1} records after base {first}"),
        (str(second), "base"),
        (f"{second + 1}-{END}", f"{END - second} records after base {second}"),
    ]
    kept = cli("ls", run, "--json").json
    assert [k["step"] for k in kept] == list(range(1, END + 1))
    assert {(k["base"], tuple(k["sources"])) for k in kept} == {(first, ("disk",)), (second, ("disk",))}


def test_a_base_is_not_said_to_be_where_only_its_records_are() -> None:
    """As of a run that lives: memory has newer bases than the disk, whose records lead as far."""

    def base(source: Source, step: int) -> Holding:
        return Holding(source=source, node="a", step=step, rank=0, world=1, generation="g", bytes=9, cut_time=1.0)

    records = Records(source="disk", node="a", rank=0, world=1, first=2, last=6, bytes=3, cut_time=2.0)
    found = kept_steps(Survey(holdings=(base("disk", 1), base("memory", 4)), records=(records,)))
    assert [(k.step, k.base, k.sources) for k in found] == [
        (1, 1, ("disk",)), (2, 1, ("disk",)), (3, 1, ("disk",)), (4, 4, ("memory",)), (5, 4, ("disk",)),
        (6, 4, ("disk",)),
    ]  # fmt: skip


def test_show_prints_what_every_update_was_called_with(cli: Cli, run: Path) -> None:
    shown = cli("show", run, "--log", "--json").json
    assert shown["problems"] == []
    assert [(r["step"], r["rank"], r["codec"]) for r in shown["records"]] == [
        (s, 0, "dense") for s in range(2, END + 1)
    ]
    rates = [r["groups"][0][0]["lr"] for r in shown["records"]]
    assert rates == pytest.approx([0.01 * 0.1 ** ((step - 1) // 3) for step in range(2, END + 1)])
    (one,) = cli("show", run, "--log", "--step", 3, "--json").json["records"]
    assert one == shown["records"][1]
    assert one["groups"][0][0]["betas"] == [0.9, 0.999]
    assert re.fullmatch(r"[0-9a-f]{16}", one["checksum"]) and (one["absent"], one["digested"]) == (0, False)
    out = cli("show", run, "--log").out
    assert re.search(rf" 3 │ +0 │ .*kB │ dense │ lr 0.01, betas 0.9 0.999.* {one['checksum']} ", out)
    assert cli("show", run, "--log", "--step", END + 1).code == 3
    said = cli("show", run, "--step", 3)
    assert said.code == 3 and "It is a base and records: everstep show --log --step 3 shows" in said.err
    assert "records" not in cli("show", run, "--step", END + 1).err


def test_damage_in_the_log_is_exit_code_4_and_the_records_before_it_are_shown(cli: Cli, copy: Path) -> None:
    broken = bases(copy)[-1] + 2
    path = damage(copy, broken)
    said = cli("verify", copy)
    assert said.code == 4
    assert f"of {path.relative_to(copy)}, after step {broken - 1}" in re.sub(r"\s*│\n│[ │]*", " ", said.out)
    assert "1 damaged" in said.out
    found = [f for f in cli("verify", copy, "--json").json if f["problem"]]
    assert [(f["step"], f["file"]) for f in found] == [(broken, str(path.relative_to(copy)))]
    assert cli("verify", copy, "--step", broken - 1).code == 0
    assert cli("verify", copy, "--replay").code == 4
    shown = cli("show", copy, "--log", "--json").json
    assert shown["records"][-1]["step"] == broken - 1
    assert "damage at byte" in shown["problems"][0]
    said = cli("plan", copy)
    assert f"step {broken - 1} would be restored" in said.out
    assert "do not match their checksum" in said.out
    assert cli("export", copy, copy.parent / "out", "--step", broken).code == 4


def test_verify_replays_if_asked(cli: Cli, run: Path) -> None:
    said = cli("verify", run, "--replay")
    assert (said.code, said.err) == (0, "")
    first, second = bases(run)
    assert f"steps {first + 1} to {second} repeated from base {first}, proven by base {second}" in said.out


def test_plan_shows_the_base_and_the_records(cli: Cli, run: Path) -> None:
    plan = cli("plan", run, "--json").json
    base = bases(run)[-1]
    assert (plan["step"], plan["base"]) == (END, base)
    assert [(r["first"], r["last"], r["source"]) for r in plan["records"]] == [(base + 1, END, "disk")]
    out = cli("plan", run).out
    assert f"base {base}, then {END - base} step(s) repeated from" in out
    assert re.search(rf"disk .* {base + 1}-{END} ", out)
    lost = cli("plan", run, "--lost", "disk", "--json").json
    assert (lost["step"], lost["records"]) == (None, [])


def test_a_reboot_loses_only_what_is_not_yet_in_the_log(cli: Cli, held: Path, tmp_path: Path) -> None:
    status = cli("status", held, "--memory", tmp_path / "memory", "--json").json
    assert (status["step"], status["sealed_step"], status["durable_step"]) == (END, END, END - HELD)
    assert status["ring"]["unwritten"] == HELD
    assert [(e["event"], e["steps"]) for e in status["exposure"]] == [
        ("the process dies", 0),
        ("the machine reboots", HELD),
        ("this disk is lost", END),
    ]
    assert f"{HELD} of them not on disk" in cli("status", held, "--memory", tmp_path / "memory").out
    plan = cli("plan", held, "--memory", tmp_path / "memory", "--json").json
    assert plan["step"] == END
    assert cli("plan", held, "--memory", tmp_path / "memory", "--lost", "memory", "--json").json["step"] == END - HELD
    shown = cli("show", held, "--log", "--memory", tmp_path / "memory", "--json").json
    assert [r["step"] for r in shown["records"] if r["source"] == "memory"] == list(range(END - HELD + 1, END + 1))


def test_gc_writes_what_only_a_ring_holds_and_frees_it(cli: Cli, held: Path, tmp_path: Path) -> None:
    words = ("gc", held, "--memory", tmp_path / "memory")
    (found,) = cli(*words, "--dry-run", "--json").json["memory"]
    assert (found["run"], found["outcome"]) == (run_of(held), f"holding step {END}")
    before = bases(held)
    done = cli(*words, "--json").json
    assert done["memory"][0]["outcome"] == f"step {END} is on disk; removed"
    assert not list((tmp_path / "memory").rglob("*.safetensors"))
    assert all(step == 1 or (held / f"step-{step:010d}").exists() for step in before)
    assert cli("ls", held, "--json").json[-1]["step"] == END
    out = tmp_path / "out.pt"
    assert cli("export", held, out, "--format", "torch").code == 0
    assert digest(torch.load(out, weights_only=True)["optimizer"]) == digest(alive(held, END)["optimizer"])
    assert cli(*words).out == "nothing to remove\n"


def test_rm_says_what_goes_with_a_base(cli: Cli, copy: Path, tmp_path: Path) -> None:
    first, second = bases(copy)
    said = cli("rm", copy, first)
    assert (said.code, said.out) == (0, f"step {first} is gone, and with it {first + 1} to {second - 1} of the log\n")
    memory = ("--memory", tmp_path)  # other tests have runs between two lives
    assert cli("gc", copy, "--json", *memory).json["disk"]["segments"] == [first]
    said = cli("rm", copy, second)
    assert said.code == 2 and "last one on disk that can be restored" in said.err


def on_another_device() -> None:
    form.ImageInfo = lambda **fields: ImageInfo(**{**fields, "devices": ("cuda",)})  # type: ignore


def test_export_says_when_a_device_trained_what_the_host_repeated(cli: Cli, tmp_path: Path) -> None:
    with past(before=on_another_device) as directory:
        said = cli("export", directory, tmp_path / "out", "--step", 3, "--json")
        assert (said.code, said.json["step"]) == (0, 3)
        assert "trained on cuda and repeated on the host" in said.json["notes"][0]
        assert said.err.startswith("everstep: step 3 was trained on cuda")
        assert cli("export", directory, tmp_path / "base", "--step", 1, "--json").json["notes"] == []


def test_an_optimizer_of_the_user_is_a_sentence_and_not_a_trace(cli: Cli, tmp_path: Path) -> None:
    with past(own) as directory:
        said = cli("export", directory, tmp_path / "out", "--step", 3)
        assert said.code == 1
        assert re.search(r"Own is not one of torch.optim.*There are bases of steps 1, ", said.err)
