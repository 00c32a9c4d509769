"""Parity of a group's bases, made by each member for itself from what the others show in their memory.

A member reads the blocks that its parity is made of from the slots that the others hold, chunk by chunk, and keeps the
result in its own memory. No file is read, and no trainer is asked for anything but to leave a slot alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from everstep.errors import Damaged, PeerFailed
from everstep.events import Protected, Sink
from everstep.image import CHUNK_BYTES, FORMAT
from everstep.keeper.copies import Copies
from everstep.keeper.exchange import AnyAnswer, AskHeld, HeldParts, ReadImage
from everstep.keeper.guests import forget_before
from everstep.keeper.lane import HeldBase
from everstep.keeper.peers import Peer
from everstep.keeper.session import checksums
from everstep.protect.parity import Read, encode
from everstep.protect.stripes import Geometry
from everstep.store.manifest import encode as encode_record
from everstep.store.manifest import parity_names
from everstep.store.memory import MemoryTier
from everstep.types import ParityMember, ParityPart, ParityRecord, Source

_PATIENCE_S = 10.0  # until another member holds the step too
_LOOK_S = 0.005


class ParityWork:
    name = "protect"
    tier: Source = "parity"
    stays = True

    def __init__(
        self, group: Sequence[str], node: str, losses: int, peers: Mapping[str, Peer[AnyAnswer]],
        guests: MemoryTier, copies: Copies, emit: Sink, is_wanted: Callable[[int], bool],
    ) -> None:  # fmt: skip
        """`is_wanted`: whether a step is still the one that all are bringing."""
        self._group, self._me, self._losses = list(group), list(group).index(node), losses
        self._peers, self._guests, self._emit, self._is_wanted = peers, guests, emit, is_wanted
        self.reach, self._copies = copies.reach, copies

    def do(self, base: HeldBase) -> int:
        mine = member_of(self._group[self._me], base)
        members = [mine if node == mine.node else self._ask(node, base) for node in self._group]
        geometry = Geometry(
            members=tuple(self._group), lengths=tuple(one.bytes for one in members), losses=self._losses
        )  # fmt: skip
        name, record_name = parity_names(base.step, self._me)
        for leftover in (record_name, name):
            self._guests.delete(leftover)
        incoming = self._guests.receive(name, geometry.parity_bytes(self._me))
        sums = _Sums()
        try:
            with ThreadPoolExecutor(max(1, len(self._group) - 1)) as pool:

                def read(wanted: Sequence[Read]) -> None:
                    list(pool.map(lambda one: self._read(base, members, one), wanted))

                def write(offset: int, data: memoryview) -> None:
                    sums.add(data)
                    incoming.write(offset, data)

                encode(geometry, self._me, read, write)
            incoming.finish()
        finally:
            incoming.abandon()
        record = ParityRecord(
            format=FORMAT, run=base.hello.run, generation=base.hello.generation, step=base.step,
            world=base.hello.world, losses=self._losses, member=self._me, members=tuple(members),
            bytes=geometry.parity_bytes(self._me), chunk_bytes=CHUNK_BYTES, chunks=sums.end(),
        )  # fmt: skip
        self._guests.put(record_name, memoryview(encode_record(record)))
        return record.bytes * (len(members) - self._losses)

    def _ask(self, node: str, base: HeldBase) -> ParityMember:
        """What another member holds of the step, as soon as it does."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                answer = self._peers[node].ask(AskHeld(step=base.step)).answer
                assert isinstance(answer, HeldParts)
                return ParityMember(node=node, parts=answer.parts)
            except PeerFailed:
                if time.monotonic() > deadline or not self._is_wanted(base.step):
                    raise
                time.sleep(_LOOK_S)

    def _read(self, base: HeldBase, members: Sequence[ParityMember], wanted: Read) -> None:
        """Fill a chunk from the images of a member's ranks, which lie one after the other."""
        into, offset = wanted.into, wanted.offset
        for at, part in enumerate(members[wanted.member].parts):
            if offset >= part.bytes:
                offset -= part.bytes
                continue
            piece = into[: min(len(into), part.bytes - offset)]
            if wanted.member == self._me:
                arena, slot, _ = base.images()[at]
                piece[:] = arena.image(slot)[offset : offset + len(piece)]
            else:
                peer = self._peers[self._group[wanted.member]]
                peer.ask(ReadImage(step=base.step, rank=part.rank, offset=offset, length=len(piece)), into=piece)
            into, offset = into[len(piece) :], 0
            if not into:
                return
        raise Damaged("a member has fewer bytes than it said", step=base.step)

    def over(self, base: int, before: int) -> None:
        self._emit(Protected(step=base))
        self._copies.forget(before)
        forget_before(self._guests, before)


def member_of(node: str, base: HeldBase) -> ParityMember:
    """What this node has of a base, with checksums."""
    return ParityMember(
        node=node,
        parts=tuple(
            ParityPart(rank=arena.rank, bytes=seal.length, cut_time=seal.cut_time, chunks=checksums(arena, slot))
            for arena, slot, seal in base.images()
        ),
    )


class _Sums:
    """Checksums of chunks, of bytes that come in smaller pieces."""

    def __init__(self) -> None:
        self._found: list[int] = []
        self._open, self._filled = xxhash.xxh3_64(), 0

    def add(self, data: memoryview) -> None:
        while data:
            piece = data[: CHUNK_BYTES - self._filled]
            self._open.update(piece)
            self._filled += len(piece)
            data = data[len(piece) :]
            if self._filled == CHUNK_BYTES:
                self._close()

    def _close(self) -> None:
        self._found.append(self._open.intdigest())
        self._open, self._filled = xxhash.xxh3_64(), 0

    def end(self) -> tuple[int, ...]:
        if self._filled:
            self._close()
        return tuple(self._found)
