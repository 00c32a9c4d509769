"""`everstep inject`: what a scenario says is done to real processes, to no others, and what became of them is told."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lives import live, run_directory, told
from said import Cli

import everstep
from everstep.events import Degraded, KeeperStarted, Persisted, Started
from everstep.keeper.process import environment
from everstep.timeline import Kind, read_timeline
from everstep.topology import process_alive

COMMAND = "from everstep.cli import main; main()"
TRAIN = """
import sys, time, torch, everstep
from torch.utils.data import DataLoader, TensorDataset

def train(directory, steps=90, pause=0.01):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(48, 8), torch.randint(0, 3, (48,)))
    loader, losses = DataLoader(data, batch_size=4, shuffle=True), []
    run = everstep.guard(
        model, optimizer, loader, dir=directory, extra={"losses": losses}, epochs=None, steps=steps,
        strategy="snapshot", tiers=[everstep.Disk(every=EVERY)], keep=50,
    )
    for x, y in run:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        time.sleep(pause)  # a step takes as long as somebody needs who watches it

if __name__ == "__main__":
    train(sys.argv[1])
"""
# The same by several ranks together.
TOGETHER = TRAIN.replace(
    "    torch.manual_seed", "    everstep.init_process_group('gloo')\n    torch.manual_seed"
).replace("    optimizer =", "    model = torch.nn.parallel.DistributedDataParallel(model)\n    optimizer =")
# Says of itself what a rank and a keeper say that has left its parent; what it then does is up to the test.
PRETEND = """
import os, sys, time
from pathlib import Path
from everstep.events import EventLog, KeeperStarted, Started
directory = Path(sys.argv[1])
directory.mkdir(exist_ok=True)
emit = EventLog(directory / "events-rank-00000.jsonl")
"""


@dataclass
class Injected:
    """A call of `everstep inject --json` as a process of its own."""

    process: subprocess.Popen[str]

    def wait(self, timeout_s: float = 120.0) -> tuple[int, dict[str, Any], str]:
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)  # and with it goes what it has started
            out, err = self.process.communicate(timeout=60)
            raise AssertionError(f"it did not end in {timeout_s} s: {out} {err}") from None
        return self.process.returncode, json.loads(out) if out else {}, err


@pytest.fixture
def inject(tmp_path: Path) -> Iterator[Callable[..., Injected]]:
    begun: list[Injected] = []

    def begin(scenario: str, directory: Path, *words: object, options: tuple[object, ...] = ()) -> Injected:
        path = tmp_path / f"scenario-{len(begun)}.toml"
        path.write_text(scenario)
        ours = [sys.executable, "-c", COMMAND, "inject", path, "--json", "--dir", directory, *options, "--", *words]
        process = subprocess.Popen(
            [str(word) for word in ours], env=environment(), text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        begun.append(Injected(process))
        return begun[-1]

    yield begin
    for one in begun:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGINT)
            one.process.communicate(timeout=60)


@pytest.fixture
def directory() -> Iterator[Path]:
    with run_directory() as made:
        yield made


def program(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


def until(holds: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- a real training


def crew(path: Path) -> list[str]:
    return [sys.executable, "-c", COMMAND, "run", "--nproc", "1", str(path), "{dir}"]


def test_a_killed_rank_and_a_reboot_cost_what_the_run_says_and_the_end_is_exact(
    inject: Callable[..., Injected], directory: Path, tmp_path: Path
) -> None:
    path = program(tmp_path, TRAIN.replace("EVERY", "50").replace("pause=0.01", "pause=0.05"))
    scenario = """
        [[inject.acts]]
        do = "kill"
        rank = 0
        step = 20
        [[inject.acts]]
        do = "kill"
        node = "any"
        wipe = ["memory"]
        step = 65
    """
    with run_directory() as reference:
        compiled = compile(path.read_text(), str(path), "exec")

        def undisturbed() -> dict[str, Any]:
            names: dict[str, Any] = {"__name__": "program"}
            exec(compiled, names)
            names["train"](reference, pause=0.0)
            return {"step": 90}

        outcome = live(undisturbed)
        assert outcome.result == {"step": 90}, outcome.error
        code, said, err = inject(scenario, directory, *crew(path), options=("--reference", reference)).wait()
    assert code == 0, (said, err)
    killed, rebooted = said["fates"]
    lives = told(directory, Started)
    assert [one.source for one in lives] == ["nothing", "memory", "disk"]
    assert killed["step"] >= 20 and 0 <= killed["step"] - lives[1].step <= 1
    assert killed["steps_lost"] == killed["step"] - lives[1].step
    assert 65 <= rebooted["step"] < 90 and 50 <= lives[2].step < 65  # the first step that the keeper saw there
    assert rebooted["steps_lost"] == rebooted["step"] - lives[2].step > 0
    assert said["steps_lost"] == killed["steps_lost"] + rebooted["steps_lost"]
    assert rebooted["went_on"] == f"restart, from disk, at step {lives[2].step}"
    noted = [span for span in read_timeline(directory)[0].spans if span.kind == Kind.STEP]
    before = max(span.end for span in noted if span.pid == lives[0].pid)
    first = min(span.end for span in noted if span.pid == lives[1].pid)
    assert first - lives[1].time < killed["next_step_s"] < first - before
    assert (said["exact"], said["steps"], said["not_made"]) == (True, 90, [])


@pytest.mark.soak
def test_what_is_stopped_slowed_flipped_or_full_is_so_for_a_while_and_training_stays(
    inject: Callable[..., Injected], directory: Path, tmp_path: Path
) -> None:
    path = program(tmp_path, TRAIN.replace("EVERY", "5").replace("pause=0.01", "pause=0.05"))
    scenario = """
        [inject]
        seed = 3
        [[inject.acts]]
        do = "stop"
        rank = 0
        step = 10
        for = "1s"
        [[inject.acts]]
        do = "fill"
        step = 20
        for = "1s"
        [[inject.acts]]
        do = "slow"
        rank = "any"
        share = 0.3
        step = 45
        for = "2s"
        [[inject.acts]]
        do = "flip"
        file = "base"
        bits = 3
        step = 80
    """
    begun = inject(scenario, directory, *crew(path))
    until(lambda: told(directory, Started))
    halts = _halts(told(directory, Started)[0].pid)
    code, said, err = begun.wait()
    assert code == 0, (said, err)
    stopped, filled, slowed, flipped = said["fates"]
    assert 0.9 < stopped["next_step_s"] < 30
    assert all(one["next_step_s"] is not None and one["steps_lost"] == 0 for one in said["fates"])
    assert {one["went_on"] for one in said["fates"]} == {"training stayed"}
    assert slowed["what"] == "slow rank 0 to 30% for 2 s"
    assert halts >= 5  # once for a second, and then ten times a second
    assert len(told(directory, Started)) == 1
    damaged = [one for one in everstep.open(directory).verify() if one.problem]
    assert len(damaged) == 1 and damaged[0].step <= flipped["step"]
    reasons = [one.reason for one in told(directory, Degraded)]
    assert reasons and all("File too large" in reason for reason in reasons)
    assert filled["what"].startswith("fill the disk of node ") and filled["what"].endswith(" for 1 s")
    written = {one.step for one in told(directory, Persisted)}
    assert min(written) <= filled["step"] and 90 in written  # before it and after
    assert said["compared"] == "not compared" and said["exact"] is None


def _halts(pid: int) -> int:
    """How often a process is seen to stand still and to go on, until it is gone."""
    seen, deadline = ["R"], time.monotonic() + 120
    while process_alive(pid) and time.monotonic() < deadline:
        try:
            state = _state(pid)
        except OSError:
            break  # it has just ended
        if (state == "T") != (seen[-1] == "T"):
            seen.append(state)
        time.sleep(0.005)
    return seen.count("T")


@pytest.mark.soak
def test_a_rank_that_is_cut_off_for_a_while_goes_on_and_one_whose_connections_end_is_started_again(
    inject: Callable[..., Injected], directory: Path, tmp_path: Path
) -> None:
    path = program(tmp_path, TOGETHER.replace("EVERY", "50").replace("pause=0.01", "pause=0.05"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--max-restarts", "3", str(path), "{dir}"]
    scenario = """
        [[inject.acts]]
        do = "cut"
        rank = 1
        step = 20
        for = "1500ms"
        [[inject.acts]]
        do = "cut"
        rank = 0
        step = 60
    """
    code, said, err = inject(scenario, directory, *torchrun).wait()
    assert code == 0, (said, err)
    silent, ended = said["fates"]
    assert re.fullmatch(r"cut rank 1 off for 1.5 s: \d+ connections?", silent["what"]), silent
    assert (silent["went_on"], silent["steps_lost"]) == ("training stayed", 0)
    spans = [span for track in read_timeline(directory) for span in track.spans if span.kind == Kind.STEP]
    assert max(span.end - span.begin for span in spans if 1 <= span.step - silent["step"] <= 2) > 1.2
    assert re.fullmatch(r"cut rank 0 off: \d+ connections?", ended["what"]), ended
    assert ended["went_on"].startswith("restart, from memory, at step") and ended["steps_lost"] <= 1
    assert len(told(directory, Started)) == 4 and said["steps"] == 90


# -- whom it touches


def test_a_process_that_did_not_come_of_the_command_is_never_touched(
    inject: Callable[..., Injected], directory: Path, tmp_path: Path
) -> None:
    stranger = subprocess.Popen(["sleep", "100"])
    try:
        path = program(
            tmp_path,
            PRETEND + f"emit(Started(rank=0, world=1, pid={stranger.pid}, step=0, source='nothing'))\ntime.sleep(2)",
        )
        scenario = "[[inject.acts]]\ndo = 'kill'\nrank = 0\nafter = '100ms'"
        code, said, _ = inject(scenario, directory, sys.executable, path, directory).wait()
        assert stranger.poll() is None
        assert code == 1 and said["fates"] == []
        assert said["not_made"] == ["kill rank 0: rank 0 was not there when it was due; there was none"]
    finally:
        stranger.kill()
        stranger.wait()


def test_a_keeper_that_has_left_its_parent_still_belongs_to_the_command(
    inject: Callable[..., Injected], directory: Path, tmp_path: Path
) -> None:
    leave = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        emit(KeeperStarted(pid=os.getpid(), node="here"))
        time.sleep(100)
    os._exit(0)
os.wait()
emit(Started(rank=0, world=1, pid=os.getpid(), step=0, source="nothing"))
end = time.monotonic() + 30
while not (directory / "over").exists() and time.monotonic() < end:
    time.sleep(0.01)
"""
    path = program(tmp_path, PRETEND + leave)
    scenario = "[[inject.acts]]\ndo = 'kill'\nkeeper = 'here'\nafter = '100ms'"
    begun = inject(scenario, directory, sys.executable, path, directory)
    until(lambda: told(directory, KeeperStarted))
    (keeper,) = told(directory, KeeperStarted)
    until(lambda: not process_alive(keeper.pid))
    (directory / "over").touch()
    code, said, err = begun.wait()
    assert code == 0, err
    assert [one["what"] for one in said["fates"]] == ["kill keeper here"]


