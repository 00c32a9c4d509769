"""A rank of a model that is cut over ranks is lost, and training goes on in the same processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lives import run_directory
from sharing import train_sharded
from team import Act, Ended, Team, in_backward, in_forward, in_the_update, kill_at, own, survivors


def team(directory: Path, world: int = 4, **options: Any) -> Team:
    return Team(directory, world, train=train_sharded, **options)


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Ended]:
    with run_directory() as directory:
        return team(directory, on_loss=["spare", "rollback"]).start().wait()


@pytest.mark.parametrize(
    "act", [kill_at(1, 5), in_forward(2, 6), in_the_update(3, 7)],
    ids=["after backward", "in forward", "in the update"],
)  # fmt: skip
def test_with_a_spare_a_replica_is_whole_again_and_the_run_ends_bit_for_bit(
    directory: Path, undisturbed: dict[int, Ended], act: Act
) -> None:
    ranks = team(directory, spares=1, on_loss=["spare"])
    found = ranks.start(act).wait()
    assert own(found) == own(undisturbed)
    assert sum(one.killed for one in found.values()) == 1
    assert all(one["pid"] in ranks.pids.values() for one in survivors(found))
