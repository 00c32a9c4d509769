"""Arguments of guard() that cannot be right are refused by their names, before anything is begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lives import tiny

import everstep
from everstep.errors import BadConfig


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"compress": "topk"}, r"compress takes TopK\(...\), .*, not 'topk'; make one"),
        ({"compress": everstep.compress.TopK}, r"compress takes .*, not <class 'everstep.*TopK'>"),
        ({"scaler": 3}, "scaler takes a torch.amp.GradScaler, not 3"),
        ({"scaler": [torch.amp.GradScaler("cpu")]}, "scaler takes a torch.amp.GradScaler, not \\[<"),
        ({"scheduler": 3}, "scheduler must have state_dict"),
    ],
    ids=["compress-word", "compress-class", "scaler-number", "scaler-list", "scheduler-number"],
)
def test_what_is_none_of_its_kind_is_refused(words: dict[str, Any], said: str, tmp_path: Path) -> None:
    model, optimizer, loader = tiny()
    with pytest.raises(BadConfig, match=said):
        everstep.guard(model, optimizer, loader, dir=tmp_path / "run", **words)
    assert not (tmp_path / "run").exists()


def test_where_nothing_can_be_trained_nothing_is_begun(tmp_path: Path) -> None:
    model, optimizer, loader = tiny()
    with torch.inference_mode(), pytest.raises(BadConfig, match=r"inside torch.inference_mode\(\)"):
        everstep.guard(model, optimizer, loader, dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
