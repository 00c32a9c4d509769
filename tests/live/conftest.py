from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lives import run_directory


@pytest.fixture
def directory() -> Iterator[Path]:
    with run_directory() as made:
        yield made
