"""Clusters that are gone when a test is, and what they give when nothing happens to them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, results
from situation import Situation


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    made: list[Cluster] = []

    def make(*ranks: int, **options: Any) -> Cluster:
        root = tmp_path / f"c{len(made)}"
        root.mkdir()
        made.append(Cluster(root, ranks, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def is_alone(request: pytest.FixtureRequest) -> bool:
    """Whether no other test ran in this process: ranks are forked from it, and an object store forbids that once used.

    If one may have, the test is run again by a process of its own, and this one has nothing more to do.
    """
    if os.environ.get("EVERSTEP_TEST_ALONE"):
        return True
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", request.node.nodeid]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    ended = subprocess.run(
        command, cwd=request.config.rootpath, env={**environment, "EVERSTEP_TEST_ALONE": "1"}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    return False


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The state at the end of a life, or after some steps, that nothing happens to."""
    known: dict[tuple[Any, ...], str] = {}

    def ask(*ranks: int, **options: Any) -> str:
        key = (*ranks, *options.items())
        if key not in known:
            made = Cluster(tmp_path_factory.mktemp("undisturbed"), ranks)
            known[key] = results(made.live(**options))[0]["state"]
            made.close()
        return known[key]

    return ask


@pytest.fixture(scope="module")
def situation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster right after all its trainers died, as often as it is asked for. It is made once for each way to die."""
    known: dict[str, Situation] = {}

    def ask(ranks: tuple[int, ...], name: str, die: Any, **options: Any) -> Cluster:
        key = f"{ranks} {name}"
        if key not in known:
            made = Cluster(tmp_path_factory.mktemp("s"), ranks, **options)
            made.live(die)
            known[key] = Situation(made, tmp_path_factory.mktemp("saved"))
        return known[key].bring_back()

    yield ask
    for one in known.values():
        one.cluster.close()
