"""An image that is filled piece by piece, on the stream of whoever has the piece, and then drained into a slot.

Host pieces go straight into the slot. Pieces of a device go into spare memory there, which costs the training thread
no more than a copy inside the device, and leave it by the copier thread, paced as bases are. Spare memory is free for
the next image once the one before has left it: `await_drain`.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from everstep.capture.arena import Arena
from everstep.capture.copier import Copier
from everstep.capture.layout import Share
from everstep.capture.shape import Lane, Run, make_lane, make_runs, on_side, place_in, unpin, view_in
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

    def mark_cut(self) -> None:
        """The training thread: everything that belongs to this image is on the current streams."""
        self.launched = not self.lanes
        for device, lane in self.lanes.items():
            lane.cut.record(torch.cuda.current_stream(device))

    def drain(self, slot: int, payload: bytes, copier: Copier) -> float:
        """The copier thread: everything into the slot. Returns the seconds that it took."""
        flat = self.flats[slot]
        try:
            for lane in self.lanes.values():
                lane.cut.synchronize()
            began = time.perf_counter()
            with on_side(self.lanes):
                for device, runs in self.runs.items():
                    for target, source in (pair for run in runs for pair in run.chunks(flat)):
                        self.lanes[device].begin()
                        target.copy_(source, non_blocking=True)
                        self.lanes[device].end()
                    self.drained[device].record(self.lanes[device].stream)
        finally:
            with copier.changed:
                self.launched = True
                copier.changed.notify_all()
        begin = self.layout.extras_offset
        room = struct.pack("<Q", len(payload)) + payload
        flat[begin : begin + len(room)] = torch.frombuffer(bytearray(room), dtype=torch.uint8)
        for lane in self.lanes.values():
            lane.drain()
        return time.perf_counter() - began

    def close(self) -> None:
        if self.lanes:
            unpin(self.flats)
