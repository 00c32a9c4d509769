"""Keepers in network namespaces of their own, and a cable between two of them that is pulled for ten seconds."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist
from cluster import die_at, results

from everstep import Parity, Partner
from everstep.events import Degraded, Protected, read_events

CUT_S = 10.0


@pytest.mark.soak
@pytest.mark.parametrize("cut_off", [0, 1], ids=["who appoints the steps", "another"])
@pytest.mark.parametrize("scheme", [Partner(), Parity("xor")], ids=["partner", "xor"])
def test_a_network_cut_of_ten_seconds_is_told_of_and_protection_goes_on_by_itself(
    cut_off: int, scheme: Any, cluster: Any, network: Any, undisturbed: Any
) -> None:
    nodes = cluster(1, 1, 1, tiers=[scheme], steps=500)
    cables, cut_at = network(nodes), nodes.root / "cut"

    def when(run: Any, rank: int) -> None:
        if run.step == 3:
            run.wait("protected")
            dist.barrier()
            if rank == 0:
                cables.cut(nodes.nodes[cut_off])
                cut_at.write_text(str(time.monotonic()))
            dist.barrier()
        if run.step > 3:
            time.sleep(0.05)  # training goes on all the while
        if run.step == 300:
            assert time.monotonic() - float(cut_at.read_text()) > CUT_S
            dist.barrier()
            if rank == 0:
                cables.mend(nodes.nodes[cut_off])
        die_at(300, level="protected")(run, rank)

    nodes.live(when, prepare=cables.prepare, timeout_s=200)
    told = [e for node in nodes.nodes for e in read_events(nodes.directory(node))]
    assert any(isinstance(e, Degraded) and "protected" in e.what for e in told)
    assert max(e.step for e in told if isinstance(e, Protected)) == 300
    nodes.lose(nodes.nodes[2])
    found = results(nodes.live(steps=302, prepare=cables.prepare))
    assert {one["resumed_from"] for one in found} == {300}
    assert {one["restored"] for one in found} == {undisturbed(1, 1, 1, steps=300)}
