"""Sharded state on two nodes with a directory each: keepers copy parts to each other, and one node may be lost."""

from __future__ import annotations

import os
import shutil
import signal
from datetime import timedelta
from pathlib import Path

import harness
import laid_out
import pytest
import torch
import torch.distributed as dist
from acts import differing

import everstep
from everstep.capture.host import arena_root


def _live(rank: int, life: int, strategy: str, place: Path) -> None:
    os.environ["EVERSTEP_NODE"] = f"shards{os.getppid()}-{rank}"
    (place / f"node-{rank}").write_text(os.environ["EVERSTEP_NODE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{place}/meeting-{life}", timedelta(seconds=60), rank=rank, world_size=2
    )  # fmt: skip
    torch.manual_seed(life)
    model, optimizer = laid_out.laid_out("fsdp", laid_out.Net())
    options = {"tiers": [everstep.Partner()], "strategy": strategy, "linger": "5s"}
    run = everstep.guard(model, optimizer, dir=place / f"run-{rank}", **options)
    began = laid_out.whole(model, optimizer)
    for _ in range(0 if life else 3):
        laid_out.backward(model, laid_out.batch("fsdp", run.step, rank))
        optimizer.step()
        optimizer.zero_grad()
        run.done()
    is_protected = life > 0 or run.wait("protected", 60)
    torch.save((run.resumed_from, is_protected, began, laid_out.whole(model, optimizer)), place / f"{life}-{rank}")
    dist.barrier()
    if life == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    run.close()
    os._exit(0)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["snapshot", "log"])
def test_a_lost_nodes_parts_come_from_its_partner(strategy: str, tmp_path: Path) -> None:
    pytest.importorskip("zmq")

    def lose(rank: int) -> None:
        shutil.rmtree(tmp_path / f"run-{rank}")
        shutil.rmtree(arena_root(None, {"EVERSTEP_NODE": (tmp_path / f"node-{rank}").read_text()}))

    try:
        for life in range(3):
            if life == 2:
                lose(1)
            ranks = [harness._forked.Process(target=_live, args=(rank, life, strategy, tmp_path)) for rank in range(2)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(120.0)
            codes = [process.exitcode for process in ranks]
            for process in ranks:
                process.kill()
                process.join()
            assert codes == [0 if life else -signal.SIGKILL] * 2
        _, is_protected, _, trained = torch.load(tmp_path / "0-0")
        assert is_protected
        for life, rank in ((1, 0), (1, 1), (2, 0), (2, 1)):
            resumed_from, _, began, _ = torch.load(tmp_path / f"{life}-{rank}")
            assert resumed_from == 3 and differing(trained, began) == []
    finally:
        for rank in range(2):
            shutil.rmtree(arena_root(None, {"EVERSTEP_NODE": (tmp_path / f"node-{rank}").read_text()}), True)
