"""From SIGKILL to the first new step: from memory, disk, partner, parity, base and records, and as others do it.

The door is bench/gpu.py recovery. Every life is a process of its own (bench/gpu_life.py), killed when it says that it
is ready; the next one is started at once. Files are read from the disk: their pages are dropped before.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gpu_models
from common import MB, Report, Table, Target
from peers import drop_cache

import everstep
from everstep.capture.host import arena_root
from everstep.keeper.client import keeper_pid

RECORDS = 100
PATIENCE_S = 240.0
PARTS = ("process", "imports and device", "model", "load", "first step")
MODELS = ("gpt2", "gpt2-xl")
LARGE = ("gpt2-xl",)  # for which neither memory nor disk have room several times


@dataclass
class Life:
    """What one life said, in seconds since the one before was killed."""

    moments: dict[str, float] = field(default_factory=dict)
    resumed_from: int | None = None
    replay: float = 0.0
    state_bytes: int = 0
    error: str = ""

    def part(self, what: str) -> float:
        """How long a part of the beginning took."""
        at = PARTS.index(what)
        return self.moments[what] - (self.moments[PARTS[at - 1]] if at else 0.0)


class Node:
    """One process, in a directory and under a name of its own."""

    def __init__(self, root: Path, model: str, name: str = "", environment: dict[str, str] | None = None) -> None:
        self.root, self.name = root, name
        self.directory = root / (name or "run")
        self._model, self._environment = model, {**os.environ, "EVERSTEP_NODE": name} if name else dict(os.environ)
        self._environment |= environment or {}
        self._process: subprocess.Popen[str] | None = None

    def start(self, how: str, *words: str, environment: dict[str, str] | None = None) -> None:
        program = Path(__file__).with_name("gpu_life.py")
        places = ["--dir", str(self.directory), "--peers", str(self.root / "peers"), "--device", gpu_models.DEVICE]
        self._said = (self.root / f"said-{self.name}").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(program), self._model, how, *places, *words],
            stdout=subprocess.PIPE, stderr=self._said, text=True, env=self._environment | (environment or {}),
        )  # fmt: skip

    def life(self, since: float) -> Life:
        """Until it is ready."""
        assert self._process is not None and self._process.stdout is not None
        found = Life()
        for line in self._process.stdout:
            if line.startswith("{"):
                told = json.loads(line)
                moments = {what: when - since for what, when in told.pop("moments").items()}
                found = Life(moments, **told)
            if line.strip() == "ready":
                return found
        self._said.seek(0)
        keepers = [path.read_text()[-800:] for path in self.directory.glob("keeper-*.log")]
        raise RuntimeError(f"a life ended before it was ready: {self._said.read()[-1500:]} {keepers}")

    def kill(self) -> float:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        killed = time.time()
        self._process.wait()
        return killed

    def end_keeper(self) -> None:
        """And all that it holds in memory."""
        run = everstep.open(self.directory).run
        before = os.environ.get("EVERSTEP_NODE")
        try:
            if self.name:
                os.environ["EVERSTEP_NODE"] = self.name
            pid = keeper_pid(run)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(arena_root(None) / run, ignore_errors=True)
        finally:
            os.environ.pop("EVERSTEP_NODE", None) if before is None else os.environ.update(EVERSTEP_NODE=before)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        if self.directory.exists():
            self.end_keeper()


def bench_recovery(names: list[str], scratch: Path, budget_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + budget_s
    data: dict[str, Any] = {"models": {}}
    for name in names:
        found: dict[str, Any] = {}
        ways = [_alone] if name in LARGE else [_from_nodes, _by_records, _alone]
        for way in ways:
            if time.monotonic() > deadline:
                continue
            root = scratch / f"{name}{way.__name__}"
            root.mkdir()
            try:
                for what, life in way(name, root):
                    found[what] = asdict(life)
                    print(f"{name:10} {what:26} {_line(life)}", flush=True)
            except Exception as error:
                print(f"{name:10} {way.__name__}: {type(error).__name__}: {error}", flush=True)
                found[way.__name__.strip("_").replace("_", " ")] = asdict(Life(error=str(error).splitlines()[-1][:200]))
            shutil.rmtree(root, ignore_errors=True)
        data["models"][name] = found
    return data


def _alone(name: str, root: Path) -> Any:
    """From memory, from the disk, and with the files of others."""
    node = Node(root, name)
    try:
        others = ("torch.load",) if name in LARGE else ("torch.load", "dcp.load")
        node.start("bases", "--steps", "3", *(f"--save={how}" for how in others))
        node.life(time.time())
        for what in ("memory", "disk"):
            killed = node.kill()
            if what == "disk":
                node.end_keeper()
                drop_cache([path for path in node.directory.rglob("*") if path.is_file()])
                killed = time.time()
            node.start("bases", "--steps", "1")
            yield what, node.life(killed)
        node.kill()
        for how in others:
            drop_cache([path for path in (root / "peers").rglob("*") if path.is_file()])
            killed = time.time()
            node.start(how)
            yield how, node.life(killed)
            node.kill()
    finally:
        node.stop()


def _by_records(name: str, root: Path) -> Any:
    node = Node(root, name)
    try:
        node.start("log", "--steps", str(RECORDS + 8))
        node.life(time.time())
        node.kill()
        node.end_keeper()
        drop_cache([path for path in node.directory.rglob("*") if path.is_file()])
        killed = time.time()
        node.start("log", "--steps", "1")
        yield f"disk, base and {RECORDS} records", node.life(killed)
    finally:
        node.stop()


def _from_nodes(name: str, root: Path) -> Any:
    """The last of some nodes is lost with all that it had; all share one device, and meet over gloo."""
    for what, tiers, world in (("partner", "Partner()", 2), ("parity", 'Parity("xor")', 4)):
        place = root / what
        place.mkdir()
        nodes = [Node(place, name, f"node{rank}", {"EVERSTEP_TIERS": tiers}) for rank in range(world)]

        def begin(nodes: list[Node] = nodes, steps: str = "3") -> None:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            for rank, node in enumerate(nodes):
                place = {"RANK": str(rank), "WORLD_SIZE": str(len(nodes)), "LOCAL_RANK": "0"}
                meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                node.start("bases", "--steps", steps, environment=place | meeting)

        try:
            begin()
            for node in nodes:
                node.life(time.time())
            killed = [node.kill() for node in nodes][-1]
            nodes[-1].end_keeper()
            shutil.rmtree(nodes[-1].directory)
            begin(steps="0")
            lives = [node.life(killed) for node in nodes]
            yield f"{what}, {world} nodes", max(lives, key=lambda life: life.moments["first step"])
        finally:
            for node in nodes:
                node.stop()


def _line(life: Life) -> str:
    parts = ", ".join(f"{what} {life.part(what):.2f}" for what in PARTS)
    return f"{life.moments['first step']:6.2f} s: {parts}; replay {life.replay:.2f}, from step {life.resumed_from}"


# -- what is said about it


def recovery_report(report: Report, data: dict[str, Any]) -> None:
    report.data = data
    for name, lives in data["models"].items():
        table = Table(
            f"From SIGKILL to the first new step: {name}",
            ["from", "in all s", *(f"{what} s" for what in PARTS), "of it replay s", "resumed from"],
            note="One life each. process: until the first line of the program; load: guard(), or what the other's "
            "documentation says; from a disk the pages were dropped first. A restart of the process is in all of them.",
        )
        for what, values in lives.items():
            life = Life(**values)
            if life.error:
                table.rows.append([what, *["-"] * (len(PARTS) + 2), life.error])
                continue
            table.rows.append([
                what, f"{life.moments['first step']:.2f}", *(f"{life.part(part):.2f}" for part in PARTS),
                f"{life.replay:.2f}", str(life.resumed_from),
            ])  # fmt: skip
        report.tables.append(table)
        memory = Life(**lives["memory"]) if "memory" in lives else Life(error="not run")
        if not memory.error:
            size = f"{name}, {memory.state_bytes / MB:.0f} MB, from memory, beside the start of a process"
            loaded, wanted_s = memory.part("load"), memory.state_bytes / 1.5e9
            report.targets.append(Target(size, f"< {wanted_s:.1f} s", f"{loaded:.2f} s", loaded < wanted_s))
