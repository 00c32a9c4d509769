"""A trainer arrives: it tells its keeper all that it needs to know, and who the keepers of the other nodes are."""

from __future__ import annotations

import os
import socket
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from everstep import topology
from everstep.capture.host import arena_root
from everstep.config import Settings
from everstep.errors import BadConfig, KeeperLost, Misuse
from everstep.events import Degraded, EventLog, Sink
from everstep.keeper import flush, scavenge
from everstep.keeper.client import KeeperClient, asked_of
from everstep.keeper.note import read_charter
from everstep.keeper.protocol import (
    Charter,
    Convene,
    Convened,
    Hello,
    Member,
    Seat,
    Sitting,
    Trouble,
    connect,
    runtime_folder,
)
from everstep.launch import end_time, metrics_address
from everstep.store import rewinds
from everstep.store.claim import Claim, make, sign
from everstep.store.disk import DiskTier
from everstep.store.manifest import run_name
from everstep.store.places import Places
from everstep.topology import Topology
from everstep.types import Level

_CHARTER = "council"  # in the store where ranks meet
_ASK = timedelta(seconds=1)
_CONVENE_S, _AGAIN_S = 30.0, 0.1


def check(settings: Settings, place: Topology) -> None:
    """Before anything begins: whether the environment is right, and what a thread of one rank cannot do for all."""
    metrics_address(os.environ)
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
    keeper: KeeperClient, settings: Settings, place: Topology, claim: Claim, emit: Sink, *, resumed_from: int | None,
    replica: str,
) -> str:  # fmt: skip
    """All ranks must arrive together. Returns the name of their life, which no other has."""
    _check_alike(settings, place)
    if settings.tiers.protection is not None and not place.has_many_nodes:
        emit(Degraded(what="no step is protected", reason="other nodes are to do that, and this job has only one"))
    _check_original(settings, place, claim.run)
    generation = topology.exchange(uuid.uuid4().hex.encode(), place)[0].decode()
    _go_back(settings, place, claim.run, generation, resumed_from)
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
            began=time.time(), end_time=end_time(os.environ), metrics=metrics_address(os.environ),
            address=f"{topology.own_address(place)}:0" if secret else "", mtbf_s=settings.mtbf_s,
            failures=EventLog.of_rank(settings.directory, place.rank).failures(),
        )
    )  # fmt: skip
    addresses = [answer.decode() for answer in topology.exchange(keeper.address.encode(), place)]
    keeper.join(_members(place, addresses))
    for folder in {runtime_folder(claim.run), runtime_folder(claim.run, settings.tiers.memory.path)}:
        scavenge.sign(folder, settings.directory, emit)
    return generation


def _go_back(settings: Settings, place: Topology, run: str, generation: str, resumed_from: int | None) -> None:
    """If somebody has asked for that: deeper tiers let go of what is newer before the wish is forgotten.

    Disks and memory do in every new life at once, and those else when something new is brought there.
    """
    places = Places.chosen(settings.directory, settings.tiers)
    is_asked = b"1" in topology.exchange(b"" if rewinds.read(places.disk_tier()) is None else b"1", place)
    for tier in places.deeper_tiers().values() if is_asked and place.rank == 0 else ():
        flush.disown_all(tier, resumed_from, run, generation)
    if is_asked:
        topology.exchange(b"", place)  # nobody forgets it before


def _check_original(settings: Settings, place: Topology, run: str) -> None:
    """Memory and keeper of a run are found by its name, and a copy of its directory has the same."""
    directory, folders = settings.directory, {arena_root(path) / run for path in (None, settings.tiers.memory.path)}
    found = next(filter(None, (scavenge.original(folder, directory) for folder in folders)), None)
    other = found or scavenge.written_to(run, directory)
    told = [os.fsdecode(answer) for answer in topology.exchange(os.fsencode(other or ""), place) if answer]
    if told:
        raise Misuse(
            f"{directory} was moved or copied from {told[0]}, or that from here, and a machine has memory and a keeper "
            f"for one of them at a time. End the other, and wait until `everstep status {told[0]}` says keeper: none; "
            "what a dead one has in memory `everstep gc` saves and frees"
        )


