"""What goes wrong on the way from a device is told to the loop; it does not leave it waiting."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.capture.sheet import Sheet

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import must_finish, run_directory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(60),
]


def test_records_and_residuals_that_cannot_leave_the_device_end_the_training() -> None:
    def life() -> dict[str, Any]:
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        compress = everstep.compress.TopK(0.05)
        run = everstep.guard(model, optimizer, dir=directory, strategy="log", compress=compress, linger="1s")

        def step() -> None:
            model(torch.randn(8, 64, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.done()

        for _ in range(8):
            step()
        run.wait("sealed")

        def fails(sheet: Sheet, *_: object) -> None:
            raise RuntimeError("the link is gone")

        Sheet._leave = fails  # type: ignore[method-assign]
        with pytest.raises(everstep.EverstepError, match="the link is gone"):
            for _ in range(4):
                step()
        return {"step": run.step}

    with run_directory() as directory:
        assert must_finish(life)["step"] >= 8
