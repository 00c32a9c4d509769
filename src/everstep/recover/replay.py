"""From a base to a later step: every optimizer call repeated, with what it consumed.

The very bits of training, since the same class steps over the same gradients and group values on the same device. Where
elements are updated one by one, rows are taken apart: into slabs that stay in a cache through all steps, and over ranks
that replay a part each and then tell each other. Digests that were taken in training prove the result.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor, optim

from everstep.capture.digest import MODULUS, StateDigest, added, digest, number
from everstep.capture.layout import Entry, Subjects, optimizer_name
from everstep.capture.sharded import is_zero, local_of, stepping
from everstep.capture.shares import Share, share
from everstep.capture.stepped import local_state, stepped_by
from everstep.capture.update import (
    Call,
    Consumed,
    Double,
    Member,
    double_of,
    has_rows,
    is_elementwise,
    is_sliceable,
    like_parameter,
    parameters_of,
    rows_of,
    state_rows,
    without_global_hooks,
)
from everstep.errors import Diverged
from everstep.recover.gather import broadcast
from everstep.topology import Topology, exchange

SLAB_ELEMENTS = 1 << 18  # on a host: with its state and gradient some megabytes, which a cache holds through all steps


def replay(subjects: Subjects, steps: Sequence[Consumed], topology: Topology) -> int | None:
    """Bring parameters and optimizer state to after the last of `steps`; the newest step that a digest proved.

    Raises Diverged, on every rank, if a digest does not fit; the state is then of no use.
    """
    proof = Proof(steps)
    advance(subjects, steps, topology, proof)
    return proof.verdict(topology)


def advance(subjects: Subjects, steps: Sequence[Consumed], topology: Topology, proof: Proof) -> None:
    """The same without a verdict, for whoever has several subjects to prove together."""
    alone = _independent(subjects)
    with without_global_hooks():
        if len(alone) < len(subjects.optimizers):
            _whole(subjects, [i for i in range(len(subjects.optimizers)) if i not in alone], steps, topology, proof)
        for index in alone:
            _Slabs(subjects, index, steps, topology).replay(proof)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # uploads may still read what holds the gradients


@contextmanager
def as_many_threads(extras: Mapping[str, Any]) -> Iterator[None]:
    """As torch had in training, by what a record says: where a kernel cuts a tensor decides its last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(extras["threads"])
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _independent(subjects: Subjects) -> list[int]:
    """The optimizers whose rows can be taken apart: elementwise, and neither parameters nor states are of several."""
    holders: dict[int, int] = {}
    for optimizer in subjects.optimizers:
        for parameter in parameters_of(optimizer):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return [
        i
        for i, optimizer in enumerate(subjects.optimizers)
        if is_elementwise(stepping(optimizer))
        and all(holders[id(p)] == 1 for p in parameters_of(optimizer))
        and not _has_common_state(stepping(optimizer))
    ]


def _has_common_state(optimizer: optim.Optimizer) -> bool:
    """Whether parameters have one tensor in common as their state: a digest has it once."""
    states = (state for key, state in optimizer.state.items() if isinstance(key, Tensor))
    seen = [id(value) for state in states for value in state.values() if isinstance(value, Tensor)]
    return len(seen) != len(set(seen))


class Proof:
    """Sums up digests, and compares them with those that were taken in training."""

    def __init__(self, steps: Sequence[Consumed], counts: Callable[[str, bool], bool] = lambda *_: True) -> None:
        """`counts`: whether a tensor, with or without a parameter's rows, is among those that the digests are of."""
        self.counts = counts
        self._expected = {one.step: sum(one.digest) % MODULUS for one in steps if one.digest is not None}
        self._common = dict.fromkeys(self._expected, 0)
        self._private = dict.fromkeys(self._expected, 0)

    def wants(self, step: int) -> bool:
        return step in self._expected

    def add(self, step: int, sums: tuple[Tensor, Tensor]) -> None:
        for known, more in zip((self._common, self._private), sums, strict=True):
            known[step] = (known[step] + number(more)) % MODULUS

    def verdict(self, topology: Topology) -> int | None:
        if not self._expected:
            return None
        form = f"<{len(self._common)}Q"
        ranks = [struct.unpack(form, one) for one in exchange(struct.pack(form, *self._common.values()), topology)]
        total = dict(zip(self._common, map(sum, zip(*ranks, strict=True)), strict=True))
        right = [(total[step] + self._private[step]) % MODULUS == wanted for step, wanted in self._expected.items()]
        everywhere = map(min, zip(*exchange(bytes(right), topology), strict=True))
        proven = None
        for step, proved in zip(self._expected, everywhere, strict=True):
            if not proved:
                raise Diverged(step, proven)
            proven = step
        return proven


