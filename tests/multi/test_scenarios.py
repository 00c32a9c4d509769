"""What comes home when caches, tiers or nodes are not what they were: the newest whole step, and exactly that."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from buckets import BUCKET, Server, alone
from cluster import STEPS, Cluster, die_at, results
from doom import keeper_with
from situation import flip, guests, refusal, step_files

import everstep
from everstep import Disk, Parity, Partner, Shared
from everstep.events import Rejected, read_events
from everstep.keeper import rounds
from everstep.store.disk import DiskTier
from everstep.store.manifest import committed_steps

AT = 5
WAYS = (Path(__file__).parent, Path(__file__).parents[1], Path(__file__).parents[2] / "src")


def told(cluster: Cluster) -> list[Rejected]:
    """Why rank 0 passed over what it passed over."""
    return [e for node in cluster.nodes for e in read_events(cluster.directory(node)) if isinstance(e, Rejected)]


def came_home(cluster: Cluster, wanted: str, at: int = AT, **options: Any) -> None:
    found = results(cluster.live(**options))
    assert {one["resumed_from"] for one in found} == {at}
    assert {(one["state"], one["step"]) for one in found} == {(wanted, STEPS)}


def lustre(cluster: Cluster) -> Path:
    return cluster.root / "lustre"


def on_shared(cluster: Cluster, *steps: int) -> Cluster:
    """All trainers died after the fifth step; these steps were waited for until they were on the shared tier."""
    cluster.options["tiers"] = [Shared(str(lustre(cluster)), every=1)]

    def when(run: Any, rank: int) -> None:
        if run.step in steps:
            run.wait("shared")
        die_at(AT)(run, rank)

    cluster.live(when)
    return cluster


# -- older steps


def test_the_newest_step_lost_on_two_nodes_is_never_offered_again_and_the_older_one_is_used(
    cluster: Any, undisturbed: Any
) -> None:
    nodes = cluster(1, 1, 1, 1, tiers=[Disk(every=4)])

    def when(run: Any, rank: int) -> None:
        if run.step == 4:
            run.wait("durable")
        die_at(AT)(run, rank)

    nodes.live(when)
    for node in nodes.nodes:
        nodes.kill_keeper(node)
        for path in nodes.directory(node).glob(f"step-{AT:010d}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    nodes.reboot(*nodes.nodes[1:3])
    nodes.live(die_at(5, level="sealed"), timeout_s=30, prepare=_die_when_restored)
    assert any(e.step == AT and "no readable part of rank 1, 2" in e.reason for e in told(nodes))
    came_home(nodes, undisturbed(1, 1, 1, 1), at=4)


def _die_when_restored(node: str) -> None:
    """This life ends when it has come home, and before it has done a step."""
    guard = everstep.guard

    def and_die(*arguments: Any, **options: Any) -> Any:
        guard(*arguments, **options)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    everstep.guard = and_die


# -- deeper tiers


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


ON_AN_OBJECT_STORE = """
import os, sys
from pathlib import Path
from cluster import STEPS, Cluster, die_at, results
from everstep import Objects

root, bucket, at, strategy = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
nodes = Cluster(root, (1, 1), strategy=strategy)
nodes.options["tiers"] = [Objects(f"s3://{bucket}/{root.name}", every=2)]
try:
    first = nodes.live(die_at(at, level="shared"))
    assert all(one.killed for one in first), first
    nodes.lose(*nodes.nodes)
    for one in results(nodes.live()):
        print(one["resumed_from"], one["step"], one["state"], flush=True)
finally:
    nodes.close()
