"""Keepers and ranks that are killed in the middle of what keeps a run safe, and again while it comes home."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from cluster import STEPS, Cluster, die_at, results
from doom import dies_before, keeper_with

from everstep import Disk, Parity, Partner, Shared
from everstep.events import Degraded, KeeperStarted, read_events
from everstep.keeper.client import keeper_pid
from everstep.recover import make_good
from everstep.recover.carry import Carrier
from everstep.store.disk import DiskTier
from everstep.store.manifest import committed_steps

AT = 5
SCHEMES = {"partner": [Partner()], "xor": [Parity("xor")]}
MOMENTS = [
    ("xor", "write member-", "encoding"),
    ("xor", "rename member-", "publishing parity"),
    ("partner", "piece step-", "copying"),
    ("partner", "end step-", "ending a copy"),
    ("partner", "rank-00001.json", "describing a copy"),
    ("partner", "rename step-", "committing on its disk"),
]


def keepers_started(cluster: Cluster, node: str) -> int:
    return sum(isinstance(e, KeeperStarted) for e in read_events(cluster.directory(node)))


@pytest.mark.parametrize(
    ("scheme", "operation", "doing"),
    [
        pytest.param(*moment, id=moment[2], marks=[] if moment[2] in ("encoding", "copying") else pytest.mark.soak)
        for moment in MOMENTS
    ],
)
def test_a_keeper_killed_in_the_middle_of_its_work_is_replaced_and_protection_goes_on(
    scheme: str, operation: str, doing: str, cluster: Any, undisturbed: Any, tmp_path: Path
) -> None:
    nodes, marker = cluster(1, 1, 1, tiers=SCHEMES[scheme]), tmp_path / "died"
    prepare = keeper_with(dies_before(operation, marker, after=1), nodes.nodes[1])
    dies = die_at(AT, level="protected")

    def when(run: Any, rank: int) -> None:
        if run.step == 2:
            run.wait("protected")  # so that the work of step 5 is not the first, however slow the keepers begin
        dies(run, rank)

    nodes.live(when, prepare=prepare)
    assert marker.exists(), f"nobody was killed while {doing}"
    assert keepers_started(nodes, nodes.nodes[1]) == 2
    nodes.lose(nodes.nodes[2])
    found = results(nodes.live())
    assert {one["resumed_from"] for one in found} == {AT}
    assert {one["state"] for one in found} == {undisturbed(1, 1, 1)}


@pytest.mark.parametrize(
    ("scheme", "which"),
    [
        ("partner", 1),
        pytest.param("xor", 0, id="xor-who appoints the steps"),
        pytest.param("xor", 1, marks=pytest.mark.soak),
        pytest.param("partner", 0, id="partner-who appoints the steps", marks=pytest.mark.soak),
    ],
)
def test_a_keeper_killed_in_mid_life_rejoins_and_what_was_protected_before_still_is(
    scheme: str, which: int, cluster: Any, undisturbed: Any
) -> None:
    nodes = cluster(1, 1, 1, tiers=SCHEMES[scheme])

    def when(run: Any, rank: int) -> None:
        if run.step == 3:
            run.wait("protected")
            dist.barrier()
            if rank == which:
                pid = keeper_pid(run.status()["run"])
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
        die_at(AT, level="protected")(run, rank)

    nodes.live(when)
    assert keepers_started(nodes, nodes.nodes[which]) == 2
    nodes.lose(nodes.nodes[2])
    found = results(nodes.live())
    assert {one["resumed_from"] for one in found} == {AT}
    assert {one["state"] for one in found} == {undisturbed(1, 1, 1)}


def test_a_keeper_killed_right_before_its_trainers_leaves_all_that_was_protected(
    cluster: Any, undisturbed: Any
) -> None:
    nodes = cluster(1, 1, 1, tiers=SCHEMES["partner"])
    nodes.live(die_at(AT, level="protected"))
    for node in nodes.nodes:
        nodes.kill_keeper(node)
    nodes.lose(nodes.nodes[0])
    found = results(nodes.live())
    assert {(one["resumed_from"], one["state"]) for one in found} == {(AT, undisturbed(1, 1, 1))}


@pytest.mark.parametrize(
    "operation",
    [
        "write .tmp",
        "rename step-",
        *(pytest.param(late, marks=pytest.mark.soak) for late in ("delete step-", "rank-00001.json")),
    ],
)
def test_a_keeper_killed_while_it_flushes_to_the_shared_tier_is_replaced_and_the_step_gets_there(
    operation: str, cluster: Any, undisturbed: Any, tmp_path: Path
) -> None:
    nodes, marker = cluster(1, 1), tmp_path / "died"
    shared = nodes.root / "lustre"
    nodes.options["tiers"] = [Shared(str(shared), every=2), Disk(every=1000)]
    prepare = keeper_with(dies_before(operation, marker, after=1), nodes.nodes[1])
    found = results(nodes.live(prepare=prepare))
    assert marker.exists() and {one["state"] for one in found} == {undisturbed(1, 1)}
    nodes.lose(*nodes.nodes)
    assert committed_steps(DiskTier(shared))[-1] == STEPS
    assert {one["resumed_from"] for one in results(nodes.live())} == {STEPS}


def _dies_in(owner: Any, name: str, rank: int, after: int) -> Any:
    """A rank is killed when it calls something for the n-th time."""

    def prepare(node: str) -> None:
        real, left = getattr(owner, name), [after]

        def or_die(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0 and dist.get_rank() == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(owner, name, or_die)

    return prepare


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (make_good, "rebuild", 0),
        pytest.param(Carrier, "image", 1, marks=pytest.mark.soak),
        pytest.param(Carrier, "parity", 1, marks=pytest.mark.soak),
    ],
)
def test_a_rank_killed_in_the_middle_of_a_rebuild_costs_nothing(
    owner: Any, name: str, after: int, situation: Any, undisturbed: Any
) -> None:
    nodes = situation((1, 1, 1), "xor", die_at(AT, level="protected"), tiers=SCHEMES["xor"])
    nodes.lose(nodes.nodes[1])
    ended = nodes.live(prepare=_dies_in(owner, name, 2, after))
    assert ended[2].killed and all(one.result is None for one in ended)
    found = results(nodes.live())
    assert {(one["resumed_from"], one["state"]) for one in found} == {(AT, undisturbed(1, 1, 1))}


def test_whatever_happens_to_a_keeper_training_is_told_and_ends_with_the_same_bits(
    cluster: Any, undisturbed: Any
) -> None:
    nodes = cluster(1, 1, tiers=[Partner()])

    def when(run: Any, rank: int) -> None:
        pid = keeper_pid(run.status()["run"])
        if rank == run.step % 2 and pid is not None:
            os.kill(pid, signal.SIGKILL)

    found = results(nodes.live(when, timeout_s=120))
    assert {one["state"] for one in found} == {undisturbed(1, 1)}
    told = [e.what for node in nodes.nodes for e in read_events(nodes.directory(node)) if isinstance(e, Degraded)]
    assert "the keeper died" in told
