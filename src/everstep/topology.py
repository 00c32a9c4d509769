"""Who is in this job: rank, world, node; and how ranks tell each other bytes at the start.

Nothing here is on the training path. `exchange` and `broadcast` move bytes as they are, so that no pickle is involved:
over torch.distributed, or over MPI for those who ask for it.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from everstep.errors import BadConfig, EverstepError
from everstep.launch import is_spare, launched, missing
from everstep.wires import Wires

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

_PACK_BYTES = 32 << 20  # of a message
_FORMED: WeakKeyDictionary[Any, Formed] = WeakKeyDictionary()  # the groups that were made here
_MPI_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_SIZE")  # what they set


class Messages(Protocol):
    """How bytes get from rank to rank. All ranks must call the same."""

    def exchange(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, on every rank, in the order of ranks."""

    def broadcast(self, data: memoryview, source: int) -> None:
        """Fill `data`, as long on every rank, with what `source` has in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One rank's place. `nodes` and `domains`: of every rank, in the order of ranks."""

    rank: int
    world: int
    node: str
    nodes: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()  # what fails together: a rack, a switch; by default the node itself
    messages: Messages | None = field(default=None, compare=False, repr=False)  # None: torch.distributed

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


def alone() -> Topology:
    """A world of one, whoever else is there."""
    node, domain = node_name(), domain_name()
    return Topology(rank=0, world=1, node=node, nodes=(node,), domains=(domain,))


def here(*, mpi: bool = False, group: Any = None) -> Topology:
    """This process's place, from torch.distributed if it is running, else a world of one. All ranks must ask.

    `mpi`: before that, from mpi4py, if it is installed and this process was started by MPI's launcher.
    `group`: the ranks that count, by default all.
    """
    import torch.distributed as dist

    node, domain = node_name(), domain_name()
    if dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        mine = Topology(rank=rank, world=world, node=node, messages=_TorchMessages(group))
    elif mpi and (comm := _mpi_world()) is not None:
        mine = Topology(rank=comm.Get_rank(), world=comm.Get_size(), node=node, messages=_MpiMessages(comm))
    else:
        return alone()
    word = "\0".join((node, domain, os.environ.get("EVERSTEP_DOMAIN", "")))
    told = [answer.decode().split("\0") for answer in exchange(word.encode(), mine)]
    nodes, domains, named = (tuple(column) for column in zip(*told, strict=True))
    if len(set(domains)) == 1 and not any(named):
        domains = nodes  # a switch that all of them hang on says nothing: only what is named forbids all protection
    return replace(mine, nodes=nodes, domains=domains)


def _mpi_world() -> MPI.Intracomm | None:
    """MPI's world, if there is one. Without a launcher nobody asks: the import alone would start MPI."""
    if "mpi4py.MPI" not in sys.modules and not any(name in os.environ for name in _MPI_LAUNCHERS):
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # not installed; or installed without a library to talk to
        return None
    return MPI.COMM_WORLD if MPI.Is_initialized() and not MPI.Is_finalized() else None


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """What this node is called: EVERSTEP_NODE where several live on one machine, else what the launcher calls it.

    `environment`: of another process than this one.
    """
    said = launched(environment)
    name = environment.get("EVERSTEP_NODE") or (said and said.node) or socket.gethostname()
    return check_name("EVERSTEP_NODE", name)


def domain_name() -> str:
    """What fails together with this node: EVERSTEP_DOMAIN, or the switch that Slurm names; else it alone."""
    said = launched(os.environ)
    return check_name("EVERSTEP_DOMAIN", os.environ.get("EVERSTEP_DOMAIN") or (said and said.domain) or node_name())


def own_address(place: Topology) -> str:
    """Where other nodes find this one: EVERSTEP_ADDRESS, else the address from which it reaches MASTER_ADDR.

    Without a master, as under MPI, the one from which it reaches another node, where nodes go by the names of hosts.
    """
    given = os.environ.get("EVERSTEP_ADDRESS")
    if given:
        return given
    other = next((node for node in place.nodes if node != place.node), "127.0.0.1")
    try:
        found = socket.getaddrinfo(os.environ.get("MASTER_ADDR", other), 9, type=socket.SOCK_DGRAM)
    except socket.gaierror:
        if "MASTER_ADDR" in os.environ:
            raise
        found = socket.getaddrinfo("127.0.0.1", 9, type=socket.SOCK_DGRAM)  # nodes of one machine, by made-up names
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: the kernel only chooses a route
        return str(probe.getsockname()[0])


def check_name(variable: str, name: str) -> str:
    """The name of a node or a domain, as it may stand in the names of files."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", name):
        raise BadConfig(f"{variable} must be a name of letters, digits, '.', '_' and '-', not {name!r}")
    return name


def exchange(payload: bytes, topology: Topology) -> list[bytes]:
    """Every rank's payload, on every rank, in the order of ranks."""
    return [payload] if topology.world == 1 else (topology.messages or _TorchMessages()).exchange(payload)


