"""A deeper tier that is not there when a job starts again: it goes on with what is nearer, and never with another's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import torch.distributed as dist
from buckets import BUCKET, Server, alone
from cluster import STEPS, Cluster, die_at, results
from situation import refusal

from everstep import Shared
from everstep.events import Degraded, read_events
from everstep.image import FORMAT
from everstep.store.disk import DiskTier
from everstep.store.manifest import RUN_RECORD, committed_steps, encode, run_name
from everstep.types import RunRecord

AT = 5
WAYS = (Path(__file__).parent, Path(__file__).parents[1], Path(__file__).parents[2] / "src")


def told(nodes: Cluster) -> list[str]:
    events = [event for node in nodes.nodes for event in read_events(nodes.directory(node))]
    return [f"{event.what}: {event.reason}" for event in events if isinstance(event, Degraded)]


class Mount:
    """A file system of all nodes that can be taken away: then a file stands in its way."""

    def __init__(self, root: Path) -> None:
        self.point, self._away = root / "mnt", root / "away"
        self.point.mkdir()
        self.tier = DiskTier(self.point / "lustre")

    def unmount(self) -> None:
        self.point.rename(self._away)
        self.point.write_text("nothing is mounted here")

    def mount(self) -> None:
        self.point.unlink()
        self._away.rename(self.point)


def on_a_mount(cluster: Any) -> tuple[Cluster, Mount]:
    nodes = cluster(1, 1)
    mount = Mount(nodes.root)
    nodes.options["tiers"] = [Shared(str(mount.tier.root), every=1)]
    return nodes, mount


def test_a_restart_without_the_shared_tier_goes_on_from_memory_and_the_tier_gets_what_follows_when_it_is_back(
    cluster: Any, undisturbed: Any
) -> None:
    nodes, mount = on_a_mount(cluster)
    nodes.live(die_at(AT, level="shared"))
    run = run_name(mount.tier)
    mount.unmount()

    def when(run: Any, rank: int) -> None:
        if run.step == AT + 1:
            assert not run.wait("shared", timeout=1.0)
            dist.barrier()
            if rank == 0:
                mount.mount()
            dist.barrier()

    ended = results(nodes.live(when))
    assert [one["resumed_from"] for one in ended] == [AT, AT]
    assert {one["state"] for one in ended} == {undisturbed(1, 1)}
    assert any("the run goes on without its shared tier" in one for one in told(nodes))
    assert committed_steps(mount.tier)[-1] == STEPS and run_name(mount.tier) == run


def test_a_tier_that_was_never_there_is_signed_when_it_comes(cluster: Any) -> None:
    nodes, mount = on_a_mount(cluster)
    nodes.live(die_at(AT), tiers=[])
    mount.unmount()

    def when(run: Any, rank: int) -> None:
        if run.step == AT + 1 and rank == 0:
            mount.mount()

    results(nodes.live(when))
    assert committed_steps(mount.tier)[-1] == STEPS and (mount.tier.root / RUN_RECORD).exists()


def test_a_tier_that_became_another_run_s_meanwhile_is_left_alone(cluster: Any) -> None:
    nodes, mount = on_a_mount(cluster)
    nodes.live(die_at(AT), tiers=[])
    other = RunRecord(format=FORMAT, run="f" * 32, created_time=0.0)
    mount.tier.put(RUN_RECORD, memoryview(encode(other)))
    mount.unmount()

    def when(run: Any, rank: int) -> None:
        if run.step == AT + 1 and rank == 0:
            mount.mount()
        if run.step == AT + 2:
            assert not run.wait("shared", timeout=3.0)
        die_at(AT + 2)(run, rank)

    ended = nodes.live(when)
    assert all(one.killed for one in ended), ended
    assert any("another run's (ffffffff)" in one for one in told(nodes))
    assert [path.name for path in mount.tier.root.iterdir()] == [RUN_RECORD]
    assert "different runs" in refusal(nodes.live())


@pytest.mark.parametrize("caches", ["never were", "are lost"])
def test_without_a_nearer_past_nothing_is_begun_while_the_tier_that_may_have_one_is_not_there(
    caches: str, cluster: Any
) -> None:
    nodes, mount = on_a_mount(cluster)
    if caches == "are lost":
        nodes.live(die_at(AT, level="shared"))
        nodes.lose(*nodes.nodes)
    mount.unmount()
    assert "it cannot be told whether this run has a past" in refusal(nodes.live())


WITHOUT_A_STORE = """
import os, sys
from pathlib import Path
from cluster import Cluster, die_at, results
from everstep import Objects

root, bucket = Path(sys.argv[1]), sys.argv[2]
nodes = Cluster(root, (1, 1))
nodes.options["tiers"] = [Objects(f"s3://{bucket}/{root.name}", every=1)]

def nowhere(node):
    os.environ["AWS_ENDPOINT"] = "http://127.0.0.1:1"

def end_keepers():
    for node in nodes.nodes:
        nodes.kill_keeper(node)  # they know where the store was

def when(run, rank):
    assert run.resumed_from == 5
    die_at(7)(run, rank)

try:
    assert all(one.killed for one in nodes.live(die_at(5, level="shared")))
    end_keepers()
    ended = nodes.live(when, prepare=nowhere, timeout_s=120)
    assert all(one.killed for one in ended), ended
    end_keepers()
    for one in results(nodes.live()):
        print(one["resumed_from"], one["step"], one["state"], flush=True)
finally:
    nodes.close()
"""


@pytest.mark.soak
def test_a_restart_while_the_object_store_refuses_connections_goes_on_from_memory(
    tmp_path: Path, undisturbed: Any
) -> None:
    server = Server()
    (tmp_path / "refused").mkdir()
    job = alone(WITHOUT_A_STORE, tmp_path / "refused", BUCKET, env=server.environment(*WAYS))
    said, _ = job.communicate(timeout=200)
    assert said.split() == ["7", str(STEPS), undisturbed(1, 1)] * 2
    assert any(f"step-{STEPS:010d}.json" in key for key in server.objects("refused"))
    server.stop()
