"""The command line and the Archive behind it, on a run that has ended, one that was killed, and one that is alive."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from lives import digest, live, must_finish, run_directory, tiny, train_tiny
from said import Cli, die_at_five
from torch import nn

import everstep
from everstep import Disk, Memory
from everstep.errors import BadConfig, Damaged, NothingToRestore

SELDOM = [Disk(every=100)]


# -- three runs


def train(directory: Path, aside: Path) -> dict[str, Any]:
    """Six steps, of which 2, 4 and 6 are on disk; what is alive at the end goes aside by torch's own means."""
    model, optimizer, loader = tiny()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    extra = {"note": "a string", "ema": torch.full((3,), 0.1)}
    run = everstep.guard(
        model, optimizer, loader, dir=directory, scheduler=scheduler, extra=extra, steps=6, epochs=None,
        keeper="inline", tiers=SELDOM, keep=5,
    )  # fmt: skip
    for x, y in run:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if run.step in (2, 4):
            run.wait()
    alive = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(alive, aside)
    return {"step": run.step}


@pytest.fixture(scope="module")
def finished() -> Iterator[Path]:
    """A finished run; `alive.pt` beside it is the state at its end."""
    with run_directory() as directory:
        assert must_finish(lambda: train(directory, directory.parent / "alive.pt"))["step"] == 6
        past = everstep.open(directory)
        for step in {*past.steps()} - {2, 4, 6}:
            past.remove(step)  # the first step that the keeper meets is written at once
        yield directory


