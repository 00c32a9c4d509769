"""Everything that captures of one state have in common: made once, and again when the state changes its shape.

Pieces travel in one of three ways. Large device tensors are copied straight into the slot, a bucket at a time. Small
ones, and whatever must be copied in the cut, are gathered in spare device memory first and leave it in a few long runs:
a thousand small copies would cost the training thread more than the bytes do. In mode `device` all of them go that way.
Host tensors are copied by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everstep.capture.arena import Arena
from everstep.capture.buckets import PASSING_BYTES, Bucket, buckets
from everstep.capture.layout import (
    TORCH_DTYPES,
    Entry,
    Listing,
    Subjects,
    shaped,
)
from everstep.capture.life import Life
from everstep.capture.shares import Share, share
from everstep.errors import BadConfig
from everstep.image import FORMAT, ImageLayout, lay_out
from everstep.topology import Topology
from everstep.types import ImageInfo, Piece

_EXTRAS_MARGIN = 64 << 10
SMALL_BYTES = 256 << 10  # device tensors below this are gathered


@dataclass(slots=True)
class Views:
    """Destinations in one slot, in the order of the sources."""

    flat: Tensor
    extras: Tensor
    shadows: list[Tensor]
    buckets: list[list[Tensor]]


@dataclass(slots=True)
class Lane:
    """A device's side stream, with the event it starts behind.

    All copies are queued at once: to wait for each would take the interpreter from the loop again and again. A copy of
    the loop itself, such as that of loss.item(), would wait behind all of them, since an engine that copies to the host
    goes on with a queue as long as it can. So after every few megabytes a word is copied the other way, by another
    engine: the queue is not ready in the meantime, and others pass.
    """

    stream: torch.cuda.Stream
    cut: torch.cuda.Event
    end: torch.cuda.Event
    turnstile: tuple[Tensor, Tensor]  # on the device, and pinned on the host

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue copies to the host on the current stream, which is that of the lane."""
        into: list[Tensor] = []
        out_of: list[Tensor] = []
        size = 0
        for target, source in zip(targets, sources, strict=True):
            into.append(target)
            out_of.append(source)
            size += source.nbytes
            if size >= PASSING_BYTES:
                into.append(self.turnstile[0])
                out_of.append(self.turnstile[1])
                size = 0
        if into:
            torch._foreach_copy_(into, out_of, non_blocking=True)

    def drain(self) -> None:
        """Wait (the copier, not the trainer) for all that is queued."""
        self.end.record(self.stream)
        self.end.synchronize()


@dataclass(slots=True)
class Run:
    """Neighbouring pieces that are gathered in spare device memory and leave it as one."""

    begin: int  # in the image
    end: int
    memory: Tensor

    def leave(self, lane: Lane, flat: Tensor, begin: int, end: int) -> None:
        """Copy what lies between two places of the image out of the spare memory."""
        low, high = max(begin, self.begin), min(end, self.end)
        if low < high:
            source = self.memory[low - self.begin : high - self.begin]
            lane.copy(flat[low:high].split(PASSING_BYTES), source.split(PASSING_BYTES))


@dataclass(slots=True)
class Shape:
    layout: ImageLayout
    listing: Listing
    shares: list[Share]
    buckets: list[Bucket]
    sources: list[list[Tensor]]
    gathered: dict[int, list[Tensor]]  # bucket -> where its pieces are gathered
    gates: dict[int, list[int]]  # optimizer -> the last bucket of each device that it must wait for
    in_cut: list[Share]  # pieces that are copied in the cut,
    shadows: list[Tensor]  # and where to
    cut_groups: list[tuple[list[Tensor], list[Tensor]]]  # the same as lists of one device and dtype: target, source
    runs: dict[torch.device, list[Run]]
    arena: Arena
    views: list[Views]
    events: list[torch.cuda.Event | None]  # one a bucket, for the gates
    lanes: dict[torch.device, Lane]

    def rebind(self, subjects: Subjects) -> bool:
        """The tensors were replaced: take the new ones if they have the same shape; False if they have not."""
        listing = subjects.listing()
        if [_signature(e) for e in listing.entries] != [_signature(e) for e in self.listing.entries]:
            return False
        fresh = listing.named
        self.shares = [Share(fresh[s.entry.name], s.first, s.rows) for s in self.shares]
        self.in_cut = [Share(fresh[s.entry.name], s.first, s.rows) for s in self.in_cut]
        self.cut_groups = group_alike(self.shadows, self.in_cut)
        self.sources = [[s.source(fresh[s.entry.name].tensor) for s in bucket.shares] for bucket in self.buckets]
        self.listing = listing  # last: whoever finds it unchanged in another thread takes the shares with it
        return True

    def shares_now(self, subjects: Subjects, topology: Topology) -> list[Share]:
        """With the state that an optimizer has made since, for a parameter that had no gradient before."""
        if self.listing.unchanged():
            return self.shares
        return share(subjects.listing().entries, topology.rank, topology.world)


