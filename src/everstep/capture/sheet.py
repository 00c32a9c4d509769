"""An image that is filled piece by piece, on the stream of whoever has the piece, and then drained into a slot.

Host pieces go straight into the slot. Pieces of a device go into spare memory there, which costs the training thread
no more than a copy inside the device, and leave it by the copier thread, as bases do. Spare memory is free for
the next image once the one before has left it: `await_drain`.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from everstep.capture.arena import Arena
from everstep.capture.copier import Copier
from everstep.capture.pinned import pin
from everstep.capture.shape import Lane, Run, make_lane, make_runs, place_in, view_in
from everstep.capture.shares import Share
from everstep.events import Sink
from everstep.image import ImageLayout, lay_out
from everstep.types import ImageInfo, Piece


def lay_out_sheet(shares: Sequence[Share], info: ImageInfo, extras_bytes: int) -> ImageLayout:
    """Neighbours on a device stay neighbours in the image, so that they leave in few runs."""
    ordered = sorted(shares, key=lambda item: str(item.entry.tensor.device))
    return lay_out([item.wanted() for item in ordered], info, extras_bytes)


@dataclass(slots=True)
class Sheet:
    layout: ImageLayout
    arena: Arena
    flats: list[Tensor]  # the slots
    runs: dict[torch.device, list[Run]]
    lanes: dict[torch.device, Lane]
    drained: dict[torch.device, torch.cuda.Event]
    launched: bool = True  # whether the copies of the image before are on their way
    early: list[tuple[int, int]] = field(default_factory=list)  # bytes of the present image that have left already
    _pieces: dict[str, Piece] = field(default_factory=dict)

    @classmethod
    def make(cls, shares: Sequence[Share], layout: ImageLayout, arena: Arena) -> Sheet:
        pieces = {piece.name: piece for piece in layout.pieces}
        runs = make_runs([s for s in shares if s.entry.tensor.is_cuda], pieces, len(layout.header))
        return cls(
            layout=layout,
            arena=arena,
            flats=[torch.frombuffer(slot, dtype=torch.uint8) for slot in arena.slots],
            runs=runs,
            lanes={device: make_lane(device) for device in runs},
            drained={device: torch.cuda.Event() for device in runs},
            _pieces=pieces,
        )

    @property
    def leaves_later(self) -> bool:
        """Whether a cut leaves anything for the copier thread to do."""
        return bool(self.lanes)

    def targets(self, item: Share) -> list[Tensor]:
        """Where a piece goes, for every slot; the same for all of them where it lies on a device."""
        base = len(self.layout.header)
        if item.entry.tensor.is_cuda:
            return [place_in(self.runs, item, self._pieces, base)] * len(self.flats)
        return [view_in(flat, item, self._pieces, base) for flat in self.flats]

    def await_drain(self, copier: Copier) -> None:
        """The training thread: spare memory may be written again, as far as the current streams are concerned."""
        if not self.lanes:
            return
        if not self.launched:
            with copier.changed:
                copier.changed.wait_for(lambda: self.launched)
        for device, event in self.drained.items():
            torch.cuda.current_stream(device).wait_event(event)

    def mark_cut(self) -> list[tuple[int, int]]:
        """The training thread: all of this image is on the current streams. What has left early, for `drain`."""
        self.launched = not self.lanes
        for device, lane in self.lanes.items():
            lane.cut.record(torch.cuda.current_stream(device))
        early, self.early = self.early, []
        return early

    def drain_early(self, slot: int, targets: Sequence[Tensor], copier: Copier) -> None:
        """Some pieces are in spare memory, by the current streams, before the others are: let them leave it now."""
        spans: dict[torch.device, list[tuple[int, int]]] = {}
        for target in targets:
            if target.is_cuda and target.numel():
                begin = self._offset(target)
                spans.setdefault(target.device, []).append((begin, begin + target.nbytes))
        for device, some in spans.items():
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(device))
            merged = _merged(some)
            copier.submit(partial(self._leave, device, slot, merged, ready))
            self.early += merged

    def _offset(self, target: Tensor) -> int:
        """Where a piece in spare memory lies in the image."""
        for run in self.runs[target.device]:
            at = target.data_ptr() - run.memory.data_ptr()
            if 0 <= at < run.end - run.begin:
                return run.begin + at
        raise AssertionError("not a piece of this sheet")

    def _leave(
        self, device: torch.device, slot: int, spans: list[tuple[int, int]], ready: torch.cuda.Event | None = None
    ) -> None:
        """The copier thread: copy some bytes of spare memory into the slot."""
        lane, flat = self.lanes[device], self.flats[slot]
        with torch.cuda.stream(lane.stream):
            if ready is not None:
                lane.stream.wait_event(ready)
            for run in self.runs[device]:
                for begin, end in spans:
                    run.leave(lane, flat, begin, end)

    def launch(self, slot: int, early: list[tuple[int, int]], copier: Copier) -> float:
        """The copier thread: everything towards the slot that has not left early. Returns when that began."""
        try:
            for lane in self.lanes.values():
                lane.cut.synchronize()
            began = time.perf_counter()
            for device, runs in self.runs.items():
                self._leave(device, slot, _without([(run.begin, run.end) for run in runs], early))
                self.drained[device].record(self.lanes[device].stream)
        finally:
            with copier.changed:
                self.launched = True
                copier.changed.notify_all()
        return began

    def finish(self, slot: int, payload: bytes) -> None:
        """The copier thread: the image in the slot is whole."""
        begin, flat = self.layout.extras_offset, self.flats[slot]
        room = struct.pack("<Q", len(payload)) + payload
        flat[begin : begin + len(room)] = torch.frombuffer(bytearray(room), dtype=torch.uint8)
        for lane in self.lanes.values():
            lane.drain()

    def pin(self, emit: Sink) -> bool:
        """Until it is closed; whether all that a device copies into could be."""
        return not self.lanes or pin(self.arena.slots, self.lanes, emit)

    def close(self) -> None:
        self.arena.unpin()


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours joined, in order."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _without(spans: list[tuple[int, int]], gone: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is left of some spans."""
    left: list[tuple[int, int]] = []
    holes = _merged(gone)
    for begin, end in spans:
        for low, high in holes:
            if low < end and high > begin:
                if begin < low:
                    left.append((begin, low))
                begin = max(begin, high)
        if begin < end:
            left.append((begin, end))
    return left
