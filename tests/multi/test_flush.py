"""How fast bytes leave a node, what is known of them on their way, and how they are called back."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from cluster import Cluster, die_at, results
from doom import keeper_with
from typer.testing import CliRunner

import everstep
from everstep import Objects, Parity, Partner, Shared
from everstep.cli import app
from everstep.errors import BadConfig
from everstep.events import Brought, Degraded, FlushCancelled, KeeperStarted, Sank, Stopping, read_events
from everstep.image import CHUNK_BYTES
from everstep.keeper import fleet, keeper, rounds
from everstep.store.disk import DiskTier
from everstep.store.manifest import committed_steps, step_folders

sys.path.insert(0, str(Path(__file__).parents[1]))
from buckets import BUCKET, KEYS, Server

WIDE = 240_000  # about 35 MB of state: four chunks and a bit on each of two nodes


def told(cluster: Cluster, kind: type[Any]) -> list[Any]:
    return [e for node in cluster.nodes for e in read_events(cluster.directory(node)) if isinstance(e, kind)]


def wait_until(what: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def flushing(run: everstep.Run) -> dict[str, Any] | None:
    flushes: Any = run.status()["flushes"]
    return flushes[0] if flushes else None


SOAK = pytest.mark.soak


# -- how fast


@pytest.mark.parametrize("tier", ["shared", *(pytest.param(t, marks=SOAK) for t in ("partner", "objects", "xor"))])
def test_bytes_leave_a_node_at_about_the_rate_that_was_given_and_training_goes_on(
    tier: str, is_alone: bool, cluster: Any, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_alone:
        return
    nodes, rate, server = cluster(1, 1, wide=WIDE), 16e6, Server()
    for key, value in {"ENDPOINT_URL": f"http://127.0.0.1:{server.port}", **KEYS}.items():
        monkeypatch.setenv(f"AWS_{key.upper()}", value)
    nodes.options["tiers"] = {
        "shared": [Shared(str(nodes.root / "lustre"), every=3, rate="16MB/s")],
        "objects": [Objects(f"s3://{BUCKET}/run", every=3, rate="16MB/s")],
        "partner": [Partner(rate="16MB/s")],
        "xor": [Parity("xor", rate="16000KB/s")],
    }[tier]
    longest = [0.0, time.monotonic()]

    def at_step(run: everstep.Run, rank: int) -> None:
        if run.step > 1:
            longest[0] = max(longest[0], time.monotonic() - longest[1])
        if run.step == 7:
            assert longest[0] < 1.0, "a step waited for the transfer"
            level = "shared" if tier in ("shared", "objects") else "protected"
            assert run.wait(level, timeout=60)
        longest[1] = time.monotonic()

    try:
        found = results(nodes.live(at_step))
    finally:
        server.stop()
    assert {one["state"] for one in found} == {undisturbed(1, 1, wide=WIDE)}
    brought = told(nodes, Brought)
    assert len(brought) >= 2 and all(e.tier == ("parity" if tier == "xor" else tier) for e in brought)
    for one in brought:
        free = CHUNK_BYTES if tier != "partner" else 3 * CHUNK_BYTES  # what follows a pause passes at once
        assert one.bytes > 4 * CHUNK_BYTES and rate / 4 < one.bytes / one.seconds
        assert one.seconds > 0.9 * (one.bytes - free) / rate, f"{one.bytes / one.seconds / 1e6:.1f} MB/s"


# -- what is known of it


def test_status_says_how_far_every_level_is_and_how_many_bytes_are_on_their_way(cluster: Any) -> None:
    nodes = cluster(1, 1, wide=WIDE)
    nodes.options["tiers"] = [Partner(), Shared(str(nodes.root / "lustre"), every=100, rate="10MB/s")]

    def at_step(run: everstep.Run, rank: int) -> None:
        if run.step == 1:
            assert run.status()["shared_step"] is None and run.status()["flushes"] == []
        if run.step == 3:
            assert not run.wait("shared", timeout=0.3)
            past = everstep.open(nodes.directory(nodes.nodes[rank])).status()
            assert [(one.tier, one.step) for one in past["flushes"]] == [("shared", 3)]
            seen = []
            while run.status()["shared_step"] != 3:
                seen += [flush] if (flush := flushing(run)) is not None else []
                time.sleep(0.05)
            assert {(one["tier"], one["step"]) for one in seen} == {("shared", 3)}
            assert all(one["bytes"] <= one["of_bytes"] and one["of_bytes"] > 4 * CHUNK_BYTES for one in seen)
            assert len({one["bytes"] for one in seen}) >= 3, "it moves"
            assert run.wait("shared") and run.wait("protected")
            status = run.status()
            assert (status["protected_step"], status["shared_step"], status["flushes"]) == (3, 3, [])
            assert status["silent_nodes"] == []
            dist.barrier()
            past = everstep.open(nodes.directory(nodes.nodes[rank])).status()
            assert (past["protected_step"], past["shared_step"], past["flushes"]) == (3, 3, ())

    results(nodes.live(at_step, steps=4))


def test_a_node_that_is_not_heard_of_is_named_in_status_and_by_an_event(cluster: Any) -> None:
    nodes = cluster(1, 1, tiers=[Partner()])
    lost = nodes.nodes[1]

    def impatient() -> None:
        rounds.SILENT_S = fleet._STUCK_S = 1.0

    def at_step(run: everstep.Run, rank: int) -> None:
        if run.step == 3:
            run.wait("protected")
            dist.barrier()
            if rank == 1:
                os.kill(nodes.keeper(lost), signal.SIGSTOP)
            else:
                wait_until(lambda: run.status()["silent_nodes"] == [lost])
                wait_until(lambda: any(e.reason == f"{lost}: not heard of" for e in told(nodes, Degraded)))
            dist.barrier()
            if rank == 1:
                os.kill(nodes.keeper(lost), signal.SIGCONT)
            wait_until(lambda: run.status()["silent_nodes"] == [])

    results(nodes.live(at_step, prepare=keeper_with(impatient, *nodes.nodes)))


@pytest.mark.parametrize("scheme", [Partner(), Parity("xor")], ids=["partner", "xor"])
def test_a_plan_for_a_lost_node_has_times_where_they_were_measured(scheme: Any, cluster: Any) -> None:
    nodes, said = cluster(1, 1, tiers=[scheme]), []

    def at_step(run: everstep.Run, rank: int) -> None:
        if run.step == 5:
            run.wait("protected")
            if rank == 0:
                here = str(nodes.directory(nodes.nodes[0]))
                for words in (["--json"], []):
                    said.append(CliRunner().invoke(app, ["plan", here, "--lost", nodes.nodes[1], *words]).output)
                (nodes.root / "said").write_bytes(msgspec.json.encode(said))
            dist.barrier()

    results(nodes.live(at_step))
    in_json, in_words = msgspec.json.decode((nodes.root / "said").read_bytes())
    plan, source = msgspec.json.decode(in_json), "partner" if isinstance(scheme, Partner) else "parity"
    assert [part["source"] for part in plan["parts"]] == ["memory", source]
    memory, lost = plan["times"]["parts"]
    assert memory is None and lost > 0.0 and plan["times"]["total"] is None
    assert plan["times"]["rates"][source]["measured"] == "written" and plan["times"]["unmeasured"] == ["memory"]
    assert "memory was not measured yet" in in_words.replace("\n", " ") and "not measured" in in_words


# -- called off


@pytest.mark.parametrize("ranks", [pytest.param((2,), marks=pytest.mark.soak), (1, 1)], ids=["one node", "two nodes"])
def test_a_flush_that_is_cancelled_stops_at_the_next_chunk_and_a_newer_one_gets_there(
    ranks: tuple[int, ...], cluster: Any
) -> None:
    nodes = cluster(*ranks, wide=WIDE // 2 * len(ranks))
    nodes.options["tiers"] = [Shared(str(nodes.root / "lustre"), every=4, rate="6MB/s")]
    tier = DiskTier(nodes.root / "lustre")

    def at_step(run: everstep.Run, rank: int) -> None:
        if run.step == 4:
            wait_until(lambda: (flushing(run) or {"bytes": 0})["bytes"] > 0)
            dist.barrier()
            if rank == 0:
                run.cancel("shared")
            began = time.monotonic()
            wait_until(lambda: flushing(run) is None)
            assert time.monotonic() - began < 1.5, "the rest would have taken seconds"
            time.sleep(0.5)
            assert flushing(run) is None and run.status()["shared_step"] is None, "it does not begin anew"
            assert committed_steps(tier) == []
            assert not list(tier.root.rglob(".tmp-*")), "what is incomplete is gone"
            dist.barrier()
        if run.step in (5, 6, 7):
            time.sleep(0.1)

    results(nodes.live(at_step, steps=9, timeout_s=120.0))
    cancelled = [e for e in told(nodes, FlushCancelled) if e.step == 4]
    assert {(e.tier, e.reason) for e in cancelled} == {("shared", "it was called off")}
    assert len(cancelled) == len(ranks) and all(0 < e.bytes < e.of_bytes for e in cancelled)
    assert committed_steps(tier)[-1] == 9 and 4 not in committed_steps(tier)
    assert step_folders(tier) == committed_steps(tier), "parts of what was cancelled are removed"


def test_only_what_goes_deeper_can_be_cancelled(cluster: Any) -> None:
    def at_step(run: everstep.Run, rank: int) -> None:
        with pytest.raises(BadConfig, match="only what is on its way to 'shared' can be cancelled, not 'durable'"):
            run.cancel("durable")
        with pytest.raises(BadConfig, match="nothing is ever 'shared' without"):
            run.cancel("shared")

    results(cluster(1).live(at_step, steps=1))


@pytest.mark.soak
def test_after_sigterm_older_steps_make_way_for_the_last_one(cluster: Any) -> None:
    nodes = cluster(1, 1, wide=WIDE, linger="1s")
    nodes.options["tiers"] = [Shared(str(nodes.root / "lustre"), every=4, rate="3MB/s")]

    def at_step(run: everstep.Run, rank: int) -> None:
        if run.step == 4:
            wait_until(lambda: (flushing(run) or {"bytes": 0})["bytes"] > 0)
            dist.barrier()
            if rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
        if run.step > 4:
            time.sleep(0.2)  # the last step comes before the flush would have ended

    ended = nodes.live(at_step, steps=1000)
    assert all("SystemExit: 143" in one.error for one in ended)
    assert 4 in {e.step for e in told(nodes, FlushCancelled)}
    last = {e.step for e in told(nodes, Stopping)}
    assert len(last) == 1
    wait_until(lambda: committed_steps(DiskTier(nodes.root / "lustre")) == [*last])
    nodes.wait_for_keepers()


def test_a_new_life_does_not_wait_for_the_flush_of_the_last_one(cluster: Any, undisturbed: Any) -> None:
    """The same keeper serves it; parts that are there are not written again."""
    nodes = cluster(1, wide=WIDE)
    nodes.options["tiers"] = [Shared(str(nodes.root / "lustre"), every=4, rate="1MB/s")]

    def die(run: everstep.Run, rank: int) -> None:
        if run.step == 4:
            wait_until(lambda: (flushing(run) or {"bytes": 0})["bytes"] > 0)
            os.kill(os.getpid(), signal.SIGKILL)

    nodes.live(die)
    began: list[float] = [time.monotonic()]

    def at_step(run: everstep.Run, rank: int) -> None:
        assert time.monotonic() - began[0] < 20.0, "it takes 35 s to get there at this rate"

    nodes.options["tiers"] = [Shared(str(nodes.root / "lustre"), every=4)]
    found = results(nodes.live(at_step))
    assert found[0]["state"] == undisturbed(1, wide=WIDE) and found[0]["resumed_from"] == 4
    assert len(told(nodes, KeeperStarted)) == 1
    assert "a new life of the run begins" in next(e.reason for e in told(nodes, FlushCancelled))
    assert max(e.step for e in told(nodes, Sank)) == 8


def test_a_keeper_whose_trainers_are_gone_does_not_give_up_what_is_on_its_way_for_being_slow(cluster: Any) -> None:
    nodes = cluster(1, wide=WIDE // 2, linger="1s")
    nodes.options["tiers"] = [Shared(str(nodes.root / "lustre"), every=100, rate="4MB/s")]

    def impatient() -> None:
        keeper._LAST_FLUSH_S = 1.0

    nodes.live(die_at(5), prepare=keeper_with(impatient, *nodes.nodes))
    nodes.wait_for_keepers()
    assert committed_steps(DiskTier(nodes.root / "lustre")) == [5] and not told(nodes, FlushCancelled)
    assert told(nodes, Brought)[-1].seconds > 2.0
