"""Streams of Hugging Face: killed and resumed, every sample of every pass is seen once, in the same order."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import everstep

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import live, must_finish, run_directory

SHARDS, SAMPLES, PASSES = 3, 20, 2


def samples(shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        for i in range(SAMPLES):
            yield {"x": [float(i), float(shard), 1.0], "name": shard * SAMPLES + i}


def train(directory: Path, kind: type[DataLoader[Any]], die_at: int = -1) -> dict[str, Any]:
    import datasets  # in a process of its own: it starts threads

    stream = datasets.IterableDataset.from_generator(samples, gen_kwargs={"shards": list(range(SHARDS))})
    loader = kind(stream.shuffle(seed=5, buffer_size=7).with_format("torch"), batch_size=4)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    seen: list[list[int]] = []
    run = everstep.guard(
        model, optimizer, loader, dir=directory, epochs=PASSES, linger="1s", keeper="inline", extra={"seen": seen}
    )
    for batch in run:
        model(batch["x"]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(batch["name"].tolist())
        if run.step == die_at:
            run.wait("durable")
            os.kill(os.getpid(), signal.SIGKILL)
    return {"seen": seen, "resumed_from": run.resumed_from}


@pytest.mark.parametrize("kind", [StatefulDataLoader, pytest.param(DataLoader, marks=pytest.mark.soak)])
def test_no_sample_is_lost_or_seen_twice(kind: type[DataLoader[Any]]) -> None:
    """Killed in the first pass and in the second: a shuffle buffer is in nobody's state."""
    with run_directory() as one, run_directory() as two:
        whole = must_finish(lambda: train(one, kind))["seen"]
        for die_at in (6, 22):
            assert live(lambda: train(two, kind, die_at)).killed
        resumed = must_finish(lambda: train(two, kind))
    assert resumed["resumed_from"] == 22
    assert resumed["seen"] == whole
    each = SHARDS * SAMPLES // 4
    for number in range(PASSES):
        names = [name for batch in whole[number * each : (number + 1) * each] for name in batch]
        assert sorted(names) == list(range(SHARDS * SAMPLES))
