"""A run that a module makes once, by its `original()`, and a copy of it for every attack."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lives import run_of

from everstep.capture.host import arena_root


@pytest.fixture(scope="module", autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    original = getattr(request.module, "original", None)
    if original is not None and original.cache_info().currsize:
        shutil.rmtree(original().parent, ignore_errors=True)
        original.cache_clear()


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    original: Path = request.module.original()
    directory = tmp_path / "run"
    shutil.copytree(original, directory)
    yield directory
    shutil.rmtree(arena_root(None) / run_of(original), ignore_errors=True)