@pytest.fixture
def alive(finished: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(finished.parent / "alive.pt", weights_only=True)
    return state


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """The finished run, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@pytest.fixture(scope="module")
def killed() -> Iterator[Path]:
    """A run with step 3 on disk and steps up to 5 in memory, whose trainer and keeper are dead."""
    with run_directory() as directory:
        assert live(lambda: train_tiny(directory, die_at_five, tiers=SELDOM)).killed
        yield directory


# -- every command, for people and for machines


def test_ls_lists_what_can_be_restored(cli: Cli, finished: Path, killed: Path) -> None:
    said = cli("ls", finished, "--json")
    assert (said.code, said.err) == (0, "")
    assert [set(kept) for kept in said.json] == [
        {"step", "world", "bytes", "cut_time", "sources", "base", "replica"}
    ] * 3
    assert [(kept["step"], kept["world"], kept["sources"]) for kept in said.json] == [
        (2, 1, ["disk"]),
        (4, 1, ["disk"]),
        (6, 1, ["disk"]),
    ]
    kept = {kept["step"]: kept["sources"] for kept in cli("ls", killed, "--json").json}
    assert kept[3][-1] == "disk"
    assert kept[5] == ["memory"]
    said = cli("ls", finished)
    assert said.code == 0
    assert re.search(r"6 .* 1 .*kB.* ago .*disk", said.out)


def test_ls_as_a_process_is_quiet_on_stderr(finished: Path) -> None:
    said = subprocess.run([sys.executable, "-m", "everstep.cli", "ls", str(finished)], capture_output=True, timeout=60)
    assert (said.returncode, said.stderr) == (0, b"")
    assert b"disk" in said.stdout


def test_version(cli: Cli) -> None:
    said = cli("--version")
    assert (said.code, said.out, said.err) == (0, f"everstep {everstep.__version__}\n", "")


def test_help_names_every_command(cli: Cli) -> None:
    said = cli("--help")
    assert said.code == 0
    for command in ("ls", "show", "status", "verify", "plan", "tune", "export", "rm", "gc"):
        assert re.search(rf"^\s+{command}\s+\S", said.out, re.MULTILINE)
        assert cli(command, "--help").code == 0


def test_show_tells_what_a_step_is_made_of(cli: Cli, finished: Path) -> None:
    shown = cli("show", finished, "--json").json
    assert set(shown) == {"commit", "parts"}
    assert set(shown["commit"]) == {
        "format", "run", "generation", "step", "world", "parts", "cut_time", "committed_time", "digest",
    }  # fmt: skip
    assert shown["commit"]["step"] == 6
    (part,) = shown["parts"]
    assert part["torch"] == torch.__version__
    names = {piece["name"] for piece in part["pieces"]}
    assert {"model.0.weight", "model.1.running_mean", "optimizer.state.model.3.bias.exp_avg_sq"} <= names
    assert cli("show", finished, "--step", 4, "--json").json["commit"]["step"] == 4
    said = cli("show", finished, "--tensors")
    assert said.code == 0
    assert "step 6 of run" in said.out
    assert "model.1.running_mean" in said.out


def test_verify_reads_everything_and_finds_it_sound(cli: Cli, finished: Path, killed: Path) -> None:
    said = cli("verify", finished, "--json")
    assert said.code == 0
    keys = {"step", "source", "rank", "bytes", "problem", "checked", "file", "note", "node", "asked"}
    assert [set(found) for found in said.json] == [keys] * 3
    assert {(f["step"], f["rank"], f["problem"]) for f in said.json} == {(2, 0, ""), (4, 0, ""), (6, 0, "")}
    assert [f["step"] for f in cli("verify", finished, "--step", 4, "--json").json] == [4]
    assert cli("verify", finished).out.endswith("3 sound, 0 damaged\n")
    assert {f["source"] for f in cli("verify", killed, "--json").json} == {"memory", "disk"}


def test_plan_says_what_a_restart_would_do(cli: Cli, killed: Path) -> None:
    plan = cli("plan", killed, "--json").json
    assert set(plan) == {"step", "world", "parts", "rejections", "records", "values", "parities", "base", "times"}
    assert (plan["step"], plan["world"], plan["rejections"]) == (5, 1, [])
    assert set(plan["parts"][0]) == {
        "source", "node", "step", "rank", "world", "generation", "bytes", "cut_time", "checked", "replica",
        "everywhere",
    }  # fmt: skip
    lost = cli("plan", killed, "--lost", "memory", "--json").json
    assert (lost["step"], lost["parts"][0]["source"]) == (3, "disk")
    assert {"step": 5, "source": "memory", "reason": "memory is taken to be lost", "certain": True} in lost[
        "rejections"
    ]
    assert "step 5 would be restored" in cli("plan", killed).out
    said = cli("plan", killed, "--lost", "disk").out
    assert "step 5 would be restored" in said and "passed over" not in said
    assert re.search(r"5 │ memory │ memory is taken to be lost", cli("plan", killed, "--lost", "memory").out)
    said = cli("plan", killed, "--lost", "memory", "--lost", "disk")
    assert said.code == 0
    assert "nothing can be restored" in said.out
    assert "disk is taken to be lost" in said.out


def test_status_of_a_dead_run(cli: Cli, killed: Path) -> None:
    status = cli("status", killed, "--json").json
    assert set(status) == {
        "run", "directory", "alive", "trainers", "keeper", "step", "sealed_step", "durable_step", "arena_bytes",
        "ring", "exposure", "replica", "protected_step", "shared_step", "flushes", "silent_nodes", "trouble",
        "went_on",
    }  # fmt: skip
    assert (status["protected_step"], status["shared_step"], status["flushes"]) == (None, None, [])
    assert (status["alive"], status["trainers"], status["keeper"]) == (False, [], None)
    assert (status["step"], status["sealed_step"], status["durable_step"]) == (5, 5, 3)
    assert [(e["event"], e["restored_from"], e["steps"]) for e in status["exposure"]] == [
        ("the process dies", "memory, step 5", 0),
        ("the machine reboots", "disk, step 3", 2),
        ("this disk is lost", "nothing", 5),
    ]
    said = cli("status", killed)
    assert "trainers: none; keeper: none" in said.out
    assert re.search(r"this disk is lost .* nothing .* 5 .* all of it", said.out)


def test_status_of_a_live_run_shows_small_losses(cli: Cli) -> None:
    with run_directory() as directory:
        child = os.fork()
        if child == 0:
            try:
                train_tiny(directory, lambda run: time.sleep(0.02), steps=10**6, tiers=[Disk(every=1)])
            finally:
                os._exit(1)
        try:
            status: dict[str, Any] = {}
            deadline = time.monotonic() + 60
            while not status.get("durable_step") and time.monotonic() < deadline:
                time.sleep(0.1)
                said = cli("status", directory, "--json")
                status = said.json if said.code == 0 else {}
            os.kill(child, signal.SIGSTOP)  # or it is some steps further when the second half of it is read
            os.waitpid(child, os.WUNTRACED)
            status = cli("status", directory, "--json").json
            process, reboot, disk = status["exposure"]
            assert status["alive"] and status["trainers"] == [child]
            assert process["steps"] <= 1 and process["seconds"] < 60
            assert process["restored_from"].startswith("memory")
            assert reboot["restored_from"].startswith("disk") and reboot["steps"] < status["step"]
            assert (disk["restored_from"], disk["seconds"]) == ("nothing", None)
            assert f"trainers: {child};" in cli("status", directory).out
            said = cli("scavenge", directory)
            assert said.code == 6 and said.err.startswith(f"everstep: {directory} is in use by process {child} on")
            assert "nobody trains" not in cli("halt", directory, "--now").out
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


# -- exit codes


@pytest.mark.parametrize(
    "words",
    [
        ["ls"],
        ["nonsense"],
        ["ls", "DIR", "--colour"],
        ["show", "DIR", "--step", "six"],
        ["plan", "DIR", "--lost", "the keys"],
        ["export", "DIR", "NEW", "--format", "onnx"],
        ["export", "DIR", "NEW", "--only", "biases"],
        ["export", "DIR", "DIR"],
        ["gc", "DIR", "--keep", "0", "--memory", "NEW"],
    ],
    ids=" ".join,
)
def test_a_wrong_argument_is_exit_code_2(words: list[str], cli: Cli, finished: Path, tmp_path: Path) -> None:
    memory = tmp_path / "new"
    if "--memory" in words:
        memory.mkdir()
    said = cli(*({"DIR": finished, "NEW": memory}.get(word, word) for word in words))
    assert said.code == 2, said.err
    assert said.err and not said.out
    assert "Traceback" not in said.err


def test_nothing_to_restore_is_exit_code_3(cli: Cli, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("not a run")
    for place in ("nowhere", "empty", "file"):
        for words in (
            ["ls"],
            ["show"],
            ["status"],
            ["verify"],
            ["plan"],
            ["tune"],
            ["rm"],
            ["export"],
            ["gc", "--dry-run"],
        ):
            rest = {"rm": [1], "export": [tmp_path / "out"]}.get(words[0], [])
            said = cli(*words, tmp_path / place, *rest)
            assert said.code == 3, (words, place, said)
            why = "it is not there" if place == "nowhere" else "it has no run.json"
            assert f"not a run's directory: {why}; give what was dir= of guard()" in said.err
    for words in (["show", finished, "--step", 5], ["verify", finished, "--step", 5], ["rm", finished, 5]):
        said = cli(*words)
        assert said.code == 3, said
        assert "[2, 4, 6]" in said.err
    assert cli("export", finished, tmp_path / "out", "--step", 5).code == 3
    assert not (tmp_path / "out").exists()


def test_a_run_that_has_no_step_yet_is_empty_and_not_an_error(cli: Cli, copy: Path, tmp_path: Path) -> None:
    for path in copy.glob("step-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    said = cli("ls", copy)
    assert (said.code, said.err) == (0, "")
    assert "no checkpoint that can be restored yet" in said.out
    assert cli("ls", copy, "--json").json == []
    assert cli("status", copy, "--json").json["step"] == 0
    assert "step 0; sealed in memory: nothing; durable on disk: nothing\n" in cli("status", copy).out
    assert cli("plan", copy, "--json").json["step"] is None
    assert cli("show", copy).code == 3
    assert cli("export", copy, tmp_path / "out").code == 3


def damage(run: Path, step: int) -> None:
    data = run / f"step-{step:010d}" / "rank-00000.safetensors"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def test_damage_is_exit_code_4_and_passed_over(cli: Cli, copy: Path, tmp_path: Path) -> None:
    damage(copy, 6)
    said = cli("verify", copy, "--json")
    assert said.code == 4
    assert [(f["step"], bool(f["problem"])) for f in said.json] == [(2, False), (4, False), (6, True)]
    said = cli("verify", copy)
    assert said.code == 4
    assert f"2 sound, 1 damaged\neverstep plan {copy} says what a restart takes instead\n" in said.out
    assert "do not match their checksum" in said.out
    assert cli("verify", copy, "--step", 4).code == 0
    plan = cli("plan", copy, "--json").json
    assert plan["step"] == 4
    assert plan["rejections"][0]["step"] == 6
    said = cli("export", copy, tmp_path / "newest.safetensors", "--json")
    assert (said.code, said.json["step"]) == (0, 4)
    [line] = said.err.splitlines()
    assert line.startswith("everstep: step 6 was passed over: ") and line.endswith(f"; everstep verify {copy}")
    assert "do not match their checksum" in line and said.json["notes"] == [line.removeprefix("everstep: ")]
    assert cli("export", copy, tmp_path / "four.safetensors", "--step", 4).err == ""
    said = cli("export", copy, tmp_path / "six.safetensors", "--step", 6)
    assert said.code == 4
    assert not (tmp_path / "six.safetensors").exists()


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp"])
def test_an_export_that_the_disk_refuses_is_named_and_leaves_nothing(
    finished: Path, tmp_path: Path, format: str
) -> None:
    (tmp_path / "file").touch()
    full, nowhere, under_a_file = tmp_path / "out", Path("/proc/out"), tmp_path / "file" / "out"
    for path, most in ((full, (1000, 1000)), (nowhere, None), (under_a_file, None)):
        ended = subprocess.run(
            [sys.executable, "-m", "everstep.cli", "export", finished, path, "--format", format],
            capture_output=True, text=True, timeout=60,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, most) if most else None,
        )  # fmt: skip
        assert ended.returncode == 7, ended.stderr
        assert "it cannot be written" in ended.stderr and f"'{path}'" in ended.stderr
        assert ended.stderr.count("\n") == 1, ended.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_damaged_list_of_places_is_no_lost_state_and_is_written_anew_by_the_next_start(cli: Cli, copy: Path) -> None:
    sound = (copy / "tiers.json").read_bytes()
    for damaged in (sound[:-9], sound.replace(b"memory", b"m3mory")):
        (copy / "tiers.json").write_bytes(damaged)
        said = cli("ls", copy)
        assert said.code == 4
        assert "only names other places of the run" in said.err and "start the run, which writes it anew" in said.err
    assert must_finish(lambda: train_tiny(copy, strict=False, steps=7))["resumed_from"] == 6
    assert (copy / "tiers.json").read_bytes() == sound


def test_rm_refuses_the_last_step_that_can_be_restored(cli: Cli, copy: Path) -> None:
    damage(copy, 4)
    assert cli("rm", copy, 2, "--json").json == {"removed": [2], "gone_with_them": []}
    said = cli("rm", copy, 6)
    assert said.code == 2
    assert "last one on disk that can be restored" in said.err
    said = cli("rm", copy, 4)
    assert (said.code, said.out) == (0, "step 4 is gone\n")
    assert cli("rm", copy, 6).code == 2
    assert [kept["step"] for kept in cli("ls", copy, "--json").json] == [6]
    assert not (copy / "step-0000000004").exists()


# -- letting go


def test_gc_saves_what_only_memory_holds_and_frees_it(cli: Cli, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    with run_directory() as directory:
        tiers = [Disk(every=100), Memory(path=str(memory))]
        assert live(lambda: train_tiny(directory, die_at_five, tiers=tiers)).killed
        words = ("gc", directory, "--memory", memory)
        (found,) = cli(*words, "--dry-run", "--json").json["memory"]
        assert set(found) == {"run", "bytes", "outcome"}
        assert found["outcome"] == "holding step 5" and found["bytes"] > 0
        assert "holding step 5" in cli(*words, "--dry-run").out
        durable = [kept["step"] for kept in cli("ls", directory, "--json").json if "disk" in kept["sources"]]
        assert durable[-1] == 3
        done = cli(*words, "--keep", 1, "--json").json
        assert done["memory"][0]["outcome"] == "step 5 is on disk; removed"
        assert done["disk"]["retired"] == durable
        assert not list(memory.rglob("*.safetensors"))
        assert cli("ls", directory, "--memory", memory, "--json").json[-1]["sources"] == ["disk"]
        said = cli(*words)
        assert (said.code, said.out) == (0, "nothing to remove\n")
        assert must_finish(lambda: train_tiny(directory, tiers=tiers))["resumed_from"] == 5


# -- getting it out


def assert_same(found: Any, expected: Any) -> None:
    assert digest(found) == digest(expected)


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer, _ = tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model, optimizer


def test_an_export_to_safetensors_is_the_live_state(
    cli: Cli, finished: Path, alive: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out.safetensors"
    said = cli("export", finished, out, "--json")
    assert (said.code, said.json) == (0, {"step": 6, "path": str(out), "format": "safetensors", "notes": []})
    tensors = safetensors.torch.load_file(out)
    assert_same({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}, alive["model"])
    names = [f"model.{name}" for name, _ in fresh()[0].named_parameters()]
    for index, name in enumerate(names):
        for key, value in alive["optimizer"]["state"][index].items():
            assert torch.equal(tensors[f"optimizer.state.{name}.{key}"], value)
    with safetensors.safe_open(out, "pt") as opened:
        assert opened.metadata()["everstep.step"] == "6"


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_only_the_model_is_its_own_state_dict(
    format: str, cli: Cli, finished: Path, alive: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    said = cli("export", finished, out, "--only", "model", "--format", format)
    assert (said.code, said.out) == (0, f"step 6 is in {out}\n")
    state = safetensors.torch.load_file(out) if format == "safetensors" else torch.load(out, weights_only=True)
    model, _ = fresh()
    model.load_state_dict(state)
    assert_same(model.state_dict(), alive["model"])


def test_an_export_to_torch_loads_without_trusting_pickle(
    cli: Cli, finished: Path, alive: dict[str, Any], tmp_path: Path
) -> None:
    assert cli("export", finished, tmp_path / "out.pt", "--format", "torch").code == 0
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    model, optimizer = fresh()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert_same(model.state_dict(), alive["model"])
    assert_same(optimizer.state_dict(), alive["optimizer"])
    assert state["schedulers"] == [alive["scheduler"]]
    assert state["step"] == 6


@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_all_of_a_run_goes_out_and_comes_in_again_with_its_optimizer(
    format: str, cli: Cli, finished: Path, tmp_path: Path
) -> None:
    assert cli("export", finished, tmp_path / "out", "--format", format).code == 0
    said = cli("import", tmp_path / "out", tmp_path / "again", "--optimizer", "AdamW")
    assert said.code == 0, said.err
    before, after = everstep.open(finished).load(), everstep.open(tmp_path / "again").load()
    names = [name for name in before if name.startswith(("model.", "optimizer.state."))]
    assert any(name.endswith(".exp_avg") for name in names)
    assert_same({name: after[name] for name in names}, {name: before[name] for name in names})


def test_a_file_of_all_tensors_is_not_taken_for_a_model(cli: Cli, finished: Path, tmp_path: Path) -> None:
    assert cli("export", finished, tmp_path / "all.safetensors").code == 0
    said = cli("import", tmp_path / "all.safetensors", tmp_path / "again")
    assert said.code == 2 and "everstep export --only model" in said.err
    assert not (tmp_path / "again").exists()


def test_an_export_to_dcp_is_loaded_by_dcp(cli: Cli, finished: Path, alive: dict[str, Any], tmp_path: Path) -> None:
    assert cli("export", finished, tmp_path / "out", "--format", "dcp").code == 0
    blank = {
        "model": {name: torch.zeros_like(value) for name, value in alive["model"].items()},
        "optimizer": {
            "state": {
                index: {key: torch.zeros_like(value) for key, value in values.items()}
                for index, values in alive["optimizer"]["state"].items()
            },
            "param_groups": [dict.fromkeys(group) for group in alive["optimizer"]["param_groups"]],
        },
        "step": 0,
    }
    dcp.load(blank, checkpoint_id=tmp_path / "out", no_dist=True)
    assert_same(blank["model"], alive["model"])
    assert_same(blank["optimizer"]["state"], alive["optimizer"]["state"])
    assert blank["step"] == 6
    assert cli("export", finished, tmp_path / "model", "--format", "dcp", "--only", "model").code == 0
    only = {"model": {name: torch.zeros_like(value) for name, value in alive["model"].items()}}
    dcp.load(only, checkpoint_id=tmp_path / "model", no_dist=True)
    assert_same(only["model"], alive["model"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.outer.weight = self.inner.weight
        self.convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("scratch", torch.full((2,), 7.0), persistent=False)


def train_tied(directory: Path, aside: Path) -> dict[str, Any]:
    model = Tied()
    optimizers = [
        torch.optim.SGD([{"params": [model.inner.weight]}, {"params": [model.outer.bias], "lr": 0.2}], 0.1, 0.9),
        torch.optim.Adam(model.convolution.parameters()),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    extra = {"head": nn.Linear(2, 2), "seen": [1, 2]}
    run = everstep.guard(
        model, optimizers, dir=directory, steps=3, keeper="inline", scaler=scaler, extra=extra
    )  # fmt: skip
    while True:
        loss = model.outer(model.inner(torch.ones(1, 4))).sum() + model.convolution(torch.ones(1, 2, 3, 3)).sum()
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        if run.done():
            break
    run.close()
    alive = {
        "model": model.state_dict(), "optimizer": [o.state_dict() for o in optimizers], "scaler": scaler.state_dict(),
        "head": extra["head"].state_dict(),
    }  # fmt: skip
    torch.save(alive, aside)
    return {"step": run.step}


def test_tied_weights_several_optimizers_a_scaler_and_extras_are_exported_as_they_live(tmp_path: Path) -> None:
    with run_directory() as directory:
        assert must_finish(lambda: train_tied(directory, tmp_path / "alive"))["step"] == 3
        alive = torch.load(tmp_path / "alive", weights_only=True)
        past = everstep.open(directory)
        past.export(tmp_path / "all", format="torch")
        past.export(tmp_path / "model", format="safetensors", only="model")
        past.export(tmp_path / "dcp", format="dcp")
        state = torch.load(tmp_path / "all", weights_only=True)
        assert_same(state["model"], alive["model"])
        assert_same(state["optimizer"], alive["optimizer"])
        assert_same(state["scaler"], alive["scaler"])
        assert_same(state["extra"], {"head": alive["head"], "seen": [1, 2]})
        assert_same(safetensors.torch.load_file(tmp_path / "model"), alive["model"])
        blank = {"model": {name: torch.zeros_like(value) for name, value in alive["model"].items()}}
        dcp.load(blank, checkpoint_id=tmp_path / "dcp", no_dist=True)
        assert_same(blank["model"], alive["model"])
        assert past.load()["model.outer.weight"].equal(alive["model"]["inner.weight"])


# -- the same verbs in Python


def test_an_archive_reads_without_the_model(
    finished: Path, killed: Path, alive: dict[str, Any], tmp_path: Path
) -> None:
    past = everstep.open(finished)
    assert (past.steps(), past.latest()) == ([2, 4, 6], 6)
    assert [finding.problem for finding in past.verify()] == ["", "", ""]
    assert [finding.step for finding in past.verify(4)] == [4]
    state = past.load()
    for name, value in alive["model"].items():
        assert torch.equal(state[f"model.{name}"], value)
    assert state["step"] == 6
    assert past.load(2)["step"] == 2
    with pytest.raises(BadConfig, match="rank must be from 0 to 0"):
        past.load(rank=1)
    assert past.export(tmp_path / "four", 4) == 4
    assert past.plan().step == 6
    with pytest.raises(NothingToRestore, match="cannot restore step 5"):
        past.load(5)
    assert everstep.open(killed).latest() == 5
    assert everstep.open(killed).plan().step == 5
    assert everstep.open(killed).plan(lost={"memory"}).step == 3
    assert everstep.open(killed).load(5)["step"] == 5


def test_a_finished_run_gives_back_its_memory_and_a_missing_one_says_so(finished: Path, tmp_path: Path) -> None:
    status = everstep.open(finished).status()
    assert (status["arena_bytes"], status["sealed_step"], status["durable_step"]) == (0, None, 6)
    with pytest.raises(FileNotFoundError, match="not a run's directory"):
        everstep.open(tmp_path)


def test_reading_leaves_nothing_open(killed: Path, tmp_path: Path) -> None:
    past = everstep.open(killed)
    past.export(tmp_path / "warm")
    before = len(os.listdir("/proc/self/fd"))
    past.steps(), past.status(), past.verify(), past.plan(), past.load(), past.export(tmp_path / "out")
    with pytest.raises(BadConfig):
        past.plan(lost={"the keys"})
    assert len(os.listdir("/proc/self/fd")) == before


def test_loading_damaged_bytes_is_refused(copy: Path) -> None:
    for step in (2, 4, 6):
        damage(copy, step)
    with pytest.raises(Damaged, match="cannot restore any step"):
        everstep.open(copy).load()
