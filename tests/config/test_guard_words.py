"""Arguments of guard() that cannot be right are refused by their names, before anything is begun."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import tiny
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import everstep
from everstep import Disk, Keep
from everstep.errors import BadConfig


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"compress": "topk"}, r"compress takes TopK\(...\), .*, not 'topk'; make one"),
        ({"compress": everstep.compress.TopK}, r"compress takes .*, not <class 'everstep.*TopK'>"),
        ({"scaler": 3}, "scaler takes a torch.amp.GradScaler, not 3"),
        ({"scaler": [torch.amp.GradScaler("cpu")]}, "scaler takes a torch.amp.GradScaler, not \\[<"),
        ({"scheduler": 3}, "scheduler must have state_dict"),
        ({"scheduler": StepLR}, r"scheduler takes an object, not the class StepLR; make one: StepLR\(...\)"),
        ({"scheduler": [StepLR]}, "scheduler takes an object, not the class StepLR"),
        ({"loader": 5}, "loader must be something to iterate, or None for .*, not 5"),
        ({"loader": DataLoader}, "loader takes an object, not the class DataLoader"),
        ({"dir": 5}, "dir must be a path such as 'runs/gpt2', not 5"),
        ({"dir": None}, "dir must be a path .*, not None"),
        ({"epochs": "3"}, "epochs must be None or a whole number from 1, not '3'"),
        ({"epochs": True}, "epochs must be None or a whole number from 1, not True"),
        ({"steps": "3"}, "steps must be None or a whole number from 1, not '3'"),
        ({"steps": 2.5}, "steps must be None or a whole number from 1, not 2.5"),
        ({"steps": 0}, "steps must be None or a whole number from 1, not 0"),
        ({"tiers": Disk(every=7)}, r"tiers takes a list such as \[Disk\(every=100\)\], .*, not Disk\(.*every=7"),
        ({"tiers": Disk}, "tiers takes a list .*, not <class 'everstep.*Disk'>"),
        ({"overhead_budget": "3%"}, "overhead_budget must be a share between 0 and 1, not '3%'"),
        ({"on_loss": None}, "on_loss takes spare, .*, one or a list, not None"),
    ],
    ids=lambda of: "-".join(of) if isinstance(of, dict) else "",
)
def test_what_is_none_of_its_kind_is_refused(words: dict[str, Any], said: str, tmp_path: Path) -> None:
    model, optimizer, loader = tiny()
    with pytest.raises(BadConfig, match=said):
        everstep.guard(model, optimizer, **{"loader": loader, "dir": tmp_path / "run", **words})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [{"last": "2"}, {"last": 0}, {"last": 1.5}, {"every": "60s"}, {"every": 0}])
def test_a_number_of_checkpoints_is_a_number(words: dict[str, Any]) -> None:
    (name, value), *_ = words.items()
    with pytest.raises(BadConfig, match=rf"Keep\({name}=\) takes a number .*from 1, .*not {value!r}"):
        Keep(**words)


class Once:
    """A loader that must be asked for its batches once, by whoever trains."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("nobody trains yet")


class Numbered:
    """One of the old kind: it is asked for its items by number."""

    def __getitem__(self, number: int) -> int:
        return [1, 2, 3][number]


@pytest.mark.parametrize("loader", [Once(), Numbered(), [1, 2, 3], None])
def test_a_loader_is_whatever_can_be_iterated_and_is_not_iterated_for_that(loader: Any, tmp_path: Path) -> None:
    model, optimizer, _ = tiny()
    everstep.guard(model, optimizer, loader, dir=tmp_path / "run", keeper="inline").close()


def test_where_nothing_can_be_trained_nothing_is_begun(tmp_path: Path) -> None:
    model, optimizer, loader = tiny()
    with torch.inference_mode(), pytest.raises(BadConfig, match=r"inside torch.inference_mode\(\)"):
        everstep.guard(model, optimizer, loader, dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
