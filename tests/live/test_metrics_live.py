"""A loss and the recovery from it, as Prometheus hears of them."""

from __future__ import annotations

import os
from pathlib import Path

from metered import Scraped, address_of, scrape
from team import Act, Here, Team, kill_at, survivors


def test_a_lost_rank_and_its_spare_are_counted(directory: Path) -> None:
    said = directory.parent / "said"
    dies: Act = kill_at(1, 5)

    def act(here: Here) -> None:
        dies(here)
        if int(os.environ["RANK"]) == 0 and here.run.step == 8:
            here.run.wait("sealed")
            said.write_text(scrape(address_of(directory)))

    os.environ["EVERSTEP_METRICS"] = "0"
    try:
        team = Team(directory, 2, spares=1, on_loss=["spare"]).start(act)
    finally:
        del os.environ["EVERSTEP_METRICS"]
    survivors(team.wait())
    heard = Scraped(said.read_text())
    assert heard("everstep_ranks_lost_total") == 1
    assert heard("everstep_recoveries_total", policy="spare") == 1
    assert heard("everstep_recoveries_total", policy="rollback") == 0
    assert heard("everstep_lives_total") == 2
    assert sum(heard.all("everstep_rank_alive").values()) == heard("everstep_world_ranks") == 2
    assert heard("everstep_step", rank="0") == 8
    assert heard("everstep_step", rank="1") in (8, 9)  # it may be at its cut already
