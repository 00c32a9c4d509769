"""From any mesh to any other: the state is the same, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from acts import Act, differing, perform
from safetensors.torch import load_file

import everstep

FEW = [("fsdp", 2), ("fsdp", 3), ("hsdp", 4), ("ddp", 2), ("single", 1)]
NET = [("fsdp", 2), ("fsdp", 4), ("fsdp", 3), ("hsdp", 4), ("tp", 2), ("ddp", 2), ("ddp", 3), ("single", 1)]
PAIR = [*NET, ("fsdp_tp", 4), ("tp", 4), ("tp", 3), ("zero", 2), ("zero", 3)]

SMALL = [("fsdp", 4, "Net", FEW), ("zero", 2, "Pair", [("zero", 3), ("fsdp_tp", 4), ("single", 1)])]
LARGE = [
    *((kind, world, "Net", NET) for kind, world in NET),
    *((kind, world, "Pair", PAIR) for kind, world in PAIR),
]


def sharded_out(
    source: tuple[str, int], model: str, targets: list[tuple[str, int]], place: Path, log: str = ""
) -> list[str]:
    """What differs from the state that was trained, on any target, from memory, from disk, and for a reader.

    `log`: with this optimizer, and with records after the first step instead of bases.
    """
    kind, world = source
    how = {"model": model, "optimizer": log or "AdamW"}
    acts = [Act(kind, world, "run", steps=3, strategy="log" if log else "snapshot", breaks=bool(log), **how)]
    acts += [Act(*target, "run", wipe=i % 2 == 1, **how) for i, target in enumerate([source, *targets, source])]
    scenes = perform(acts, place)
    whole = scenes[0].ended[0]["state"]
    problems = []
    for act, scene in zip(acts[1:], scenes[1:], strict=True):
        for rank, began in enumerate(scene.began):
            assert began["resumed_from"] == 3
            assert began["replayed"] == ([(1, 2)] if log else [])
            problems += [f"{act.kind} on {act.world}, rank {rank}: {one}" for one in differing(whole, began["state"])]
    past = everstep.open(place / "run")
    read: dict[str, Any] = past.load()
    if log:
        past.export(place / "whole", 3)
        read |= {f"exported: {name}": value for name, value in load_file(place / "whole").items()}
        whole |= {f"exported: {name}": value for name, value in whole.items()}
        problems += [f.problem for f in past.verify(replay=True) if f.problem]
        problems += (
            [] if any("proven by a digest of step 3" in f.note for f in past.verify(replay=True)) else ["unproven"]
        )
    return problems + [f"read: {name}" for name, value in whole.items() if not torch.equal(read[name], value)]


@pytest.mark.parametrize(("kind", "world", "model", "targets"), SMALL, ids=str)
def test_the_state_is_the_same_on_another_mesh(
    kind: str, world: int, model: str, targets: list[tuple[str, int]], tmp_path: Path
) -> None:
    assert sharded_out((kind, world), model, targets, tmp_path) == []


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "world", "model", "targets"), LARGE, ids=str)
def test_the_state_is_the_same_on_every_other_mesh(
    kind: str, world: int, model: str, targets: list[tuple[str, int]], tmp_path: Path
) -> None:
    assert sharded_out((kind, world), model, targets, tmp_path) == []


FROM_RECORDS = [
    ("fsdp", 2, "Net", [("fsdp", 3), ("ddp", 2), ("single", 1)], "AdamW"),
    ("zero", 2, "Pair", [("zero", 3)], "fused"),
    ("tp", 2, "Counting", [("single", 1)], "AdamW"),
    ("fsdp", 2, "Dormant", [("single", 1)], "AdamW"),
    ("alone", 2, "Pair", [("single", 1)], "Adafactor"),
]


@pytest.mark.parametrize(("kind", "world", "model", "targets", "optimizer"), FROM_RECORDS, ids=str)
def test_records_lead_to_the_same_state_on_another_mesh(
    kind: str, world: int, model: str, targets: list[tuple[str, int]], optimizer: str, tmp_path: Path
) -> None:
    assert sharded_out((kind, world), model, targets, tmp_path, optimizer) == []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "world", "model", "targets", "optimizer"),
    [
        *((*case, "AdamW") for case in LARGE),
        ("hsdp", 4, "Net", NET, "fused"),
        ("fsdp_tp", 4, "Pair", PAIR, "fused"),
        ("ddp", 2, "Net", NET, "fused"),
        ("zero", 3, "Pair", PAIR, "SGD"),
    ],
    ids=str,
)
def test_records_lead_to_the_same_state_on_every_other_mesh(
    kind: str, world: int, model: str, targets: list[tuple[str, int]], optimizer: str, tmp_path: Path
) -> None:
    assert sharded_out((kind, world), model, targets, tmp_path, optimizer) == []