# -- how it ends


def test_ctrl_c_ends_all_that_came_of_the_command_and_the_verdict_is_told(
    inject: Callable[..., Injected], directory: Path, tmp_path: Path
) -> None:
    stubborn = """
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
emit(Started(rank=0, world=1, pid=os.getpid(), step=0, source="nothing"))
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    emit(Started(rank=1, world=1, pid=os.getpid(), step=0, source="nothing"))
time.sleep(100)
"""
    path = program(tmp_path, PRETEND + stubborn)
    scenario = (
        "[[inject.acts]]\ndo = 'stop'\nrank = 0\nafter = '10ms'\n[[inject.acts]]\ndo = 'kill'\nrank = 0\nstep = 9"
    )
    begun = inject(scenario, directory, sys.executable, path, directory)
    until(lambda: len(told(directory, Started)) == 2)
    pids = [one.pid for one in told(directory, Started)]
    until(lambda: _state(pids[0]) == "T")
    begun.process.send_signal(signal.SIGINT)
    code, said, err = begun.wait()
    assert code == 130, err
    assert not any(process_alive(pid) for pid in pids)
    assert [one["what"] for one in said["fates"]] == ["stop rank 0"]
    assert said["command"] == "was ended: interrupted"
    assert said["not_made"] == ["kill rank 0: it never came to that"]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_a_command_in_which_nothing_moves_is_ended(
    inject: Callable[..., Injected], directory: Path, tmp_path: Path
) -> None:
    scenario = "[inject]\npatience = '1s'\n[[inject.acts]]\ndo = 'kill'\nrank = 0\nstep = 1"
    code, said, _ = inject(scenario, directory, "sleep", "100").wait()
    assert code == 1
    assert said["command"] == "was ended: no step was finished for 1 s"


