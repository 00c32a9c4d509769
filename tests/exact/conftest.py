from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    """Makes stages, and takes away what their runs leave in shared memory."""
    made: list[Stage] = []

    def make(feature: str, keeper: str = "inline", strategy: str = "snapshot") -> Stage:
        made.append(Stage(feature, tmp_path / f"stage-{len(made)}", keeper, strategy))
        return made[-1]

    yield make
    for one in made:
        one.clean_up()
