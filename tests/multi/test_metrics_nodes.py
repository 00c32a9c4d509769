"""Several nodes, each with a keeper that Prometheus asks."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from cluster import results
from metered import Scraped, address_of, scrape

import everstep
from everstep import Partner


def test_what_a_lost_node_would_cost_is_told_by_every_keeper(cluster: Any) -> None:
    nodes = cluster(1, 1, tiers=[Partner()])

    def at_step(run: everstep.Run, rank: int) -> None:
        if run.step == 5:
            run.wait("protected")
            dist.barrier()
            node = nodes.nodes[rank]
            (nodes.root / f"said-{node}").write_text(scrape(address_of(nodes.directory(node))))
            dist.barrier()

    results(nodes.live(at_step, prepare=lambda node: os.environ.update(EVERSTEP_METRICS=":0")))
    for rank, node in enumerate(nodes.nodes):
        said = Scraped((nodes.root / f"said-{node}").read_text())
        assert {dict(key)["node"] for family in said.families.values() for key in family.samples} == {node}
        assert said("everstep_world_ranks") == 2
        assert said("everstep_rank_alive") == said("everstep_rank_alive", rank=str(rank)) == 1
        assert said("everstep_protected_step") == 5
        assert said("everstep_exposure_steps", loss="node") == 0
        assert said("everstep_written_bytes_total", tier="partner", what="bases") > 0
        assert said("everstep_flush_failures_total", tier="partner") == 0
        assert said("everstep_silent_nodes") == 0
