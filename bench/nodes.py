"""What nodes that protect each other cost: per step, per save and per restart, beside root checkpointing.

Every node is a forked rank with a name, a directory, memory and a keeper of its own, all on this machine: its cores are
shared by trainers and keepers alike, which a cluster's are not. Lives are interleaved, and every ratio is of one run.

    python bench/nodes.py [--quick] [--out bench/results]
    python bench/nodes.py --apart       trainers on one core, keepers on another
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import psutil
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
_APART_BATCH = 640
_BUSY = "none, the other core busy"


def model_of(megabytes: float) -> nn.Module:
    """Layers whose parameters and AdamW state take about this much."""
    torch.manual_seed(0)
    width = int((megabytes * MB / 12 / 4) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def train(
    directory: Path, scheme: str, megabytes: float, steps: int, root: Path, apart: bool, pause_s: float
) -> dict[str, Any]:
    """One rank of one life: times of its steps, and of coming back. `apart`: trainers and keepers share no core."""
    rank = dist.get_rank()
    own, keepers = _cores(rank)
    if apart:
        _pin(os.getpid(), own)
    model = model_of(megabytes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    x = torch.randn(_APART_BATCH if apart else 64, model[0].in_features)
    began = time.perf_counter()
    run, first, path = None, 0, root / "root.pt"
    if scheme == "root":
        first = _load_root(model, optimizer, path)
    elif scheme in SCHEMES:
        run = everstep.guard(
            model, optimizer, dir=directory, steps=10**6, strategy="snapshot", tiers=SCHEMES[scheme], linger="30s",
            keep=1,
        )  # fmt: skip
        first = run.step
    keeper = psutil.Process(_keeper_of(directory)) if run is not None else None
    if apart and keeper is not None:
        _pin(keeper.pid, keepers)
    dist.barrier()
    came_back = time.perf_counter() - began
    times, spent = [], _processor_s(keeper)
    for step in range(first, first + steps):
        time.sleep(pause_s)
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
    spent = _processor_s(keeper) - spent
    return {"times": times[2:], "came_back": came_back, "first": first, "keeper_s": spent}


def _keeper_of(directory: Path) -> int:
    pid = keeper_pid(run_name(DiskTier(directory)))
    if pid is None:
        raise RuntimeError(f"{directory} has no keeper")
    return pid


def _processor_s(process: psutil.Process | None) -> float:
    return sum(process.cpu_times()[:2]) if process is not None else 0.0


def _cores(rank: int) -> tuple[int, int]:
    """Of a trainer and of its keeper: half of them are for trainers. One each, where there are enough.

    Two that are threads of one core go to two trainers, or to two keepers.
    """
    cores = sorted(os.sched_getaffinity(0), key=lambda core: (min(_siblings(core)), core))
    half = len(cores) // 2
    apart = [*range(0, half, 2), *range(1, half, 2)]  # neighbours share a core, if any do
    return cores[apart[rank % half]], cores[half + apart[rank % half]]


def _siblings(core: int) -> list[int]:
    try:
        said = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return [core]
    return [int(number) for number in said.replace("-", ",").split(",")]


def _pin(pid: int, core: int) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


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

    def live(
        self, scheme: str, megabytes: float, steps: int, *, apart: bool = False, pause_s: float = 0.0
    ) -> list[dict[str, Any]]:
        """All ranks of one life, which die at its end as in a crash; what each measured."""
        with _store() as port:
            hear, tell = os.pipe()
            pids = []
            for rank in range(len(self.names)):
                pid = os.fork()
                if pid == 0:
                    directory = self.root / self.names[rank]
                    self._be(
                        rank, port, tell, partial(train, directory, scheme, megabytes, steps, self.root, apart, pause_s)
                    )
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


@contextmanager
def _busy(core: int) -> Iterator[None]:
    """Somebody on this core who has nothing to do with training, and copies memory all the time, as a keeper would."""
    pid = os.fork()
    if pid == 0:
        _pin(os.getpid(), core)
        source = torch.zeros(int(24 * MB), dtype=torch.uint8)
        target = torch.zeros_like(source)
        while True:
            target.copy_(source)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@dataclass
class One:
    """One job of one scheme."""

    step_s: float  # the median
    restart_s: float
    protected: list[float]  # when steps were
    keeper_s: float  # of processor time, of all keepers


def one(count: int, scheme: str, megabytes: float, steps: int, *, apart: bool = False) -> One:
    nodes = Nodes(count)
    try:
        with _busy(_cores(0)[1]) if scheme == _BUSY else nullcontext():
            first = nodes.live(scheme, megabytes, steps, apart=apart)
        step = statistics.median(max(row["times"][i] for row in first) for i in range(len(first[0]["times"])))
        protected = nodes.protected() if SCHEMES.get(scheme) else []
        again = nodes.live(scheme, megabytes, 3) if scheme != "none" and not apart else [{"came_back": 0.0}]
        return One(step, max(row["came_back"] for row in again), protected, sum(row["keeper_s"] for row in first))
    finally:
        nodes.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--apart", action="store_true", help="trainers and keepers on cores of their own, and only that"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    repeats, steps = (2, 15) if options.quick else (3, 30)
    command = f"python bench/nodes.py{' --quick' * options.quick}{' --apart' * options.apart}"
    report = Report("What nodes that protect each other cost", command, machine())
    if options.apart:
        report.tables.append(apart(repeats, steps))
        report.save(options.out, "nodes-apart")
        return
    found, table = schemes(repeats, steps)
    report.tables += [table, rounds()]
    report.data["schemes"] = {
        f"{count} {name}": [asdict(each) for each in all_] for (count, name), all_ in found.items()
    }
    report.save(options.out, "nodes")
    draw(found, options.out / "nodes.svg")
    print(report.markdown())


Found = dict[tuple[int, str], list[One]]


def schemes(repeats: int, steps: int) -> tuple[Found, Table]:
    headers = ["ranks", "scheme", "step, ms", "against none", "restart, s", "steps protected"]
    table = Table("Every step saved, and back again: 24 MB of state, one rank a node", headers)
    found: Found = {}
    for count in (1, 2, 4, 8):
        names = ["none", "root", *(name for name in SCHEMES if count > 2 or name == "single")]
        names += ["partner", "xor"] if count == 2 else []
        for _ in range(repeats):
            for name in names:
                found.setdefault((count, name), []).append(one(count, name, 24.0, steps))
        for name in names:
            table.rows.append(_row(count, name, found, steps))
            print(*table.rows[-1], flush=True)
    return found, table


def _row(count: int, name: str, found: Found, steps: int) -> list[str]:
    all_ = found[count, name]
    step, restart = Stat([each.step_s for each in all_]), Stat([each.restart_s for each in all_])
    share = statistics.median(len(each.protected) / steps for each in all_)
    row = [str(count), name, step.text(1000), f"{more_than_none(count, name, found):+.0f} %"]
    return [*row, restart.text() if name != "none" else "", f"{share * 100:.0f} %" if share else ""]


def more_than_none(count: int, name: str, found: Found) -> float:
    mine, none = (statistics.median(each.step_s for each in found[count, way]) for way in (name, "none"))
    return (mine / none - 1) * 100


def apart(repeats: int, steps: int) -> Table:
    """Nodes whose trainers have other cores than their keepers: what protection costs training itself."""
    cores = len(os.sched_getaffinity(0))
    count = 4 if cores >= 8 else 2
    table = Table(
        f"Trainers on cores of their own, keepers on others: {count} nodes on {cores} cores, 24 MB of state",
        ["scheme", "step, ms", "against none", "against single"],
        note="The trainers' cores are the same in all rows. Ratios of neighbouring jobs. A core beside which another "
        "one copies memory is slower by itself: the second row has nothing of Everstep in it. Single: every step is "
        "captured, by a thread on the trainer's own core, and nothing leaves the node.",
    )
    names = ["none", _BUSY, "single", "partner", "xor", *(["rs, 2 losses"] if count > 2 else [])]
    found: dict[str, Stat] = {name: Stat() for name in names}
    for _ in range(repeats + 1):
        for name in names:
            found[name].values.append(one(count, name, 24.0, steps, apart=True).step_s)
    for name in names:
        more = [_more(found[name], found[other]).text(100) + " %" for other in ("none", "single")]
        table.rows.append([name, found[name].text(1000), *more])
        print(*table.rows[-1], flush=True)
    return table


def _more(mine: Stat, theirs: Stat) -> Stat:
    return Stat([one / other - 1 for one, other in zip(mine.values, theirs.values, strict=True)])


def rounds() -> Table:
    headers = ["keepers", "protected", "between two, ms", "processor time of a keeper for one, ms"]
    table = Table(
        "What one more node costs a save: 1 MB of state, partners", headers,
        note="40 steps of half a second each, so that the processor time is that of saving, and not of waiting for it.",
    )  # fmt: skip
    for count in (2, 4, 8, 16):
        nodes = Nodes(count)
        try:
            rows = nodes.live("partner", 1.0, 40, pause_s=0.5)
            protected = nodes.protected()
        finally:
            nodes.close()
        gaps = Stat([after - before for before, after in pairwise(protected)])
        each = Stat([row["keeper_s"] / max(1, len(protected)) for row in rows])
        table.rows.append([str(count), f"{len(protected)} of 40", gaps.text(1000), each.text(1000)])
        print(*table.rows[-1], flush=True)
    return table


def draw(found: Found, path: Path) -> None:
    """Save and restart over ranks, as the experiment with SCR drew them; needs matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install matplotlib", flush=True)
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (save, restart) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name in ("root", *SCHEMES):
        counts = [count for count, way in found if way == name]
        save.plot(counts, [more_than_none(count, name, found) for count in counts], marker="o", label=name)
        backs = [statistics.median(each.restart_s for each in found[count, name]) for count in counts]
        restart.plot(counts, backs, marker="o", label=name)
    for axes, title, unit in ((save, "saving every step", "% over not saving"), (restart, "coming back", "seconds")):
        axes.set(title=title, xlabel="ranks, one a node", ylabel=unit, xticks=[1, 2, 4, 8], ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    restart.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
