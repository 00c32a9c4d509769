"""On a CUDA device, which all ranks share: a rank is lost inside a step, and training goes on in the same processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lives import run_directory
from team import STEPS, Act, Ended, Team, in_backward, in_the_update, kill_at, own, survivors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(200),
]


@pytest.fixture(scope="module", autouse=True)
def unused_device() -> None:
    assert not torch.cuda.is_initialized(), "ranks are forked here: run this file in a call of its own"


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Ended]:
    with run_directory() as directory:
        return Team(directory, 3, device="cuda", on_loss=["spare"]).start().wait()


@pytest.mark.parametrize(
    "act",
    [kill_at(1, 5), in_backward(0, 4, 5), in_the_update(2, 7)],
    ids=["after backward", "in backward", "in the update"],
)
@pytest.mark.parametrize("strategy", ["snapshot", "log"])
def test_with_a_spare_the_run_ends_bit_for_bit_like_an_undisturbed_one(
    directory: Path, undisturbed: dict[int, Ended], act: Act, strategy: str
) -> None:
    team = Team(directory, 3, spares=1, device="cuda", on_loss=["spare"], strategy=strategy).start(act)
    found = team.wait()
    assert own(found) == own(undisturbed)
    assert sum(one.killed for one in found.values()) == 1
    assert all(one["pid"] in team.pids.values() for one in survivors(found))


@pytest.mark.parametrize("mode", ["host", "device"])
def test_without_a_spare_the_others_go_on_with_one_state(directory: Path, mode: str) -> None:
    found = survivors(Team(directory, 3, device="cuda", on_loss="rollback", mode=mode).start(kill_at(1, 5)).wait())
    assert [one["world"] for one in found] == [2, 2]
    assert len({one["state"] for one in found}) == 1
    assert {one["step"] for one in found} == {STEPS}


def test_forward_is_refused_where_gradients_are_on_a_device(directory: Path) -> None:
    found = Team(directory, 2, device="cuda", on_loss=["forward", "rollback"]).start().wait()
    assert all("needs gradients in host memory and gloo" in one.error for one in found.values())