# -- optimizers that need whole parameters, or share them


@torch.no_grad()
def _whole(
    subjects: Subjects, optimizers: list[int], steps: Sequence[Consumed], topology: Topology, proof: Proof
) -> None:
    names = subjects.names()
    whole = {
        i: [
            _Part(g, p, p, names[id(p)], 0, p.shape[0] if p.dim() else 1)
            for g, p, _ in stepped_by(subjects.optimizers[i])
        ]
        for i in optimizers
    }
    doubles = {i: _double(subjects.optimizers[i], parts) for i, parts in whole.items()}
    for one in steps:
        for call in one.calls:
            if call.optimizer in doubles:
                _apply(doubles[call.optimizer], whole[call.optimizer], call, one)
                _adopt(subjects.optimizers[call.optimizer], whole[call.optimizer], doubles[call.optimizer])
        if proof.wants(one.step):
            mine = [e for e in subjects.listing().entries if e.gate in doubles and proof.counts(e.name, True)]
            proof.add(one.step, StateDigest(share(mine, topology.rank, topology.world)).take())


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of what this rank steps of a parameter."""

    group: int
    key: Tensor  # the parameter itself
    parameter: Tensor  # what is stepped
    name: str
    first: int
    rows: int
    leads: bool = True  # of the parts of this rank, the one whose state without rows is kept
    counts: bool = True  # whether this rank's rows go into the digest; others replay them too, or none of them

    @property
    def row_elements(self) -> int:
        return self.parameter.numel() // max(1, self.parameter.shape[0]) if self.parameter.dim() else 1


def _double(optimizer: optim.Optimizer, parts: Sequence[_Part]) -> Double:
    """Over the real tensors and the real state."""
    shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    members = [
        Member(
            group=part.group,
            parameter=double_of(part.parameter, part.parameter.detach()),
            state=optimizer.state.get(part.parameter, {}),
        )
        for part in parts
    ]
    return Double(optimizer, members, shared)


def _adopt(optimizer: optim.Optimizer, parts: Sequence[_Part], double: Double) -> None:
    """State that a step made or replaced."""
    for part, member in zip(parts, double.members, strict=True):
        if member.state:
            optimizer.state[part.parameter] = member.state
    optimizer.state.update(double.shared)


def _apply(double: Double, parts: Sequence[_Part], call: Call, consumed: Consumed) -> None:
    gradients = [
        None if part.name in call.absent else _gradient(part, member.parameter, consumed)
        for part, member in zip(parts, double.members, strict=True)
    ]
    double.step(call, gradients)


def _gradient(part: _Part, parameter: Tensor, consumed: Consumed) -> Tensor:
    if not part.rows:
        return torch.zeros_like(parameter)
    return like_parameter(consumed.gradient(part.name, part.first, part.rows), parameter)


# -- optimizers whose rows can be taken apart


_Advanced = tuple[list[_Part], Double, dict[int, tuple[Tensor, Tensor]]]


class _Slabs:
    """One elementwise optimizer: this rank's rows, some at a time, each through all steps."""

    def __init__(self, subjects: Subjects, index: int, steps: Sequence[Consumed], topology: Topology) -> None:
        self._index, self._topology = index, topology
        self._optimizer = stepping(subjects.optimizers[index])
        self._is_zero = is_zero(subjects.optimizers[index])
        self._prefix = optimizer_name(index, len(subjects.optimizers))
        self._names = subjects.names()
        self._all = parameters_of(subjects.optimizers[index])
        self._stepped = stepped_by(self._optimizer)
        self._entries = {id(e.held): e for e in subjects.listing().entries}
        self._before = {p: local_state(self._optimizer, p) for _, p, _ in self._stepped}
        self._sliceable = {
            local: is_sliceable(self._optimizer, self._optimizer.param_groups[g], local)
            for g, _, local in self._stepped
        }
        self._owned = [self._rows_of(rank) for rank in range(topology.world)]
        lock = threading.Lock()
        self._steps = [
            (_one_at_a_time(one, lock), next((call for call in one.calls if call.optimizer == index), None))
            for one in steps
        ]

    def _splits(self, parameter: Tensor) -> bool:
        """Whether ranks replay a part each of what all of them have."""
        entry = self._entries[id(parameter)]
        return (
            self._topology.world > 1
            and not self._is_zero
            and entry.common
            and entry.box is None
            and parameter.dim() > 0
        )

    def _rows_of(self, rank: int) -> dict[int, Share]:
        """Which rows of which parameters a rank replays for all; of those that cannot be sliced, all rows or none."""
        entries = [
            Entry(
                name=self._names[id(p)],
                tensor=p,
                gate=self._index,
                at_cut=False,
                common=True,
                family=self._names[id(p)],
            )
            for _, p, _ in self._stepped
            if self._splits(p)
        ]
        owned = {}
        for one in share(entries, rank, self._topology.world):
            parameter = one.entry.tensor
            if self._sliceable[parameter]:
                owned[id(parameter)] = one
            elif one.first == 0:
                owned[id(parameter)] = Share(one.entry, 0, parameter.shape[0])
        return owned

    @torch.no_grad()
    def replay(self, proof: Proof) -> None:
        rowless: list[tuple[Tensor, dict[str, Any]]] = []
        for parts, double, sums in self._through_all_steps(proof):
            for step, some in sums.items():
                proof.add(step, some)
            for part, member in zip(parts, double.members, strict=True):
                rowless += self._settle(part, member)
        for parameter, state in rowless:
            self._optimizer.state[parameter].update(state)
        self._gather()

    def _through_all_steps(self, proof: Proof) -> Iterator[_Advanced]:
        """Slabs of rows by as many threads as torch has, each alone with its slab: they need not wait for each other.

        Whole parameters are left to torch, since it is by its number of threads that it divides them, tails and all.
        """
        parts = list(self._parts())
        for slab in _slabs(part for part in parts if not self._is_slab(part.parameter)):
            yield self._advanced(slab, proof)
        slabs = list(_slabs(part for part in parts if self._is_slab(part.parameter)))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(threads) as pool:
                yield from pool.map(lambda slab: self._advanced(slab, proof), slabs)
        finally:
            torch.set_num_threads(threads)

    def _is_slab(self, parameter: Tensor) -> bool:
        return self._sliceable[parameter] and parameter.device.type == "cpu"

    @torch.no_grad()
    def _advanced(self, parts: list[_Part], proof: Proof) -> _Advanced:
        double = self._double(parts)
        sums = {}
        for one, call in self._steps:
            if call is not None:
                _apply(double, parts, call, one)
            if proof.wants(one.step):
                sums[one.step] = self._digest(parts, double, proof)
        return parts, double, sums

    def _parts(self) -> Iterator[_Part]:
        for group, parameter, local in self._stepped:
            name, rows = self._names[id(parameter)], local.shape[0] if local.dim() else 1
            first, end, counts = 0, rows, self._counts(parameter)
            if self._splits(parameter):
                # A rank without rows replays none of them: the state that has no rows advances all the same.
                mine = self._owned[self._topology.rank].get(id(parameter))
                first, end, counts = (mine.first, mine.first + mine.rows, True) if mine else (0, 0, False)
            at_once = rows
            if self._is_slab(local):
                at_once = max(1, SLAB_ELEMENTS * rows // max(1, local.numel()))
            for at in range(first, max(end, first + 1), max(1, at_once)):
                some = min(at_once, end - at)
                yield _Part(group, parameter, local, name, at, some, at == first, counts)

    def _counts(self, parameter: Tensor) -> bool:
        """Whether it is for this rank to have the rows of a parameter in the digest, of all that replay them whole."""
        entry = self._entries[id(parameter)]
        if entry.box is not None:
            return entry.box.sharers.index == 0
        return self._is_zero or not entry.common or self._topology.rank == 0

    def _double(self, parts: Sequence[_Part]) -> Double:
        members = []
        for part in parts:
            rows = rows_of(part.parameter, part.first, part.rows)
            state = state_rows(self._before[part.key], part.parameter, part.first, part.rows)
            members.append(Member(group=part.group, parameter=double_of(part.key, rows), state=state))
        return Double(self._optimizer, members, {})

    def _digest(self, parts: Sequence[_Part], double: Double, proof: Proof) -> tuple[Tensor, Tensor]:
        """Common and private, as `StateDigest` has them."""
        sums: tuple[list[Tensor], list[Tensor]] = ([], [])
        for part, member in zip(parts, double.members, strict=True):
            entry, at = self._entries[id(part.key)], part.first * part.row_elements
            is_shared = entry.common and entry.box is None  # as its state without rows is: of parts each has its own
            rows = [(part.name, member.parameter.detach())]
            for key, value in member.state.items():
                name = f"{self._prefix}.state.{part.name}.{key}"
                if has_rows(value, member.parameter):
                    rows.append((name, value))
                elif isinstance(value, Tensor) and part.first == 0 and (part.counts or not is_shared):
                    sums[not is_shared].extend([digest(name, value)] if proof.counts(name, False) else [])
            if part.counts:
                counted = (digest(name, value, at) for name, value in rows if proof.counts(name, True))
                sums[not entry.common].extend(counted)
        return added(sums[0]), added(sums[1])

    def _settle(self, part: _Part, member: Member) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Put state that a step made or replaced where the optimizer has it; what has no rows, after all slabs."""
        rowless = {}
        for key, value in member.state.items():
            if not has_rows(value, member.parameter):
                rowless[key] = value
                continue
            state = self._optimizer.state[part.key]
            if not isinstance(state.get(key), Tensor):
                state[key] = torch.empty_like(
                    part.key, dtype=value.dtype, device=value.device, requires_grad=False
                ).detach()
            target = rows_of(local_of(state[key]), part.first, part.rows)
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)
        if member.state and part.leads:
            yield part.key, rowless

    def _gather(self) -> None:
        """Give every rank the rows that the others replayed."""
        if self._topology.world == 1:
            return
        if self._is_zero:
            self._gather_parameters()
            return
        for rank, shares in enumerate(self._owned):
            broadcast(self._replayed(shares.values()), source=rank, rank=self._topology.rank)

    def _gather_parameters(self) -> None:
        """Every parameter from the rank that has its state, as ZeroRedundancyOptimizer does after a step."""
        mine = [self._names[id(p)] for _, p, _ in self._stepped]
        by_name = {self._names[id(p)]: p for p in self._all}
        for rank, said in enumerate(exchange(msgspec.json.encode(mine), self._topology)):
            theirs = [by_name[name].detach() for name in msgspec.json.decode(said, type=list[str])]
            tensors = [tensor if tensor.dim() else tensor.view(1) for tensor in theirs]
            broadcast(tensors, source=rank, rank=self._topology.rank)

    def _replayed(self, shares: Iterable[Share]) -> Iterator[Tensor]:
        for one in shares:
            parameter, state = one.entry.tensor, self._optimizer.state.get(one.entry.tensor, {})
            for tensor in (parameter, *(value for value in state.values() if has_rows(value, parameter))):
                yield rows_of(tensor, one.first, one.rows)


def _slabs(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Parts that are stepped together: on a device all of them, since launches are what costs there."""
    slab: list[_Part] = []
    elements = 0
    for part in parts:
        size = part.rows * part.row_elements
        if slab and elements + size > SLAB_ELEMENTS and part.parameter.device.type == "cpu":
            yield slab
            slab, elements = [], 0
        slab.append(part)
        elements += size
    if slab:
        yield slab


def _one_at_a_time(consumed: Consumed, lock: threading.Lock) -> Consumed:
    """Whoever gives gradients need not know of threads."""

    def rows(name: str, first: int, rows: int) -> Tensor:
        with lock:
            return consumed.gradient(name, first, rows)

    return replace(consumed, gradient=rows)
