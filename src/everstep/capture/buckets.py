"""Which pieces are copied and gated as one, and in which order: as the optimizers will overwrite them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from everstep.capture.shares import Share

# By the kind of device. A bucket of the host is copied before its gate opens, one of a device is only queued by then,
# and each takes the interpreter from the loop.
BUCKET_BYTES = {"cpu": 8 << 20, "cuda": 128 << 20}
PASSING_BYTES = 32 << 20  # that are copied off a device at once: so much may be in front of a copy of the loop itself


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some megabytes that are copied and gated as one."""

    shares: tuple[Share, ...]
    gates: frozenset[int]  # the optimizers that must not step before it is copied


def buckets(shares: Sequence[Share], order: Sequence[int], optimizers: int) -> list[Bucket]:
    """Pieces in the order in which their optimizers step, what lies on the host first; what no optimizer has last.

    The last ones may still be written by the loop, after an update (an average of the weights, a target network), so
    every optimizer waits for them.
    """
    place = {optimizer: i for i, optimizer in enumerate(order)}

    def turn(item: Share) -> int:
        gate = item.entry.gate
        return len(place) + 1 if gate is None else place.get(gate, len(place))

    by_device: dict[torch.device, list[Share]] = {}
    for item in sorted((s for s in shares if not s.entry.at_cut and s.bytes), key=turn):
        device = item.entry.tensor.device
        by_device.setdefault(device, []).extend(item.chunks(min(PASSING_BYTES, BUCKET_BYTES[device.type])))
    devices = sorted(by_device, key=lambda device: (device.type != "cpu", str(device)))
    return [
        bucket for device in devices for bucket in _packed(by_device[device], optimizers, BUCKET_BYTES[device.type])
    ]


def _packed(shares: list[Share], optimizers: int, most: int) -> Iterator[Bucket]:
    current: list[Share] = []
    size = 0
    for item in shares:
        if current and size + item.bytes > most:
            yield _bucket(current, optimizers)
            current, size = [], 0
        current.append(item)
        size += item.bytes
    if current:
        yield _bucket(current, optimizers)


def _bucket(shares: list[Share], optimizers: int) -> Bucket:
    gates = {s.entry.gate for s in shares}
    everyone = frozenset(range(optimizers))
    return Bucket(tuple(shares), everyone if None in gates else frozenset(g for g in gates if g is not None))
