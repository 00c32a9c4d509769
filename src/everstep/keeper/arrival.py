"""A trainer arrives: it tells its keeper all that it needs to know, and who the keepers of the other nodes are."""

from __future__ import annotations

import os
import time

import torch

from everstep import topology
from everstep.config import Settings
from everstep.errors import BadConfig
from everstep.keeper.client import KeeperClient
from everstep.keeper.protocol import Hello, Member
from everstep.launch import end_time
from everstep.store.claim import Claim
from everstep.topology import Topology
from everstep.types import Level


def check(settings: Settings, place: Topology) -> None:
    """What a thread of one rank cannot do for all of them."""
    tiers = settings.tiers
    if settings.keeper == "inline" and place.world > 1 and (tiers.deeper or tiers.protection):
        raise BadConfig("keeper='inline' is for one rank alone where a run has deeper tiers or partners")


def check_level(wanted: Level, settings: Settings, place: Topology) -> None:
    """What no tier of a run can give."""
    tiers = settings.tiers
    if wanted is Level.SHARED and not tiers.deeper:
        raise BadConfig("nothing is ever 'shared' without tiers=[Shared(...)] or tiers=[Objects(...)]")
    if wanted is Level.PROTECTED and (tiers.protection is None or not place.has_many_nodes):
        raise BadConfig("nothing is ever 'protected' without several nodes and tiers=[Partner()] or [Parity(...)]")


def _check_alike(settings: Settings, place: Topology) -> None:
    """All nodes must know the same of who protects whom, and how they talk."""
    said = [answer.decode() for answer in topology.exchange(repr(settings.tiers.protection).encode(), place)]
    other = next((rank for rank, scheme in enumerate(said) if scheme != said[0]), None)
    if other is not None:
        raise BadConfig(
            f"node {place.nodes[0]} is to be protected by {said[0]}, and node {place.nodes[other]} by {said[other]}: "
            "give all ranks the same"
        )


def arrive(
    keeper: KeeperClient, settings: Settings, place: Topology, claim: Claim, *, generation: str,
    resumed_from: int | None, replica: str,
) -> None:  # fmt: skip
    """All ranks must arrive together."""
    _check_alike(settings, place)
    is_alone = settings.keeper == "inline" or not place.has_many_nodes
    secret = b"" if is_alone else topology.exchange(os.urandom(32), place)[0]
    keep, every, lose = settings.keep, settings.tiers.disk.cadence, settings.capture
    linger_s, local = settings.linger_s, place.local_ranks
    if settings.keeper == "inline":
        local, linger_s = (place.rank,), 0.0  # a thread is not there any more when its trainer comes back
    keeper.open(
        Hello(
            rank=place.rank, world=place.world, local=len(local), local_ranks=local, pid=os.getpid(), run=claim.run,
            ranks_here=tuple(range(place.world)) if claim.disk_is_common else place.local_ranks,
            directory=str(settings.directory), generation=generation, resumed_from=resumed_from,
            every_steps=every.steps, every_s=every.seconds, every_capture=settings.mode == "disk",
            lose_steps=lose.steps, lose_s=lose.seconds, keep_last=keep.last, keep_every=keep.every, linger_s=linger_s,
            torch=str(torch.__version__), replica=replica, tiers=str(settings.tiers), secret=secret,
            began=time.time(), end_time=end_time(os.environ),
            address=f"{topology.own_address(place)}:0" if secret else "",
        )
    )  # fmt: skip
    addresses = [answer.decode() for answer in topology.exchange(keeper.address.encode(), place)]
    keeper.join(_members(place, addresses))


def _members(place: Topology, addresses: list[str]) -> tuple[Member, ...]:
    """The nodes in the order of their first ranks; each is spoken for by that one."""
    found = []
    for node in dict.fromkeys(place.nodes):
        ranks = tuple(rank for rank, other in enumerate(place.nodes) if other == node)
        found.append(Member(node=node, domain=place.domains[ranks[0]], address=addresses[ranks[0]], ranks=ranks))
    return tuple(found)
