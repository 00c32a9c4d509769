"""From SIGKILL to the first new step: from memory, disk, partner, parity, base and records, and as others do it.

The door is bench/gpu.py recovery. Every life is a process of its own (bench/gpu_life.py), killed when it says that it
is ready; the next one is started at once. Files are read from the disk: their pages are dropped before.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu_models
from common import MB, Report, Table, Target, free_port
from gpu_merge import each, one_line
from peers import drop_cache, end_keeper, raw_read

import everstep

RECORDS = 100
PARTS = ("process", "imports and device", "model", "load", "first step")
MODELS = ("gpt2", "gpt2-xl")
LARGE = ("gpt2-xl",)  # for which neither memory nor disk have room several times
SLOTS, NODE_SLOTS = 2, 3  # of a large model: for its base with residuals, and for a part of it on each of some nodes


@dataclass
class Life:
    """What one life said, in seconds since the one before was killed."""

    moments: dict[str, float] = field(default_factory=dict)
    resumed_from: int | None = None
    replay: float = 0.0
    replayed: int = 0  # steps
    state_bytes: int = 0
    raw_s: float = 0.0  # that the plainest program takes to read the same files, just before, if that was measured
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
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)  # nobody compiles all modules anew in every life
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
            end_keeper(run)
        finally:
            os.environ.pop("EVERSTEP_NODE", None) if before is None else os.environ.update(EVERSTEP_NODE=before)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        if self.directory.exists():
            self.end_keeper()


Lives = Iterator[tuple[str, Life] | None]  # None: something has begun, or is ready; others may go on meanwhile


def bench_recovery(
    names: list[str], scratch: Path, deadline: float, method: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """`method`: how names of ways begin; without it a large model has the first alone, for want of time."""

    def one(name: str) -> Iterator[dict[str, Any]]:
        chosen = [way for way in WAYS if way.startswith(tuple(method.split(";")))]
        if not chosen:
            raise SystemExit(f"no way begins with {method!r}; there are {'; '.join(WAYS)}")
        if name in LARGE and not method:
            chosen = chosen[:1]
        entry: dict[str, Any] = {"lives": {}, "whole": False}
        if name not in LARGE and "alone" in chosen:
            chosen = [way for way in chosen if way != DCP]  # the first has that file, too
        for together in [[way] for way in chosen] if name in LARGE else [chosen]:
            if time.monotonic() > deadline:
                raise TimeoutError("no time was left")
            yield from _lost_and_back(name, together, scratch, entry)
        yield {**entry, "whole": True}

    for name in names:
        yield from each(name, one)


def _lost_and_back(name: str, ways: list[str], scratch: Path, entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """First all lives that are to be lost begin, side by side; when all are ready, they are lost one after another."""
    begun: dict[str, Lives] = {}
    for way in ways:
        root = scratch / f"{name}-{way}"
        root.mkdir()
        begun[way] = WAYS[way](name, root)
    failed: list[str] = []
    for _ in ("begin", "be ready"):
        for way, lives in begun.items():
            if way not in failed and (error := _advanced(lives)):
                entry["lives"][way] = asdict(Life(error=error))
                failed.append(way)
    yield entry
    for way, lives in begun.items():
        try:
            for found in lives:
                if found is not None:
                    if found[1].resumed_from is None and not found[0].endswith(".load"):
                        raise RuntimeError(f"{found[0]}: it began anew")
                    entry["lives"][found[0]] = asdict(found[1])
                    print(f"{name:10} {found[0]:26} {_line(found[1])}", flush=True)
                    yield entry
        except Exception as error:
            traceback.print_exc()
            entry["lives"][way] = asdict(Life(error=one_line(error)))
        yield entry
        shutil.rmtree(scratch / f"{name}-{way}", ignore_errors=True)


def _advanced(lives: Lives) -> str:
    """Why it could not be."""
    try:
        next(lives)
    except Exception as error:
        traceback.print_exc()
        return one_line(error)
    return ""


def _alone(name: str, root: Path) -> Lives:
    """From memory, from the disk, and with the files of others."""
    node = Node(root, name)
    try:
        others = ("torch.load",) if name in LARGE else ("torch.load", DCP)
        node.start("bases", "--keep", *(f"--save={how}" for how in others))
        yield None
        node.life(time.time())
        yield None
        for what in ("memory", "disk"):
            killed, raw_s = node.kill(), 0.0
            if what == "disk":
                node.end_keeper()
                _drop(node.directory)
                newest = max(node.directory.glob("step-*/"))
                raw_s = sum(map(raw_read, newest.glob("*.safetensors")))
                killed = time.time()
            node.start("bases")
            yield what, replace(node.life(killed), raw_s=raw_s)
        node.kill()
        node.end_keeper()
        yield from _from_files(node, others)
    finally:
        node.stop()


def _by_dcp(name: str, root: Path) -> Lives:
    """For a model whose file would not fit beside that of torch.save."""
    node = Node(root, name)
    try:
        node.start("bases", f"--save={DCP}")
        yield None
        node.life(time.time())
        yield None
        node.kill()
        node.end_keeper()
        yield from _from_files(node, (DCP,))
    finally:
        node.stop()


def _from_files(node: Node, others: tuple[str, ...]) -> Lives:
    for how in others:
        _drop(node.root / "peers")
        killed = time.time()
        node.start(how)
        yield how, node.life(killed)
        node.kill()


def _by_records(name: str, root: Path) -> Lives:
    node = Node(root, name)
    try:
        slots = ["--slots", str(SLOTS)] if name in LARGE else []
        node.start("log", "--keep", "--steps", str(RECORDS), *slots)
        yield None
        node.life(time.time())
        yield None
        node.kill()
        node.end_keeper()
        _drop(node.directory)
        killed = time.time()
        node.start("log", *slots)
        yield f"disk, base and {RECORDS} records", node.life(killed)
    finally:
        node.stop()


def _from_partner(name: str, root: Path) -> Lives:
    return _from_nodes("partner, 2 nodes", "Partner()", 2, name, root)


def _by_parity(name: str, root: Path) -> Lives:
    return _from_nodes("parity, 4 nodes", 'Parity("xor")', 4, name, root)


def _from_nodes(what: str, tiers: str, world: int, name: str, root: Path) -> Lives:
    """The last of some nodes is lost with all that it had; all share one device, and meet over gloo."""
    memory = f"Memory(slots={NODE_SLOTS}), " if name in LARGE else ""
    environment = {"EVERSTEP_TIERS": memory + tiers}
    nodes = [Node(root, name, f"{tiers[:4].lower()}{rank}", environment) for rank in range(world)]

    def begin(*words: str) -> None:
        port = free_port()
        for rank, node in enumerate(nodes):
            place = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            node.start("bases", *words, environment=place | meeting)

    try:
        begin("--keep", "--steps", "3")
        yield None
        for node in nodes:
            node.life(time.time())
        yield None
        killed = [node.kill() for node in nodes][-1]
        nodes[-1].end_keeper()
        shutil.rmtree(nodes[-1].directory)
        begin()
        lives = [node.life(killed) for node in nodes]
        yield what, max(lives, key=lambda life: life.moments["first step"])
    finally:
        for node in nodes:
            node.stop()


DCP = "dcp.load"
WAYS: dict[str, Callable[[str, Path], Lives]] = {
    "alone": _alone, DCP: _by_dcp, "records": _by_records, "partner": _from_partner, "parity": _by_parity
}  # fmt: skip


def _drop(folder: Path) -> None:
    drop_cache([path for path in folder.rglob("*") if path.is_file()])


def _line(life: Life) -> str:
    parts = ", ".join(f"{what} {life.part(what):.2f}" for what in PARTS)
    return f"{life.moments['first step']:6.2f} s: {parts}; replay {life.replay:.2f}, from step {life.resumed_from}"


# -- what is said about it


def recovery_report(report: Report, models: dict[str, Any]) -> None:
    for name, entry in models.items():
        lives = entry.get("lives", {})
        table = Table(
            f"From SIGKILL to the first new step: {name}",
            ["from", "in all s", *(f"{what} s" for what in PARTS), "of it replay s", "raw read s", "resumed from"],
            note="One life each. process: until the first line of the program; load: guard(), or what the other's "
            "documentation says. Where a disk is read, the keeper was ended and the pages were dropped first, and the "
            "clock began after that. Raw read: of the same files, just before, into the host. A restart of the process "
            "is in all of them.",
        )
        for what, values in lives.items():
            life = Life(**values)
            if life.error:
                table.rows.append([what, *["-"] * (len(PARTS) + 3), life.error])
                continue
            table.rows.append([
                what, f"{life.moments['first step']:.2f}", *(f"{life.part(part):.2f}" for part in PARTS),
                f"{life.replay:.2f} ({life.replayed} steps)" if life.replayed else "-",
                f"{life.raw_s:.2f}" if life.raw_s else "-", str(life.resumed_from),
            ])  # fmt: skip
        report.tables.append(table)
        memory = Life(**lives["memory"]) if "memory" in lives else Life(error="not run")
        if not memory.error:
            size = f"{name}, {memory.state_bytes / MB:.0f} MB, from memory, beside the start of a process"
            loaded, wanted_s = memory.part("load"), memory.state_bytes / 1.5e9
            report.targets.append(Target(size, f"< {wanted_s:.1f} s", f"{loaded:.2f} s", loaded < wanted_s))
