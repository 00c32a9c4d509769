"""One replica of torchft in the loop of `bench/live.py`; needs torchft, and nothing of Everstep.

python bench/live_torchft.py FOLDER --steps N --lighthouse ADDRESS [--shape WIDTHxDEPTH] [--dies] [--between]
python bench/live_torchft.py --serve            prints the address of a lighthouse, and serves it
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from live_loop import BATCH, DIES_AT, Shape, data_of, model_of, note, note_commit, note_death


def train(folder: Path, steps: int, lighthouse: str, rank: int, shape: Shape, *, dies: bool, between: bool) -> None:
    """`between`: it dies between two steps and not before a backward pass."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    def die() -> None:
        note_death(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    class Noting(Manager):  # type: ignore[misc]
        def should_commit(self, timeout: timedelta | None = None) -> bool:
            began = time.perf_counter()
            answer: bool = super().should_commit(timeout)
            note_commit(folder, time.perf_counter() - began)
            return answer

    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    module = model_of(shape)
    inner = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def load(state: dict[str, dict[str, object]]) -> None:
        module.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Noting(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)), min_replica_size=1, load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica-{rank}", store_addr="localhost", store_port=store.port, rank=0, world_size=1,
        lighthouse_addr=lighthouse, timeout=timedelta(seconds=30),
    )  # fmt: skip
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, inner)
    data = data_of(shape)
    while (step := manager.current_step()) < steps:
        at, is_last = step * BATCH % (len(data) - BATCH), dies and rank == 1 and step == DIES_AT
        if is_last and between:
            die()
        optimizer.zero_grad()
        loss = model(data[at : at + BATCH]).square().mean()
        if is_last:
            die()
        loss.backward()
        optimizer.step()
        if manager.current_step() > step:  # else it was not committed, and is done again
            note(folder, manager.current_step())
    manager.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--shape", type=Shape.of, default=Shape())
    parser.add_argument("--dies", action="store_true")
    parser.add_argument("--between", action="store_true")
    parser.add_argument("--serve", action="store_true")
    given = parser.parse_args()
    if given.serve:
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=200)
        print(server.address(), flush=True)
        while True:
            time.sleep(60)
    rank, how = int(os.environ["RANK"]), {"dies": given.dies, "between": given.between}
    train(given.folder, given.steps, given.lighthouse, rank, given.shape, **how)


if __name__ == "__main__":
    main()
