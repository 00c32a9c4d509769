"""Shared by all tests: one thread for torch, so that forked children compute like their parent; and cables to pull."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # looking for a device must not forbid forking

import pytest
import torch
import torch._dynamo  # optimizers load it when first made: once here, not in every forked child
from hypothesis import settings
from network import Network

settings.register_profile("everstep", deadline=None)  # machines are shared: no test is right or wrong by the clock
settings.load_profile("everstep")

torch.set_num_threads(1)
torch.set_flush_denormal(True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of long.txt take too long for `make test`, where others like them are."""
    long = set(Path(__file__).with_name("long.txt").read_text().splitlines())
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.soak)


@pytest.fixture
def network() -> Iterator[Any]:
    """Of the nodes of a camp or a cluster."""
    made: list[Network] = []

    def make(nodes: Any) -> Network:
        try:
            made.append(Network(nodes.nodes))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces can be made here: {error}")
        return made[-1]

    yield make
    for one in made:
        one.close()