def make_shape(
    subjects: Subjects,
    life: Life,
    *,
    order: list[int],
    extras_bytes: int,
    arena_for: Callable[[ImageLayout], Arena],
) -> Shape:
    listing, topology, mode = subjects.listing(), life.topology, life.settings.mode
    shares = share(listing.entries, topology.rank, topology.world)
    info = ImageInfo(
        format=FORMAT, run=life.run, rank=topology.rank, world=topology.world, aliases=listing.aliases,
        on_host=listing.on_host, optimizers=subjects.optimizer_infos(listing.names),
    )  # fmt: skip
    devices = sorted({s.entry.tensor.device for s in shares if s.entry.tensor.is_cuda}, key=str)
    if mode == "device" and not devices:
        raise BadConfig("mode='device' needs state on a CUDA device; for training on the CPU use mode='host'")

    def is_gathered(item: Share) -> bool:
        small = item.bytes < SMALL_BYTES or item.entry.at_cut or mode == "device"
        return item.entry.tensor.is_cuda and small

    ordered = sorted(shares, key=lambda s: (str(s.entry.tensor.device), not is_gathered(s)))
    layout = lay_out([s.wanted() for s in ordered], info, 2 * extras_bytes + _EXTRAS_MARGIN)
    places = {piece.name: piece for piece in layout.pieces}
    base = len(layout.header)
    runs = make_runs([s for s in ordered if is_gathered(s)], places, base)
    gathered_shares = [s for s in shares if is_gathered(s)]
    straight_shares = [s for s in shares if not is_gathered(s)]
    count = len(subjects.optimizers)
    groups = buckets(gathered_shares, order, count) + buckets(straight_shares, order, count)
    in_cut = [s for s in shares if s.entry.at_cut]
    shadows = [place_in(runs, s, places, base) if is_gathered(s) else torch.empty_like(s.source()) for s in in_cut]
    arena = arena_for(layout)
    flats = [torch.frombuffer(slot, dtype=torch.uint8) for slot in arena.slots]
    return Shape(
        layout=layout,
        listing=listing,
        shares=shares,
        buckets=groups,
        sources=[[s.source() for s in bucket.shares] for bucket in groups],
        gathered={
            i: [place_in(runs, s, places, base) for s in bucket.shares]
            for i, bucket in enumerate(groups)
            if is_gathered(bucket.shares[0])
        },
        gates=_gates(groups),
        in_cut=in_cut,
        shadows=shadows,
        cut_groups=group_alike(shadows, in_cut),
        runs=runs,
        arena=arena,
        views=[
            Views(
                flat=flat,
                extras=flat[layout.extras_offset : layout.extras_offset + layout.extras_bytes],
                shadows=[view_in(flat, s, places, base) for s in in_cut if not is_gathered(s)],
                buckets=[[view_in(flat, s, places, base) for s in bucket.shares] for bucket in groups],
            )
            for flat in flats
        ],
        events=[torch.cuda.Event() if device_of(bucket).type == "cuda" else None for bucket in groups],
        lanes={device: make_lane(device) for device in devices},
    )


def _signature(entry: Entry) -> tuple[Any, ...]:
    tensor = entry.tensor
    what = (entry.name, tensor.dtype, tuple(tensor.shape), tensor.device)
    return (*what, entry.gate, entry.at_cut, entry.common, entry.box)


def device_of(bucket: Bucket) -> torch.device:
    return bucket.shares[0].entry.tensor.device


def make_lane(device: torch.device) -> Lane:
    word = torch.zeros(1, dtype=torch.int32)
    return Lane(
        stream=torch.cuda.Stream(device),
        cut=torch.cuda.Event(blocking=True),
        end=torch.cuda.Event(blocking=True),
        turnstile=(word.to(device), word.pin_memory()),
    )


def _gates(groups: list[Bucket]) -> dict[int, list[int]]:
    last: dict[int, dict[torch.device, int]] = {}
    for index, bucket in enumerate(groups):
        for optimizer in bucket.gates:
            last.setdefault(optimizer, {})[device_of(bucket)] = index
    return {optimizer: sorted(by_device.values()) for optimizer, by_device in last.items()}


def group_alike(targets: list[Tensor], shares: list[Share]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Lists of one device and dtype each, since only such are copied by one kernel."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, item in zip(targets, shares, strict=True):
        into, sources = groups.setdefault((target.device, target.dtype), ([], []))
        into.append(target)
        sources.append(item.source())
    return list(groups.values())


# -- places


def view_in(flat: Tensor, item: Share, places: dict[str, Piece], base: int) -> Tensor:
    """Where a share's rows lie in memory that begins at image offset -base."""
    piece = places[item.entry.name]
    begin = base + piece.offset
    whole = shaped(flat[begin : begin + piece.length].view(TORCH_DTYPES[piece.dtype]), piece)
    first = item.first + item.entry.start[0] - piece.start[0] if piece.start else 0
    return whole if not piece.extent or item.rows == piece.extent[0] else whole.narrow(0, first, item.rows)


def place_in(runs: dict[torch.device, list[Run]], item: Share, places: dict[str, Piece], base: int) -> Tensor:
    begin = base + places[item.entry.name].offset
    run = next(r for r in runs[item.entry.tensor.device] if r.begin <= begin < max(r.end, r.begin + 1))
    return view_in(run.memory, item, places, base - run.begin)


def make_runs(shares: Iterable[Share], places: dict[str, Piece], base: int) -> dict[torch.device, list[Run]]:
    """Spare device memory for pieces that are gathered, joined where they are neighbours in the image."""
    spans: dict[torch.device, list[list[int]]] = {}
    for item in sorted(shares, key=lambda s: places[s.entry.name].offset):
        piece = places[item.entry.name]
        begin, end = base + piece.offset, base + piece.offset + piece.length
        known = spans.setdefault(item.entry.tensor.device, [])
        if known and known[-1][1] == begin:
            known[-1][1] = end
        else:
            known.append([begin, end])
    return {
        device: [Run(a, b, torch.empty(b - a, dtype=torch.uint8, device=device)) for a, b in found]
        for device, found in spans.items()
    }


# -- the device's side


@contextmanager
def on_side(lanes: dict[torch.device, Lane]) -> Iterator[None]:
    """All side streams current, for the copies of one image."""
    with ExitStack() as streams:
        for lane in lanes.values():
            streams.enter_context(torch.cuda.stream(lane.stream))
        yield