def _members(place: Topology, addresses: list[str]) -> tuple[Member, ...]:
    """The nodes in the order of their first ranks; each is spoken for by that one."""
    found = []
    for node in dict.fromkeys(place.nodes):
        ranks = tuple(rank for rank, other in enumerate(place.nodes) if other == node)
        found.append(Member(node=node, domain=place.domains[ranks[0]], address=addresses[ranks[0]], ranks=ranks))
    return tuple(found)


def convene(run: str, job: str, settings: Settings, place: Topology) -> Charter:
    """A live job with several nodes begins: their keepers learn of each other. All ranks must take part.

    What they know is left where ranks have met: whoever stands by on yet another node looks for it there.
    """
    host, encrypt = topology.own_address(place), settings.tiers.encrypt
    secret = topology.exchange(os.urandom(32), place)[0]
    address = _ask_to_convene(run, Convene(job=job, secret=secret, encrypt=encrypt, address=f"{_bracketed(host)}:0"))
    addresses = [answer.decode() for answer in topology.exchange(address.encode(), place)]
    seats = tuple(Seat(node=member.node, address=member.address) for member in _members(place, addresses))
    charter = Charter(
        run=run, job=job, secret=secret, encrypt=encrypt, detect_s=settings.detect_s,
        sitting=Sitting(view=0, seats=seats, places=place.nodes), host=_bracketed(host),
    )  # fmt: skip
    store = _meeting_place() if place.rank == 0 else None
    if store is not None:
        store.set(_CHARTER, msgspec.json.encode(charter))
    return charter


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _ask_to_convene(run: str, asked: Convene) -> str:
    """Where the keeper of this node is to be found by others. One that has just died is followed by another."""
    deadline = time.monotonic() + _CONVENE_S
    while time.monotonic() < deadline:
        heard = asked_of(run, asked)
        if isinstance(heard, Convened):
            return heard.address
        if isinstance(heard, Trouble):
            raise BadConfig(heard.reason)
        time.sleep(_AGAIN_S)
    raise KeeperLost(f"the keeper did not say within {_CONVENE_S:g} s where other nodes find it")


def find_run(settings: Settings) -> tuple[str, Charter | None] | None:
    """The run that a spare may join: one with a keeper on this node, or one that is on other nodes, if it is found.

    Of those it hears from the directory, where all nodes see it, else from the place where its ranks have met.
    """
    try:
        run = run_name(DiskTier(settings.directory))
    except (FileNotFoundError, NotADirectoryError):
        run = ""
    charter = read_charter(settings.directory)
    channel = connect(run) if run else None
    if channel is not None:
        channel.close()
    else:
        charter = charter or _ask_meeting_place()
    if charter is None:
        return (run, None) if channel is not None else None
    _prepare(Places.chosen(settings.directory, settings.tiers), charter.run)
    node = topology.node_name()
    place = Topology(rank=0, world=1, node=node, nodes=(node, *(seat.node for seat in charter.sitting.seats)))
    return charter.run, replace(charter, host=_bracketed(topology.own_address(place)))


def _prepare(places: Places, run: str) -> None:
    """Make the directory of this node that run's, for a keeper to begin with."""
    make(places)
    sign(DiskTier(Path(places.directory)), run, EventLog(Path(places.directory, "events-spare.jsonl")))
    try:
        places.write()
    except FileExistsError:
        return  # another spare of this node was faster


def _meeting_place() -> Any:
    """Where the ranks of the job have met; None if nobody is there, or nobody says where it is."""
    import torch.distributed as dist

    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        return None
    try:
        # torch's client fills stderr with its frames where nobody listens, or a signal comes meanwhile: look first
        socket.create_connection((host, int(port)), _ASK.total_seconds()).close()
        return dist.PrefixStore("everstep", dist.TCPStore(host, int(port), is_master=False, timeout=_ASK))
    except (dist.DistError, OSError):
        return None


def _ask_meeting_place() -> Charter | None:
    store = _meeting_place()
    try:
        known = store is not None and store.check([_CHARTER])
        return msgspec.json.decode(store.get(_CHARTER), type=Charter) if known else None
    except (RuntimeError, msgspec.DecodeError):
        return None  # it has just ended, or is another Everstep's
