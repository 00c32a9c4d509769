"""The compressors a user can choose: a gradient in a hundredth, a quarter or half of its bytes.

    TopK(ratio=0.01)    the largest elements of a buffer, by magnitude; 6 to 8 bytes each
    Int8()              8 bits an element, with a scale for every 256
    Bf16()              the upper half of an fp32
    PowerSGD(rank=1)    torch's low-rank approximation of every matrix

Each is a deterministic function of its state and its inputs, on CPU and on CUDA, and never makes the host wait for
the device (PowerSGD does, because torch's own does).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from everstep.capture.compressor import Compressor, communication_hook, gather, size_of
from everstep.capture.powersgd import PowerSGD
from everstep.errors import BadConfig

__all__ = ["Bf16", "Compressor", "Int8", "PowerSGD", "TopK", "communication_hook"]

_BLOCK = 256  # elements that share a scale


class TopK(Compressor):
    """Keeps the largest elements of the sum over ranks.

    Every rank sends its own k largest; the k largest of what was sent are kept, the same on every rank. What a rank
    sent in vain goes back into its residual. So the packed form has k entries, however many ranks there are: `indices`
    in rising order and their `values`.
    """

    def __init__(self, ratio: float = 0.01) -> None:
        super().__init__()
        if not 0 < ratio <= 1:
            raise BadConfig(f"ratio is the part of the elements to keep, above 0 and at most 1; it is {ratio}")
        self.ratio = ratio

    def _compress(
        self, total: Tensor, flat: Tensor, key: str, group: ProcessGroup | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        k = max(1, round(self.ratio * total.numel()))
        magnitude = torch.abs(total, out=flat) if flat.dtype == total.dtype else total.abs()
        chosen = torch.topk(magnitude, k, sorted=False).indices.sort().values
        ours = total[chosen]
        values = ours.to(flat.dtype)
        short = torch.int32 if total.numel() < 2**31 else torch.int64
        if group is None or group.size() == 1:
            total[chosen] = ours - values
            return {"indices": chosen.to(short), "values": values}, total
        kept, merged = _merge(gather(chosen.to(short), group).long(), gather(values, group).to(total.dtype))
        place = torch.searchsorted(kept, chosen).clamp_(max=k - 1)
        total[chosen] = torch.where(kept[place] == chosen, ours - values, ours)
        return {"indices": kept.to(short), "values": (merged / group.size()).to(flat.dtype)}, total

    def _witness(self, packed: Mapping[str, Tensor], flat: Tensor) -> Tensor:
        return packed["values"]  # what is not finite is the largest: each rank sends it, and it is kept

    @classmethod
    def unpack(cls, packed: Mapping[str, Tensor], into: Tensor) -> None:
        into.zero_()
        into[packed["indices"].long()] = packed["values"]

    @classmethod
    def unpack_rows(cls, packed: Mapping[str, Tensor], first: int, count: int, like: Tensor) -> Tensor:
        bounds = torch.tensor([first, first + count], dtype=packed["indices"].dtype)
        low, high = torch.searchsorted(packed["indices"], bounds).tolist()
        rows = torch.zeros(count, dtype=like.dtype)
        rows[packed["indices"][low:high].long() - first] = packed["values"][low:high]
        return rows


def _merge(indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The k elements with the largest sums over ranks, by rising index; of equals those with the lowest index.

    Sums are made rank after rank, each with indices that differ: adding them at once has no fixed order on CUDA.
    """
    k = indices.shape[1]
    places = indices.flatten().sort().values
    sums = values.new_zeros(places.shape)
    for index, value in zip(indices, values, strict=True):
        sums.index_add_(0, torch.searchsorted(places, index), value)
    magnitude = sums.abs()
    magnitude[1:].masked_fill_(places[1:] == places[:-1], -1.0)  # the sum stands at the first of equal indices
    best = magnitude.sort(descending=True, stable=True).indices[:k].sort().values
    return places[best], sums[best]


class Int8(Compressor):
    """Rounds to 8 bits with a scale for every block.

    Each rank averages its slice of the buffer from what the others sent it, rounds the average again, and sends that
    to all: the packed `values` and `scales`. What the second rounding loses goes into the residual of the rank that
    rounded, as many times over as there are ranks, since its next gradient is divided by that number.
    A block with NaN or Inf becomes NaN as a whole.
    """

    def _compress(
        self, total: Tensor, flat: Tensor, key: str, group: ProcessGroup | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        n, world = total.numel(), size_of(group)
        share = -(-n // (world * _BLOCK))
        blocks = torch.nn.functional.pad(total, (0, share * world * _BLOCK - n)).view(world, share, _BLOCK)
        values, scales = _quantise(blocks)
        if group is None or world == 1:
            lost = blocks - (values * scales).to(flat.dtype)
        else:
            lost = blocks - values * scales
            received, their_scales = torch.empty_like(values), torch.empty_like(scales)
            dist.all_to_all_single(received, values, group=group)
            dist.all_to_all_single(their_scales, scales, group=group)
            mean = (received * their_scales).mean(0)
            values, scales = _quantise(mean)
            lost[group.rank()].add_(mean - (values * scales).to(flat.dtype), alpha=world)
            values, scales = gather(values, group), gather(scales, group)
        return {"values": values.flatten()[:n], "scales": scales.flatten()[: -(-n // _BLOCK)]}, lost.flatten()[:n]

    @classmethod
    def unpack(cls, packed: Mapping[str, Tensor], into: Tensor) -> None:
        values, scales = packed["values"], packed["scales"]
        whole = values.numel() // _BLOCK
        cut = whole * _BLOCK
        torch.mul(values[:cut].view(whole, _BLOCK), scales[:whole, None], out=into[:cut].view(whole, _BLOCK))
        torch.mul(values[cut:], scales[whole:], out=into[cut:])

    @classmethod
    def unpack_rows(cls, packed: Mapping[str, Tensor], first: int, count: int, like: Tensor) -> Tensor:
        block, last = first // _BLOCK, -(-(first + count) // _BLOCK)
        some = {"values": packed["values"][block * _BLOCK : last * _BLOCK], "scales": packed["scales"][block:last]}
        rows = torch.empty(some["values"].numel(), dtype=like.dtype)
        cls.unpack(some, rows)
        return rows[first - block * _BLOCK :][:count]


def _quantise(blocks: Tensor) -> tuple[Tensor, Tensor]:
    low, high = torch.aminmax(blocks, dim=-1, keepdim=True)
    scales = torch.maximum(high, -low) / 127
    values = (blocks / scales).nan_to_num_(nan=0.0).round_().clamp_(-127, 127)
    return values.to(torch.int8), scales


class Bf16(Compressor):
    """Averages in bf16; the rounding of each rank's own part is fed back, that of the sum is not known to anyone."""

    def _compress(
        self, total: Tensor, flat: Tensor, key: str, group: ProcessGroup | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        world = size_of(group)
        values = (total / world).to(torch.bfloat16)
        lost = total.sub_(values, alpha=world)
        if group is not None:
            dist.all_reduce(values, group=group)
        return {"values": values}, lost

    @classmethod
    def unpack(cls, packed: Mapping[str, Tensor], into: Tensor) -> None:
        into.copy_(packed["values"])

    @classmethod
    def unpack_rows(cls, packed: Mapping[str, Tensor], first: int, count: int, like: Tensor) -> Tensor:
        return packed["values"][first : first + count].to(like.dtype)
