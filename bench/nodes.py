"""What nodes that protect each other cost: per step, per save and per restart, beside root checkpointing.

Every node is a forked rank with a name, a directory, memory and a keeper of its own, all on this machine: its cores are
shared by trainers and keepers alike, which a cluster's are not. Lives are interleaved, and every ratio is of one run.

    python bench/nodes.py [--quick] [--out bench/results]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo  # once, before ranks are forked: it takes seconds
import torch.distributed as dist
from common import MB, Report, Stat, Table, machine
from torch import nn

import everstep
from everstep import Parity, Partner
from everstep.capture.host import arena_root
from everstep.events import Protected, read_events
from everstep.keeper.client import keeper_pid
from everstep.store.disk import DiskTier
from everstep.store.manifest import run_name

SCHEMES: dict[str, list[Any]] = {
    "single": [], "partner": [Partner()], "xor": [Parity("xor")], "rs, 2 losses": [Parity("rs", losses=2)],
}  # fmt: skip


def model_of(megabytes: float) -> nn.Module:
    """Layers whose parameters and AdamW state take about this much."""
    torch.manual_seed(0)
    width = int((megabytes * MB / 12 / 4) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def train(directory: Path, scheme: str, megabytes: float, steps: int, root: Path) -> dict[str, Any]:
    """One rank of one life: times of its steps, and of coming back."""
    rank = dist.get_rank()
    model = model_of(megabytes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    x = torch.randn(64, model[0].in_features)
    began = time.perf_counter()
    run, first, path = None, 0, root / "root.pt"
    if scheme == "root":
        first = _load_root(model, optimizer, path)
    elif scheme != "none":
        run = everstep.guard(
            model, optimizer, dir=directory, steps=10**6, strategy="snapshot", tiers=SCHEMES[scheme], linger="30s",
            keep=1,
        )  # fmt: skip
        first = run.step
    dist.barrier()
    came_back = time.perf_counter() - began
    times = []
    for step in range(first, first + steps):
        begin = time.perf_counter()
        loss = model(x).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.done()
        elif scheme == "root":
            if rank == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, path)
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            dist.barrier()
        times.append(time.perf_counter() - begin)
    if run is not None:
        run.wait("protected" if SCHEMES[scheme] and dist.get_world_size() > 1 else "sealed")
    dist.barrier()
    return {"times": times[2:], "came_back": came_back, "first": first}


def _load_root(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> int:
    """Rank 0 reads, and the others are told: how it is done without a library."""
    found: list[Any] = [torch.load(path, weights_only=True) if dist.get_rank() == 0 and path.exists() else None]
    dist.broadcast_object_list(found)
    if found[0] is None:
        return 0
    model.load_state_dict(found[0]["model"])
    optimizer.load_state_dict(found[0]["optimizer"])
    return int(found[0]["step"])


class Nodes:
    def __init__(self, count: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="everstep-bench-"))
        self.names = [f"{self.root.name}-{number}" for number in range(count)]

    def live(self, scheme: str, megabytes: float, steps: int) -> list[dict[str, Any]]:
        """All ranks of one life, which die at its end as in a crash; what each measured."""
        with _store() as port:
            hear, tell = os.pipe()
            pids = []
            for rank in range(len(self.names)):
                pid = os.fork()
                if pid == 0:
                    directory = self.root / self.names[rank]
                    self._be(rank, port, tell, partial(train, directory, scheme, megabytes, steps, self.root))
                pids.append(pid)
            os.close(tell)
            with os.fdopen(hear, "rb") as pipe:
                data = pipe.read()
            for pid in pids:
                os.waitpid(pid, 0)
        return [msgspec.json.decode(line) for line in data.splitlines()]

    def _be(self, rank: int, port: int, tell: int, life: Callable[[], dict[str, Any]]) -> None:
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(len(self.names)), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "EVERSTEP_NODE": self.names[rank], "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        torch.set_num_threads(1)
        everstep.init_process_group("gloo")
        os.write(tell, msgspec.json.encode(life()) + b"\n")
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    def protected(self) -> list[float]:
        """When steps became protected."""
        return sorted(
            event.time for event in read_events(self.root / self.names[0]) if isinstance(event, Protected)
        )  # fmt: skip

    def close(self) -> None:
        for name in self.names:
            os.environ["EVERSTEP_NODE"] = name
            try:
                pid = keeper_pid(run_name(DiskTier(self.root / name)))
            except FileNotFoundError:
                continue
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(arena_root(None), ignore_errors=True)
        os.environ.pop("EVERSTEP_NODE", None)
        shutil.rmtree(self.root, ignore_errors=True)


class _store:
    """Where ranks meet, in a process of its own."""

    def __enter__(self) -> int:
        hear, tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(tell, str(store.port).encode())
            signal.pause()
        os.close(tell)
        port = int(os.read(hear, 16))
        os.close(hear)
        return port

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def one(count: int, scheme: str, megabytes: float, steps: int) -> tuple[float, float, list[float]]:
    """The median step and the restart of one scheme, and when steps were protected."""
    nodes = Nodes(count)
    try:
        first = nodes.live(scheme, megabytes, steps)
        step = statistics.median(max(row["times"][i] for row in first) for i in range(len(first[0]["times"])))
        protected = nodes.protected() if scheme not in ("none", "root", "single") else []
        again = nodes.live(scheme, megabytes, 3) if scheme != "none" else [{"came_back": 0.0}]
        return step, max(row["came_back"] for row in again), protected
    finally:
        nodes.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    repeats, steps = (2, 15) if options.quick else (3, 30)
    report = Report(
        "What nodes that protect each other cost", f"python bench/nodes.py{' --quick' * options.quick}", machine()
    )
    report.tables += [schemes(repeats, steps), rounds()]
    report.save(options.out, "nodes")
    print(report.markdown())


def schemes(repeats: int, steps: int) -> Table:
    headers = ["ranks", "scheme", "step, ms", "against none", "restart, s", "steps protected"]
    table = Table("Every step saved, and back again: 24 MB of state, one rank a node", headers)
    for count in (1, 2, 4, 8):
        names = ["none", "root", *(name for name in SCHEMES if count > 2 or name == "single")]
        names += ["partner", "xor"] if count == 2 else []
        found = {name: (Stat(), Stat(), Stat()) for name in names}
        for _ in range(repeats):
            for name, (step, restart, share) in found.items():
                step_s, restart_s, protected = one(count, name, 24.0, steps)
                step.values.append(step_s)
                restart.values.append(restart_s)
                share.values.append(len(protected) / steps)
        for name, (step, restart, share) in found.items():
            more = (step.median / found["none"][0].median - 1) * 100
            row = [str(count), name, step.text(1000), f"{more:+.0f} %", restart.text() if name != "none" else ""]
            table.rows.append([*row, f"{share.median * 100:.0f} %" if share.median else ""])
            print(*table.rows[-1], flush=True)
    return table


def rounds() -> Table:
    table = Table("How often a step is protected: 1 MB of state, partners", ["keepers", "between two, ms"])
    for count in (2, 4, 8, 16):
        _, _, protected = one(count, "partner", 1.0, 40)
        gaps = Stat([after - before for before, after in pairwise(protected)])
        table.rows.append([str(count), gaps.text(1000)])
        print(*table.rows[-1], flush=True)
    return table


if __name__ == "__main__":
    main()
