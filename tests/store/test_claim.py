"""A run is held by one job at a time, and not by an attempt that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.errors import TierFailed
from everstep.store import claim
from everstep.store.places import Places
from everstep.tiers import gather
from everstep.topology import Topology


class Breaking:
    """What ranks tell each other gets through so many times; then one of them is lost."""

    def __init__(self, times: int) -> None:
        self._left = times

    def exchange(self, payload: bytes) -> list[bytes]:
        if self._left == 0:
            raise ConnectionError("connection closed by peer")
        self._left -= 1
        return [payload, b""]

    def broadcast(self, data: memoryview, source: int) -> None:
        raise AssertionError


@pytest.mark.parametrize("times", [0, 1])
def test_whoever_is_left_takes_a_run_again_when_a_rank_was_lost_while_all_took_it(tmp_path: Path, times: int) -> None:
    places = Places.chosen(tmp_path / "run", gather(()))
    claim.make(places)
    both = Topology(rank=0, world=2, node="n", nodes=("n", "n"), domains=("n", "n"), messages=Breaking(times))
    with pytest.raises(ConnectionError):
        claim.take(places, both, lambda event: None)
    left = Topology(rank=0, world=1, node="n", nodes=("n",), domains=("n",))
    claim.take(places, left, lambda event: None).give_back()


def test_what_cannot_be_written_is_named_as_a_person_writes_it(tmp_path: Path) -> None:
    (tmp_path / "holder").mkdir()
    alone = Topology(rank=0, world=1, node="n", nodes=("n",), domains=("n",))
    with pytest.raises(TierFailed, match=f"must be able to write to its directory: .*: '{tmp_path}/holder'"):
        claim.take(Places.chosen(tmp_path, gather(())), alone, lambda event: None)
