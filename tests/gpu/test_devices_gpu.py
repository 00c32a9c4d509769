"""How busy a real device was, as NVML told the keeper while a loop ran on it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import nn

import everstep
from everstep.timeline import device_and_percent, read_devices

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import must_finish, run_directory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(120),
]


def train_and_rest(directory: Path) -> dict[str, list[int]]:
    """How busy the device was in both times, leaving out the second in which an answer is of the time before."""
    torch.manual_seed(0)
    model = nn.Linear(4096, 4096).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x = torch.randn(4096, 4096, device="cuda")
    run = everstep.guard(model, optimizer, dir=directory, linger="1s")
    began = time.time()
    while time.time() - began < 3.0:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.done()
        torch.cuda.synchronize()
    rested = time.time()
    time.sleep(2.0)
    ended = time.time()
    run.close()
    time.sleep(2.5)  # the keeper ends, and writes what is left
    (track,) = read_devices(directory)
    spans = [(span.begin, device_and_percent(span)[1]) for span in track.spans]
    return {
        "busy": [percent for begin, percent in spans if began + 1.0 < begin < rested],
        "idle": [percent for begin, percent in spans if rested + 1.0 < begin < ended],
    }


def test_a_busy_device_is_seen_busy_and_an_idle_one_idle() -> None:
    pytest.importorskip("pynvml", reason="NVML needs nvidia-ml-py")
    with run_directory() as directory:
        found = must_finish(lambda: train_and_rest(directory))
    print(found)
    assert found["busy"] and median(found["busy"]) > 50
    assert found["idle"] and median(found["idle"]) < 20
