"""Who is in this job: rank, world, node; and how ranks tell each other a few bytes at the start.

Nothing here is on the training path. `exchange` moves bytes as tensors, so that no pickle is involved.
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from everstep.errors import BadConfig, EverstepError
from everstep.launch import launched, missing

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One rank's place. `nodes` and `domains`: of every rank, in the order of ranks."""

    rank: int
    world: int
    node: str
    nodes: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()  # what fails together: a rack, a switch; by default the node itself

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return tuple(rank for rank, node in enumerate(self.nodes) if node == self.node) or (self.rank,)

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its node."""
        return self.rank == self.local_ranks[0]

    @property
    def has_many_nodes(self) -> bool:
        return len(set(self.nodes)) > 1


def here() -> Topology:
    """This process's place, from torch.distributed if it is running, else a world of one. All ranks must ask."""
    import torch.distributed as dist

    node, domain = node_name(), domain_name()
    if not (dist.is_available() and dist.is_initialized()):
        return Topology(rank=0, world=1, node=node, nodes=(node,), domains=(domain,))
    alone = Topology(rank=dist.get_rank(), world=dist.get_world_size(), node=node)
    mine = "\0".join((node, domain, os.environ.get("EVERSTEP_DOMAIN", "")))
    told = [answer.decode().split("\0") for answer in exchange(mine.encode(), alone)]
    nodes, domains, named = (tuple(column) for column in zip(*told, strict=True))
    if len(set(domains)) == 1 and not any(named):
        domains = nodes  # a switch that all of them hang on says nothing: only what is named forbids all protection
    return replace(alone, nodes=nodes, domains=domains)


def node_name() -> str:
    """What this node is called: EVERSTEP_NODE where several live on one machine, else what the launcher calls it."""
    said = launched(os.environ)
    name = os.environ.get("EVERSTEP_NODE") or (said and said.node) or socket.gethostname()
    return check_name("EVERSTEP_NODE", name)


def domain_name() -> str:
    """What fails together with this node: EVERSTEP_DOMAIN, or the switch that Slurm names; else it alone."""
    said = launched(os.environ)
    return check_name("EVERSTEP_DOMAIN", os.environ.get("EVERSTEP_DOMAIN") or (said and said.domain) or node_name())


def own_address() -> str:
    """Where other nodes find this one: EVERSTEP_ADDRESS, else the address from which it reaches MASTER_ADDR."""
    given = os.environ.get("EVERSTEP_ADDRESS")
    if given:
        return given
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, kind, protocol, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)  # sends nothing: the kernel only chooses a route
        return str(probe.getsockname()[0])


def check_name(variable: str, name: str) -> str:
    """The name of a node or a domain, as it may stand in the names of files."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", name):
        raise BadConfig(f"{variable} must be a name of letters, digits, '.', '_' and '-', not {name!r}")
    return name


def exchange(payload: bytes, topology: Topology) -> list[bytes]:
    """Every rank's payload, on every rank, in the order of ranks."""
    if topology.world == 1:
        return [payload]
    import torch
    import torch.distributed as dist

    device = collective_device()
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(topology.world)]
    dist.all_gather(lengths, torch.tensor([len(payload)], dtype=torch.int64, device=device))
    sizes = [int(length.item()) for length in lengths]
    mine = torch.zeros(max(1, *sizes), dtype=torch.uint8)
    mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else mine[:0]
    gathered = [torch.zeros(max(1, *sizes), dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(gathered, mine.to(device))
    return [bytes(g[:n].cpu().numpy().tobytes()) for g, n in zip(gathered, sizes, strict=True)]


def collective_device() -> torch.device:
    """Where the backend takes tensors."""
    import torch
    import torch.distributed as dist

    if "nccl" in str(dist.get_backend()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def init_process_group(backend: str | None = None, *, timeout: timedelta | None = None, **options: Any) -> None:
    """torch.distributed.init_process_group, under a store prefix that no earlier life of this job has used.

    A restarted job can meet the addresses of its dead predecessors in the store. Here the ranks first find each
    other alive: each says hello with a token made a moment ago, rank 0 answers the tokens it sees with the name of a
    new generation, and goes on answering until all have joined it. Whoever is dead never joins.

    Under mpirun and srun the variables that torch reads are set from the launcher's, where they are not set already.
    """
    import torch.distributed as dist

    os.environ |= missing(os.environ)
    limit = timeout or dist.constants.default_pg_timeout
    store, rank, world = next(dist.rendezvous("env://", timeout=limit))
    generation = _agree_on_generation(dist.PrefixStore("everstep", store), rank, world, limit)
    prefixed = dist.PrefixStore(f"everstep/{generation}", store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world, timeout=limit, **options)


def _agree_on_generation(store: Any, rank: int, world: int, limit: timedelta) -> str:
    if world == 1:
        return uuid.uuid4().hex
    if rank != 0:
        token = uuid.uuid4().hex
        store.set(f"hello/{rank}", token)
        try:
            store.wait([f"welcome/{token}"], limit)
        except Exception as error:
            raise EverstepError(f"rank 0 did not answer rank {rank} within {limit}: {error}") from error
        generation = str(store.get(f"welcome/{token}").decode())
        store.set(f"joined/{generation}/{rank}", b"1")
        return generation
    generation = uuid.uuid4().hex
    deadline = time.monotonic() + limit.total_seconds()
    missing, answered = set(range(1, world)), set[str]()
    while missing:
        for other in sorted(missing):
            if store.check([f"joined/{generation}/{other}"]):
                missing.discard(other)
            elif store.check([f"hello/{other}"]):
                token = store.get(f"hello/{other}").decode()
                if token not in answered:
                    answered.add(token)
                    store.set(f"welcome/{token}", generation)
        if time.monotonic() > deadline:
            raise EverstepError(f"ranks {sorted(missing)} did not join within {limit}; are all nodes started?")
        time.sleep(0.005 if missing else 0)
    return generation


def process_alive(pid: int) -> bool:
    """Whether a process of this machine is running; a zombie is not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rsplit(b")", 1)[1].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