def test_the_injector_itself_needs_no_torch(directory: Path, tmp_path: Path) -> None:
    scenario = tmp_path / "s.toml"
    scenario.write_text("[[inject.acts]]\ndo = 'kill'\nrank = 0\nstep = 1")
    look = "import sys\nfrom everstep.cli import app\napp(sys.argv[1:], standalone_mode=False)\n"
    look += "sys.exit('torch' in sys.modules)"
    words = ["inject", scenario, "--dir", directory, "--", "true"]
    ended = subprocess.run(
        [sys.executable, "-c", look, *map(str, words)], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert "not done: kill rank 0: it never came to that" in ended.stdout
    assert "the command ended with exit code 0" in ended.stdout and "not compared" in ended.stdout


def test_what_is_wrong_is_said_before_anything_is_started(cli: Cli, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    path = tmp_path / "s.toml"
    path.write_text("[[inject.acts]]\ndo = 'kill'\nrank = 0\nstep = 1")
    there = ("--dir", tmp_path / "run", "--", "touch", mark)
    said = cli("inject", path, "--reference", tmp_path / "none", *there)
    assert said.code == 3 and "is not a run's directory" in said.err
    said = cli("inject", path, path, *there)
    assert said.code == 2 and "one scenario at a time" in said.err
    said = cli("inject", path, "--simulate", *there)
    assert said.code == 2 and "{dir} in the command" in said.err
    said = cli("inject", "--dir", tmp_path, "--", "touch", mark)
    assert said.code == 2 and "takes a scenario, then --, then the command" in said.err
    path.write_text("[[inject.acts]]\ndo = 'burn'\nrank = 0\nstep = 1")
    said = cli("inject", path, *there)
    assert said.code == 2 and "inject.acts[0].do = 'burn' must be one of kill, stop, slow, cut, wipe" in said.err
    assert not mark.exists()


# -- both ways


@pytest.mark.soak
def test_simulated_and_real_lose_the_same_steps(tmp_path: Path) -> None:
    path = program(tmp_path, TRAIN.replace("EVERY", "20").replace("pause=0.01", "pause=0.1"))
    examples = Path(__file__).parents[2] / "examples/inject"
    folder = tmp_path / "runs"
    scenario = (examples / "kill.toml").read_text().replace("rank = 1", "rank = 0")
    (tmp_path / "first.toml").write_text(scenario)
    words = ["inject", tmp_path / "first.toml", examples / "reboot.toml", "--simulate", "--json", "--dir", folder, "--"]
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, words), *crew(path)], env=environment(), capture_output=True,
        text=True, timeout=200,
    )  # fmt: skip
    assert ended.stdout, ended.stderr
    found = json.loads(ended.stdout)
    assert found["calibration"]["step_s"] > 0.1 and found["calibration"]["steps"] == 90
    assert len(told(folder / "calibration", Started)) == 2
    killed, rebooted = found["scenarios"]
    assert killed["real_lost"] == killed["simulated_lost"] == 0
    assert rebooted["real_lost"] == rebooted["simulated_lost"] >= 15
    for one in (killed, rebooted):
        assert one["off"] == pytest.approx(one["simulated_wasted_s"] / one["real_wasted_s"] - 1)
        assert one["agrees"] == (abs(one["off"]) <= 0.2)
    assert ended.returncode == (0 if killed["agrees"] and rebooted["agrees"] else 1)
