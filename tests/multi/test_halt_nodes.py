"""All ranks of all nodes leave at the same step, wherever the halt was asked for."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from cluster import Cluster, results

import everstep
from everstep.events import Halted, read_events
from everstep.image import FORMAT
from everstep.store import halts
from everstep.types import HaltRecord

STEPS = 400


@pytest.fixture
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, request.param, steps=STEPS, linger="5s")
    yield made
    made.close()


@pytest.mark.parametrize("nodes", [(2,), (1, 2)], indirect=True, ids=["one node", "two nodes"])
def test_all_ranks_leave_at_the_same_step_and_go_on_from_it(nodes: Cluster) -> None:
    """The halt is asked for in the directory of the last node: its keeper tells the others."""
    directory = nodes.directory(nodes.nodes[-1])
    last_rank = sum(nodes.ranks.values()) - 1

    def ask(run: everstep.Run, rank: int) -> None:
        time.sleep(0.002 * rank)
        if run.step == 3 and rank == last_rank:
            wish: dict[str, Any] = {"after": None, "before": None, "seconds": None}
            halts.write(directory, HaltRecord(format=FORMAT, now=True, set_time=time.time(), **wish))
        told = run.should_exit()
        with (nodes.root / f"told-{rank}").open("a") as file:
            print(run.step, told, file=file)

    ended = nodes.live(ask)
    assert ["SystemExit: 0" in one.error for one in ended] == [True] * (last_rank + 1), ended
    events = [one for node in nodes.nodes for one in read_events(nodes.directory(node)) if isinstance(one, Halted)]
    assert len(events) == last_rank + 1
    (step,) = {one.step for one in events}
    assert 3 < step < STEPS
    for rank in range(last_rank + 1):
        told = (nodes.root / f"told-{rank}").read_text().splitlines()
        assert [line for line in told if line.endswith("True")] == [f"{step - 1} True"], "in its last step only"
    record = halts.read(directory)
    assert record is not None and (record.obeyed_step, record.why) == (step, "now")
    assert [one["resumed_from"] for one in results(nodes.live())] == [step] * (last_rank + 1)
