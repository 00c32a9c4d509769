"""A job on several nodes, each with a directory of its own."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import msgspec
import torch.distributed as dist
from cluster import STEPS, die_at, results
from situation import flip
from typer.testing import CliRunner

import everstep
from everstep import Parity, Partner, Shared
from everstep.cli import app
from everstep.keeper.note import forget_note
from everstep.store.disk import DiskTier
from everstep.store.manifest import committed_steps
from everstep.types import Plan


@pytest.mark.parametrize("rebooted", [False, True], ids=["killed", "rebooted"])
def test_nodes_with_directories_of_their_own_go_on_together(rebooted: bool, cluster: Any, undisturbed: Any) -> None:
    nodes = cluster(1, 1)
    nodes.live(die_at(5, level="durable" if rebooted else "sealed"))
    if rebooted:
        nodes.reboot(*nodes.nodes)
    ended = results(nodes.live())
    assert [one["resumed_from"] for one in ended] == [5, 5]
    assert {one["state"] for one in ended} == {undisturbed(1, 1)}
    assert ended[0]["step"] == STEPS


@pytest.mark.parametrize("scheme", ["partner", "xor", "rs"])
@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_lost_node_is_made_good_by_the_others(lost: int, scheme: str, cluster: Any, undisturbed: Any) -> None:
    tiers = {"partner": [Partner()], "xor": [Parity("xor")], "rs": [Parity("rs", losses=2)]}[scheme]
    nodes = cluster(1, 1, 1, 1, tiers=tiers)
    nodes.live(die_at(5, level="protected"))
    nodes.lose(nodes.nodes[lost])
    ended = results(nodes.live())
    assert [one["resumed_from"] for one in ended] == [5] * 4
    assert {one["state"] for one in ended} == {undisturbed(1, 1, 1, 1)}


def test_when_all_caches_are_gone_the_shared_tier_is_read(cluster: Any, undisturbed: Any) -> None:
    nodes = cluster(1, 1)
    nodes.options["tiers"] = [Shared(str(nodes.root / "lustre"), every=2)]
    nodes.live(die_at(5, level="shared"))
    nodes.lose(*nodes.nodes)
    ended = results(nodes.live())
    assert [one["resumed_from"] for one in ended] == [5, 5]
    assert {one["state"] for one in ended} == {undisturbed(1, 1)}
    shared = DiskTier(nodes.root / "lustre")
    assert committed_steps(shared)[-1] == STEPS, "a job that ends leaves its newest step on the deepest tier"


@pytest.mark.parametrize("survivor", ["shared", "own disks"])
def test_one_node_alone_uses_deeper_tiers_too(survivor: str, cluster: Any, undisturbed: Any) -> None:
    nodes = cluster(2)
    nodes.options["tiers"] = [Shared(str(nodes.root / "lustre"), every=2)]
    nodes.live(die_at(4, level="shared"))
    if survivor == "shared":
        nodes.lose(*nodes.nodes)
    ended = results(nodes.live())
    assert [one["resumed_from"] for one in ended] == [4, 4]
    assert {one["state"] for one in ended} == {undisturbed(2)}
    assert committed_steps(DiskTier(nodes.root / "lustre"))[-1] == STEPS


@pytest.mark.parametrize("scheme", ["partner", "rs"])
def test_with_a_log_every_step_survives_the_loss_of_a_node(scheme: str, cluster: Any, undisturbed: Any) -> None:
    """Step 6 is five records after the only base."""
    tiers = [Partner()] if scheme == "partner" else [Parity("rs", losses=2)]
    nodes = cluster(1, 1, 1, 1, tiers=tiers, strategy="log")
    nodes.live(die_at(6, level="protected"))
    lost = nodes.nodes[1:2] if scheme == "partner" else nodes.nodes[1:3]
    nodes.lose(*lost)
    ended = results(nodes.live())
    assert [one["resumed_from"] for one in ended] == [6] * 4
    assert {one["state"] for one in ended} == {undisturbed(1, 1, 1, 1)}


@pytest.mark.parametrize("scheme", ["partner", "xor", "single"])
def test_a_plan_says_beforehand_what_the_loss_of_a_node_would_cost(scheme: str, cluster: Any) -> None:
    tiers = {"partner": [Partner()], "xor": [Parity("xor")], "single": []}[scheme]
    nodes = cluster(1, 1, 1, tiers=tiers)
    plans, status = nodes.root / "plan.json", nodes.root / "status.json"

    def at_step(run: everstep.Run, rank: int) -> None:
        if run.step == 5:
            run.wait("protected" if tiers else "durable")
            if rank == 0:
                past = everstep.open(nodes.directory(nodes.nodes[0]))
                plans.write_bytes(msgspec.json.encode(past.plan(lost=[nodes.nodes[1]])))
                status.write_bytes(msgspec.json.encode(past.status()))
            dist.barrier()

    results(nodes.live(at_step))
    plan = msgspec.json.decode(plans.read_bytes(), type=Plan)
    assert nodes.nodes[1] not in {part.node for part in plan.parts}
    lost = {"partner": ["partner"], "xor": ["parity"], "single": []}[scheme]
    assert [part.source for part in plan.parts if part.rank == 1] == lost
    assert plan.step == (5 if tiers else None)
    told = {row["event"]: row["steps"] for row in msgspec.json.decode(status.read_bytes())["exposure"]}
    assert told["this disk is lost"] == (0 if tiers else 5), "what the loss of this node would cost"


def test_what_is_left_when_all_trainers_are_gone_reaches_the_shared_tier(cluster: Any) -> None:
    nodes = cluster(1, 1, linger="1s")
    nodes.options["tiers"] = [Shared(str(nodes.root / "lustre"), every=100)]
    nodes.live(die_at(5))
    shared = DiskTier(nodes.root / "lustre")
    deadline = time.monotonic() + 60
    while 5 not in committed_steps(shared):
        assert time.monotonic() < deadline, "the keepers kept it to themselves"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("scheme", "strategy"),
    [pytest.param("partner", "snapshot", marks=pytest.mark.soak), ("xor", "snapshot"), ("partner", "log")],
)
def test_scavenging_completes_what_a_lost_node_had(scheme: str, strategy: str, cluster: Any, undisturbed: Any) -> None:
    """With a log what is rescued is a base, and the records that lead on from it."""
    nodes = cluster(1, 1, 1, tiers=[Partner()] if scheme == "partner" else [Parity("xor")], strategy=strategy)
    nodes.live(die_at(5, level="protected"))
    nodes.lose(nodes.nodes[2])
    rescued = nodes.root / "rescued"
    deadline = time.monotonic() + 30
    while True:  # until the other keepers have brought their memory to their disks
        step, _ = nodes.on(
            nodes.nodes[0], lambda: everstep.open(nodes.directory(nodes.nodes[0])).scavenge(str(rescued))
        )
        if step == 5:
            break
        assert time.monotonic() < deadline, f"only step {step} could be rescued"
    assert (committed_steps(DiskTier(rescued))[-1] < 5) == (strategy == "log")
    nodes.lose(*nodes.nodes)
    nodes.options["tiers"] = [Shared(str(rescued))]
    ended = results(nodes.live())
    assert [one["resumed_from"] for one in ended] == [5] * 3
    assert {one["state"] for one in ended} == {undisturbed(1, 1, 1)}


@pytest.mark.parametrize("strategy", [pytest.param("snapshot", marks=pytest.mark.soak), "log"])
def test_verify_reads_what_other_nodes_have_and_names_those_that_it_could_not_ask(strategy: str, cluster: Any) -> None:
    nodes = cluster(1, 1, 1, tiers=[Partner()], strategy=strategy)

    def when(run: everstep.Run, rank: int) -> None:
        if run.step == 5:
            run.wait("durable")
        die_at(5, level="protected")(run, rank)

    nodes.live(when)
    here, other, gone = nodes.nodes

    def verify(*words: str) -> tuple[int, str]:
        asked = ["verify", str(nodes.directory(here)), *words]
        ended = nodes.on(here, lambda: CliRunner().invoke(app, asked, env={"COLUMNS": "300"}))
        return ended.exit_code, ended.output

    code, said = verify()
    assert code == 0 and f"disk of {other}" in said and f"partner of {gone}" in said and "not asked" not in said
    rows = [row for row in said.splitlines() if f"disk of {other}" in row]
    assert any("records after step" in row for row in rows) == (strategy == "log")
    flip(nodes.directory(other).glob("step-*/*.safetensors"))
    nodes.kill_keeper(gone)
    code, said = verify()
    assert code == 4 and f"not asked: {gone}: " in said and f"disk of {gone}" not in said
    damaged = [finding for finding in msgspec.json.decode(verify("--json")[1]) if finding["problem"]]
    assert {(one["node"], one["source"]) for one in damaged} == {(other, "disk")}
    nodes.on(here, lambda: forget_note(nodes.run()))
    code, said = verify()
    assert code == 0 and "not asked: others: no keeper of this node is there that knows them" in said


def test_gc_keeps_what_is_held_for_other_nodes_until_it_is_told_otherwise(cluster: Any) -> None:
    nodes = cluster(1, 1, tiers=[Partner()])
    nodes.live(die_at(4, level="protected"))
    for node in nodes.nodes:
        nodes.kill_keeper(node)
    here = nodes.nodes[0]

    def gc(*words: str) -> str:
        return str(nodes.on(here, lambda: CliRunner().invoke(app, ["gc", *words], env={"COLUMNS": "400"}).output))

    assert "kept: holding parts of other nodes, of step 4; --guests gives it up" in gc()
    assert nodes.memory(here).exists()
    gc("--guests")
    assert not list(nodes.memory(here).rglob("guests"))
