from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "exact"))

import harness
from harness import Stage

harness._forked.set_forkserver_preload(
    ["torch._dynamo", "torchdata.stateful_dataloader", "everstep.run", "torch.distributed.tensor.parallel",
     "torch.distributed.fsdp", "torch.distributed.optim"]
)  # fmt: skip


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    """Makes stages for the features of sharded.py, and takes away what their runs leave in shared memory."""
    made: list[Stage] = []

    def make(feature: str, keeper: str = "inline", strategy: str = "snapshot") -> Stage:
        made.append(Stage(feature, tmp_path / f"stage-{len(made)}", keeper, strategy, module="sharded"))
        return made[-1]

    yield make
    for one in made:
        one.clean_up()