def broadcast(data: memoryview, source: int, topology: Topology) -> None:
    """Fill `data` on every rank with what `source` has in it."""
    if topology.world > 1:
        (topology.messages or _TorchMessages()).broadcast(data, source)


def messages_of(group: Any) -> Messages:
    """Among the ranks of a group that need not be the default one."""
    return _TorchMessages(group)


class _TorchMessages:
    def __init__(self, group: Any = None) -> None:
        self._group = group

    def exchange(self, payload: bytes) -> list[bytes]:
        import torch
        import torch.distributed as dist

        device, world = collective_device(self._group), dist.get_world_size(self._group)
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
        dist.all_gather(lengths, torch.tensor([len(payload)], dtype=torch.int64, device=device), group=self._group)
        sizes = [int(length.item()) for length in lengths]
        mine = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else mine[:0]
        gathered = [torch.zeros(max(1, *sizes), dtype=torch.uint8, device=device) for _ in sizes]
        dist.all_gather(gathered, mine.to(device), group=self._group)
        return [bytes(g[:n].cpu().numpy().tobytes()) for g, n in zip(gathered, sizes, strict=True)]

    def broadcast(self, data: memoryview, source: int) -> None:
        import torch
        import torch.distributed as dist

        device, is_source = collective_device(self._group), dist.get_rank(self._group) == source
        for at in range(0, len(data), _PACK_BYTES):
            piece = data[at : at + _PACK_BYTES]
            pack = torch.empty(len(piece), dtype=torch.uint8)
            if is_source:
                pack.copy_(torch.frombuffer(piece if not piece.readonly else bytearray(piece), dtype=torch.uint8))
            pack = pack.to(device)
            dist.broadcast(pack, group=self._group, group_src=source)
            if not is_source:
                piece[:] = memoryview(pack.cpu().numpy()).cast("B")  # type: ignore[arg-type]


class _MpiMessages:
    """Over MPI's own buffers: mpi4py's other calls, in lower case, would pickle."""

    def __init__(self, world: MPI.Intracomm) -> None:
        self._world = world

    def exchange(self, payload: bytes) -> list[bytes]:
        import numpy as np
        from mpi4py import MPI

        sizes = np.zeros(self._world.Get_size(), dtype=np.int64)
        self._world.Allgather(np.array([len(payload)], dtype=np.int64), sizes)
        gathered = bytearray(int(sizes.sum()))
        ends = np.cumsum(sizes)
        self._world.Allgatherv([payload, MPI.BYTE], [gathered, sizes.tolist(), (ends - sizes).tolist(), MPI.BYTE])
        return [bytes(gathered[end - size : end]) for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)]

    def broadcast(self, data: memoryview, source: int) -> None:
        from mpi4py import MPI

        for at in range(0, len(data), _PACK_BYTES):
            piece = data[at : at + _PACK_BYTES]
            if self._world.Get_rank() == source and piece.readonly:
                piece = memoryview(bytearray(piece))  # MPI takes no buffer that it could not write to
            self._world.Bcast([piece, MPI.BYTE], root=source)


def collective_device(group: Any = None) -> torch.device:
    """Where the backend takes tensors."""
    import torch
    import torch.distributed as dist

    if "nccl" in str(dist.get_backend(group)):
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

    limit = timeout or dist.constants.default_pg_timeout
    how = Formed(backend, limit, options)
    if is_spare(os.environ):
        how.pretend(int(os.environ.get("WORLD_SIZE", "1")))
        return
    os.environ |= missing(os.environ)
    store, rank, world = next(dist.rendezvous("env://", timeout=limit))
    generation = _agree_on_generation(dist.PrefixStore("everstep", store), rank, world, limit)
    prefixed = dist.PrefixStore(f"everstep/{generation}", store)
    how.form(lambda: prefixed, rank, world)


@dataclass(slots=True)
class Formed:
    """How a group was made, so that it can be made again among others; and its connections, to interrupt it by."""

    backend: str | None
    limit: timedelta
    options: dict[str, Any]
    wires: Wires = field(default_factory=Wires)

    def pretend(self, world: int) -> None:
        """Alone, until this process is called to the others: it takes itself for the first of so many ranks.

        So it can cut a model for as many as there will be, and no rank has to have it whole.
        """
        import torch.distributed as dist

        if world == 1:
            self.form(dist.HashStore, 0, 1)
            return
        from torch.testing._internal.distributed.fake_pg import FakeStore  # where torch has that backend

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        _FORMED[dist.group.WORLD] = self

    def form(self, store: Callable[[], Any], rank: int, world: int) -> None:
        import torch.distributed as dist

        with self.wires.noting(world):
            dist.init_process_group(
                self.backend, store=store(), rank=rank, world_size=world, timeout=self.limit, **self.options
            )
        _FORMED[dist.group.WORLD] = self


def formed() -> Formed | None:
    """How the present group was made, if it was by `init_process_group` of Everstep."""
    import torch.distributed as dist

    return _FORMED.get(dist.group.WORLD) if dist.is_initialized() else None


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