"""


@pytest.mark.parametrize("strategy", [pytest.param("snapshot", marks=pytest.mark.soak), "log"])
def test_when_all_caches_are_gone_the_object_store_is_read(
    strategy: str, tmp_path: Path, undisturbed: Any, server: Server
) -> None:
    """In a process that has never used an object store: those that are forked from one cannot."""
    (tmp_path / strategy).mkdir()
    job = alone(ON_AN_OBJECT_STORE, tmp_path / strategy, BUCKET, str(AT), strategy, env=server.environment(*WAYS))
    said, _ = job.communicate(timeout=200)
    assert said.split() == [str(AT), str(STEPS), undisturbed(1, 1)] * 2
    assert any(f"step-{STEPS:010d}.json" in key for key in server.objects(strategy))
    assert any("/log-" in key for key in server.objects(strategy)) == (strategy == "log")


def test_a_damaged_step_of_the_shared_tier_is_passed_over_and_made_anew(cluster: Any, undisturbed: Any) -> None:
    nodes = on_shared(cluster(1, 1), 3, AT)
    nodes.lose(*nodes.nodes)
    flip(step_files(lustre(nodes), AT, "rank-00001.safetensors"))
    older = committed_steps(DiskTier(lustre(nodes)))[-2]
    came_home(nodes, undisturbed(1, 1), at=older)
    assert any(e.step == AT and e.source == "shared" and "checksum" in e.reason for e in told(nodes))
    nodes.lose(*nodes.nodes)
    came_home(nodes, undisturbed(1, 1), at=STEPS)


def test_a_last_step_that_was_damaged_on_the_shared_tier_is_there_again_when_the_run_ends_again(
    cluster: Any, undisturbed: Any
) -> None:
    nodes = cluster(1, 1)
    nodes.options["tiers"] = [Shared(str(lustre(nodes)), every=2)]
    results(nodes.live(lambda run, rank: run.step == 6 and run.wait("shared") and None))
    nodes.lose(*nodes.nodes)
    flip(step_files(lustre(nodes), STEPS, "rank-00000.safetensors"))
    came_home(nodes, undisturbed(1, 1), at=6)
    nodes.lose(*nodes.nodes)
    came_home(nodes, undisturbed(1, 1), at=STEPS)


def test_with_every_step_of_every_tier_damaged_all_ranks_refuse_alike_and_nothing_is_changed(cluster: Any) -> None:
    nodes = on_shared(cluster(1, 1), AT)
    nodes.lose(*nodes.nodes)
    flip(lustre(nodes).glob("step-*/rank-00001.safetensors"))
    before = sorted(path.name for path in lustre(nodes).iterdir())
    said = refusal(nodes.live())
    assert f"step {AT} (shared)" in said and "checksum" in said
    assert sorted(path.name for path in lustre(nodes).iterdir()) == before


def test_a_shared_tier_that_cannot_be_read_keeps_nobody_from_coming_home_from_memory(
    cluster: Any, undisturbed: Any
) -> None:
    nodes = on_shared(cluster(1, 1), AT)
    came_home(nodes, undisturbed(1, 1), prepare=lambda node: _unlistable(node, nodes.nodes[1:], lustre(nodes)))
    assert any(e.source == "shared" and "cannot be listed" in e.reason for e in told(nodes))


def test_without_caches_a_shared_tier_that_one_node_cannot_read_is_refused_by_all_alike(cluster: Any) -> None:
    nodes = on_shared(cluster(1, 1), AT)
    nodes.lose(*nodes.nodes)
    said = refusal(nodes.live(prepare=lambda node: _unlistable(node, nodes.nodes, lustre(nodes))))
    assert "shared" in said and "cannot be listed" in said


def _unlistable(node: str, where: list[str], folder: Path) -> None:
    """On these nodes the file system answers, but says nothing of what is there."""

    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if os.fspath(path) == os.fspath(folder):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return scandir(path)

    if node in where:
        os.scandir = refuse  # type: ignore[assignment]


# -- damage in caches


SCHEMES = {"partner": [Partner()], "xor": [Parity("xor")]}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_bit_that_flips_in_memory_is_repaired_from_the_others(scheme: str, situation: Any, undisturbed: Any) -> None:
    nodes = situation((2, 1, 1), scheme, die_at(AT, level="protected"), tiers=SCHEMES[scheme])
    assert flip(nodes.memory(nodes.nodes[0]).glob("*/rank-00001-base-*/slot-*")) > 1
    came_home(nodes, undisturbed(2, 1, 1))
    assert any(e.step == AT and e.source == "memory" for e in told(nodes))


def test_after_a_reboot_a_damaged_part_on_a_disk_is_skipped_for_an_older_step(cluster: Any, undisturbed: Any) -> None:
    nodes = cluster(1, 1, tiers=[Disk(every=1)])

    def when(run: Any, rank: int) -> None:
        run.wait("durable")
        die_at(AT)(run, rank)

    nodes.live(when)
    nodes.reboot(*nodes.nodes)
    flip(step_files(nodes.directory(nodes.nodes[1]), AT, ".safetensors"))
    came_home(nodes, undisturbed(1, 1), at=AT - 1)
    assert any(e.step == AT and e.source == "disk" and nodes.nodes[1] in e.reason for e in told(nodes))


@pytest.mark.parametrize("scheme", ["xor", pytest.param("partner", marks=pytest.mark.soak)])
def test_what_partners_and_parity_hold_damaged_while_nobody_is_lost_costs_nothing(
    scheme: str, situation: Any, undisturbed: Any
) -> None:
    nodes = situation((2, 1, 1), scheme, die_at(AT, level="protected"), tiers=SCHEMES[scheme])
    for node in nodes.nodes:
        flip(path for path in guests(nodes, node).rglob("*") if path.is_file())
    came_home(nodes, undisturbed(2, 1, 1))


# -- other nodes than before


@pytest.mark.parametrize("scheme", ["xor", pytest.param("partner", marks=pytest.mark.soak)])
def test_ranks_may_come_back_on_other_nodes_in_another_order(scheme: str, situation: Any, undisturbed: Any) -> None:
    nodes = situation((1, 1, 1), f"even {scheme}", die_at(AT, level="protected"), tiers=SCHEMES[scheme])
    nodes.lose(nodes.nodes[1])
    came_home(nodes, undisturbed(1, 1, 1), order=nodes.nodes[::-1])


def test_ranks_that_change_nodes_under_living_keepers_leave_no_memory_behind(cluster: Any, undisturbed: Any) -> None:
    nodes = cluster(1, 1, 1)
    nodes.live(die_at(3))
    came_home(nodes, undisturbed(1, 1, 1), at=3, order=nodes.nodes[::-1])
    nodes.wait_for_keepers()
    assert [nodes.left_in_memory(node) for node in nodes.nodes] == [[], [], []]


def test_fewer_nodes_than_before_go_on_with_another_number_of_ranks(situation: Any, undisturbed: Any) -> None:
    nodes = situation((1, 1, 1, 1), "rs", die_at(AT, level="protected"), tiers=[Parity("rs", losses=2)])
    nodes.lose(*nodes.nodes[2:])
    found = results(nodes.live(order=nodes.nodes[:2]))
    assert {(one["resumed_from"], one["step"]) for one in found} == {(AT, STEPS)} and len(found) == 2
    assert {one["restored"] for one in found} == {undisturbed(1, 1, 1, 1, steps=AT)}
    assert len({one["state"] for one in found}) == 1


def test_a_replacement_with_another_name_takes_the_place_of_a_lost_node(situation: Any, undisturbed: Any) -> None:
    nodes = situation((1, 1, 1), "xor", die_at(AT, level="protected"), tiers=SCHEMES["xor"])
    nodes.lose(nodes.nodes[1])
    spare = f"spare-{nodes.nodes[1]}"
    nodes.ranks[spare] = 1
    nodes.nodes.append(spare)
    try:
        came_home(nodes, undisturbed(1, 1, 1), order=[nodes.nodes[0], spare, nodes.nodes[2]])
    finally:
        nodes.kill_keeper(spare)
        shutil.rmtree(nodes.memory(spare), ignore_errors=True)
        nodes.nodes.remove(spare)


def test_a_node_that_came_back_empty_is_refilled_so_that_the_next_one_may_be_lost_at_once(
    situation: Any, undisturbed: Any
) -> None:
    nodes = situation((1, 1, 1), "xor", die_at(AT, level="protected"), tiers=SCHEMES["xor"])
    nodes.lose(nodes.nodes[1])
    nodes.live(prepare=_die_when_protected_again)
    nodes.lose(nodes.nodes[2])
    came_home(nodes, undisturbed(1, 1, 1))


def _die_when_protected_again(node: str) -> None:
    _die_when_restored(node)
    run = everstep.Run
    began = run.__init__

    def begin(self: Any, *arguments: Any) -> None:
        began(self, *arguments)
        assert self.wait("protected", timeout=60)

    run.__init__ = begin  # type: ignore[method-assign]


@pytest.mark.soak
@pytest.mark.parametrize("scheme", ["partner", "xor"])
def test_what_was_protected_long_ago_is_still_there_on_all_nodes(scheme: str, cluster: Any, undisturbed: Any) -> None:
    every = 8
    tier = Partner(every=every) if scheme == "partner" else Parity("xor", every=every)
    nodes = cluster(1, 1, 1, tiers=[tier, Disk(every=1000)], steps=2 * every + 2)

    def when(run: Any, rank: int) -> None:
        if run.step == every:
            run.wait("protected")
        die_at(2 * every - 1)(run, rank)

    nodes.live(when, prepare=keeper_with(_appoint_only_what_is_due, *nodes.nodes))
    nodes.lose(nodes.nodes[1])
    found = results(nodes.live())
    assert {one["resumed_from"] for one in found} == {every}
    assert {one["restored"] for one in found} == {undisturbed(1, 1, 1, steps=every)}


def _appoint_only_what_is_due() -> None:
    rounds.STILL_S = 1e9  # not what happens to stay there for a moment,
    hear = rounds.Rounds.hear  # nor what is left when the trainers are gone
    rounds.Rounds.hear = lambda self, report, now: hear(self, msgspec.structs.replace(report, is_alive=True), now)


@pytest.mark.parametrize("ranks", [(2, 1), pytest.param((1, 1), marks=pytest.mark.soak), (2,)], ids=str)
def test_small_clusters_are_killed_and_go_on(ranks: tuple[int, ...], cluster: Any, undisturbed: Any) -> None:
    nodes = cluster(*ranks, tiers=[Partner()])
    nodes.live(die_at(AT, level="protected" if len(ranks) > 1 else "durable"))
    if len(ranks) > 1:
        nodes.lose(nodes.nodes[0])
    came_home(nodes, undisturbed(*ranks))


@pytest.mark.parametrize("then", ["partner", "none", pytest.param("xor", marks=pytest.mark.soak)])
def test_parity_and_copies_of_a_scheme_that_is_no_longer_used_go_once_nothing_needs_them(
    then: str, cluster: Any, undisturbed: Any
) -> None:
    first = SCHEMES["partner" if then == "xor" else "xor"]
    nodes = cluster(1, 1, 1, tiers=first)
    nodes.live(die_at(AT, level="protected"))
    folders = "step-*" if then == "xor" else "parity-*"

    def left() -> list[Path]:
        return [path for node in nodes.nodes for path in guests(nodes, node).glob(folders)]

    assert left()

    def when(run: Any, rank: int) -> None:
        assert run.wait("durable" if then == "none" else "protected", timeout=60)
        dist.barrier()
        deadline = time.monotonic() + 30
        while run.step == STEPS - 1 and left():
            assert time.monotonic() < deadline, f"still there: {left()}"
            time.sleep(0.02)
        dist.barrier()

    ended = results(nodes.live(when, tiers=SCHEMES[then] if then != "none" else []))
    assert {one["state"] for one in ended} == {undisturbed(1, 1, 1)}
