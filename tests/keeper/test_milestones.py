"""Milestones: the first checkpoint at or after each multiple of `Keep(every=)`, whenever checkpoints are written."""

from __future__ import annotations

import os
import selectors
import sys
from pathlib import Path

import torch
from torch import nn

import everstep
from everstep import Disk, Keep
from everstep.cadence import Every
from everstep.capture.arena import Arena
from everstep.capture.host import open_root
from everstep.image import FORMAT, lay_out
from everstep.keeper import flush
from everstep.keeper.base_writer import BaseWriter
from everstep.keeper.logbook import Logbook
from everstep.keeper.protocol import Hello
from everstep.keeper.replica import Replicas
from everstep.keeper.roster import Roster
from everstep.keeper.rounds import Lane, Order, Report, Rounds
from everstep.store.disk import DiskTier
from everstep.store.manifest import committed_steps, data_name
from everstep.timeline import unmarked
from everstep.types import ImageInfo

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import run_directory

RUN, LIFE, NEXT_LIFE = "5" * 32, "1" * 32, "2" * 32
POLICY = Keep(last=1, every=50)


def commit(tier: DiskTier, step: int, *, life: str = LIFE, world: int = 1) -> None:
    """Of rank 0; other ranks have their parts elsewhere."""
    memory = tier.root.parent / f"{tier.root.name}-{step}-{life[0]}"
    memory.mkdir()
    layout = lay_out([], ImageInfo(format=FORMAT, run=RUN, rank=0, world=world), 4096)
    arena = Arena.create(open_root(str(memory)), run=RUN, rank=0, world=world, layout=layout, slots=2)
    arena.seal(0, step=step, cut_time=1.0, generation=life)
    assert flush.persist_part(tier, arena, 0, torch_version="") is not None
    assert flush.commit(tier, step, [0], world, life)
    arena.remove()


def test_a_run_whose_checkpoints_never_fall_on_a_multiple_keeps_the_first_after_each() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with run_directory() as directory:
        policy, tiers = Keep(last=1, every=10), [Disk(every=7)]
        with everstep.guard(model, optimizer, dir=directory, keeper="inline", keep=policy, tiers=tiers) as run:
            for step in range(1, 43):
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
                run.done()
                if step % 7 == 0:
                    run.wait("durable")
        assert committed_steps(DiskTier(directory)) == [14, 21, 35, 42]


def test_a_milestone_that_is_damaged_leaves_its_place_to_the_next_one(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "run")
    for step in (51, 58, 65, 72):
        commit(tier, step)
    os.truncate(tier.root / data_name(51, 0), 8)
    assert flush.retire(tier, POLICY, RUN) == [51, 65]
    assert committed_steps(tier) == [58, 72]


def test_a_life_that_goes_on_from_before_a_milestone_makes_its_own(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "run")
    for step in (51, 58, 102, 109):
        commit(tier, step)
        flush.retire(tier, POLICY, RUN)
    assert committed_steps(tier) == [51, 102, 109]
    flush.set_aside(tier, 51, RUN, NEXT_LIFE)
    for step in (53, 105, 109, 116):
        commit(tier, step, life=NEXT_LIFE)
        flush.retire(tier, POLICY, RUN)
    assert committed_steps(tier) == [51, 105, 116]


def retire_as_keeper(tier: DiskTier, order: Order) -> None:
    told = list[object]()
    roster, logbook = Roster(), Logbook(tier, told.append)
    replicas = Replicas(tier.root.parent, told.append, roster, selectors.DefaultSelector())
    writer = BaseWriter(tier, roster, logbook, replicas, told.append, lambda: None, unmarked)
    writer.appointed = lambda: order
    writer._retire(
        Hello(
            rank=0, world=2, local=1, local_ranks=(0,), ranks_here=(0,), pid=1, run=RUN, directory="", generation=LIFE,
            resumed_from=None, every_steps=1, every_s=None, every_capture=False, lose_steps=None, lose_s=None,
            keep_last=POLICY.last, keep_every=POLICY.every, linger_s=0.0, torch="", secret=b"many nodes",
        )
    )  # fmt: skip


def test_nodes_that_differ_in_what_they_have_keep_the_same_milestone(tmp_path: Path) -> None:
    """The other node died before it had written step 51, and went on from memory."""
    ours, theirs = DiskTier(tmp_path / "ours"), DiskTier(tmp_path / "theirs")
    commit(ours, 51, world=2)
    for step in (58, 65, 72, 79):
        for tier in (ours, theirs):
            commit(tier, step, world=2)
        there = set(committed_steps(ours)).intersection(committed_steps(theirs))
        for tier in (ours, theirs):
            retire_as_keeper(tier, Order(complete=step, everywhere=tuple(there)))
    assert committed_steps(theirs) == [58, 79]
    assert committed_steps(ours) == [51, 58, 79]  # nobody but the other node knows that it cannot go on from 51


def test_all_nodes_are_told_what_all_of_them_have() -> None:
    rounds = Rounds(["n0", "n1"], {"disk": Every(steps=1)}, LIFE, 0.1)

    def tell(node: str, *there: int) -> Order:
        lane = Lane(done=max(there, default=-1), there=there)
        report = Report(node=node, generation=LIFE, newest=60, lanes={"disk": lane})
        return rounds.hear(report, 1.0).lanes["disk"]

    tell("n0", 51, 58)
    assert tell("n1").everywhere == ()
    assert tell("n1", 58).everywhere == tell("n0", 51, 58).everywhere == (58,)


def test_a_log_follows_the_newest_checkpoints_and_not_a_milestone(tmp_path: Path) -> None:
    tier, policy = DiskTier(tmp_path / "run"), Keep(last=2, every=50)
    assert flush.oldest_followed(tier, policy, RUN) == -1
    for step in (51, 58, 65, 72):
        commit(tier, step)
        flush.retire(tier, policy, RUN)
    assert committed_steps(tier) == [51, 65, 72]
    assert flush.oldest_followed(tier, policy, RUN) == 65
    assert flush.oldest_followed(tier, policy, RUN, before=51) == 51, "the other node may have nothing newer"
    assert flush.oldest_followed(tier, Keep(last=2, every=1), RUN) == 51, "each may be gone on from"
    os.truncate(tier.root / data_name(72, 0), 8)
    assert flush.oldest_followed(tier, policy, RUN) == 51, "the newest two that can be gone on from"
