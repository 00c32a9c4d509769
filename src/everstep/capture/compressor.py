"""What every gradient compressor promises, and how DDP calls it.

A compressor replaces the average of a gradient buffer over the ranks by something smaller, and gives back the small
form. All ranks end with the same bits in the buffer, and those bits come back from the small form alone.

Error feedback: what a rank could not get across stays with it as a residual and is added to its next gradient. The
residual is training state of the rank. It is kept per parameter, so that it follows the parameter when DDP rebuilds
its buckets and when a run is resumed with other buckets.

A gradient with NaN or Inf leaves all residuals as they were: the buffer becomes non-finite on every rank, so that a
scaler or the loop can skip the step, and nothing of that gradient is remembered.

Residuals have the unit of the buffer. Under a GradScaler they are scaled gradients; when the scale changes, what they
hold counts by the old scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from everstep.capture.bits import cut_up
from everstep.errors import BadConfig, Mismatch

Owner = int | str  # of a residual: the id of a parameter, or the key of a buffer whose parameters nobody told
Hook = Callable[[object, dist.GradBucket], torch.futures.Future[Tensor]]

_RESIDUAL, _BUCKETS, _PASSES = "residual.", "buckets", "passes"


class Compressor(ABC):
    """Averages flat buffers lossily; `packed` holds what the buffers of this step became, in order."""

    def __init__(self) -> None:
        self.packed: dict[str, tuple[list[Tensor], dict[str, Tensor]]] = {}
        self.passes = 0  # backward passes of the run that DDP has reduced
        self.settled: dict[str, list[int]] = {}  # the buckets to reduce by, as ids of parameters, once DDP has them
        self._names: dict[int, str] = {}
        self._parameters: dict[str, list[Tensor]] = {}
        self._holder: dict[int, str] = {}  # which buffer holds a parameter's residual
        self._residuals: dict[str, Tensor] = {}
        self._loose: dict[Owner, Tensor] = {}  # residuals that no buffer holds now
        self._placed: tuple[list[Owner], dict[str, list[int]], Tensor] | None = (
            None  # who is where, as it was told last
        )

    @abstractmethod
    def _compress(
        self, total: Tensor, flat: Tensor, key: str, group: ProcessGroup | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The packed average of `total`, and what of `total` this rank must send again; both buffers may be used up."""

    @classmethod
    @abstractmethod
    def unpack(cls, packed: Mapping[str, Tensor], into: Tensor) -> None:
        """Fill `into` with the very bits that the buffer had after `reduce`."""

    @classmethod
    def unpack_rows(cls, packed: Mapping[str, Tensor], first: int, count: int, like: Tensor) -> Tensor:
        """Some elements of a buffer, with the bits that `unpack` gives. `like`: such a buffer; its content is lost."""
        cls.unpack({name: value.to(like.device) for name, value in packed.items()}, like)
        return like[first : first + count].cpu()

    @torch.no_grad()
    def reduce(self, flat: Tensor, key: str, group: ProcessGroup | None) -> dict[str, Tensor]:
        """Average `flat` over the group in place, lossily, and return the packed form, the same on every rank.

        Without a group nothing is sent, and the buffer still becomes what the packed form can hold.
        """
        residual = self._residual(key, flat)
        packed, lost = self._compress(residual + flat, flat, key, group)
        self.unpack(packed, flat)
        # a choice made on the device, so that the host does not wait for it
        torch.where(finite(self._witness(packed, flat)), lost, residual, out=residual)
        return packed

    def _witness(self, packed: Mapping[str, Tensor], flat: Tensor) -> Tensor:
        """What is finite if and only if the averaged buffer is."""
        return flat

    def begin_step(self) -> None:
        self.packed.clear()

    def bind(self, names: Mapping[int, str]) -> None:
        """Say the full names of parameters, by their id(); state() and load() need them."""
        self._names, self._placed = dict(names), None

    def lay_out(self, key: str, parameters: Sequence[Tensor]) -> None:
        """Say which parameters' gradients make up the buffer `key`, in order; residuals move to where they belong."""
        known = self._parameters.get(key)
        if known is not None and len(known) == len(parameters) and all(map(_is, known, parameters)):
            return
        holders = {self._holder[id(parameter)] for parameter in parameters if id(parameter) in self._holder}
        for other in holders | ({key} if known is not None else set()):
            self._loosen(other)
        if key in self._residuals:
            raise BadConfig(f"buffer {key!r} was reduced before its parameters were told; call lay_out() first")
        self._parameters[key] = list(parameters)
        self._holder.update((id(parameter), key) for parameter in parameters)

    def _loosen(self, key: str) -> None:
        parameters = self._parameters.pop(key)
        pieces = cut_up(self._residuals.pop(key), parameters) if key in self._residuals else ()
        self._loose.update(zip(map(id, parameters), pieces, strict=False))
        for parameter in parameters:
            del self._holder[id(parameter)]

    def _residual(self, key: str, flat: Tensor) -> Tensor:
        held = self._residuals.get(key)
        if held is None:
            sizes: dict[Owner, int] = {id(parameter): parameter.numel() for parameter in self._parameters.get(key, ())}
            dtype = torch.promote_types(flat.dtype, torch.float32)  # bf16 would swallow what is added up slowly
            pieces = []
            for owner, size in (sizes or {key: flat.numel()}).items():
                piece = self._loose.pop(owner, None)
                pieces.append(
                    torch.zeros(size, dtype=dtype, device=flat.device)
                    if piece is None
                    else piece.to(device=flat.device, dtype=dtype)
                )
            held = self._residuals[key] = torch.cat(pieces)
        if held.numel() != flat.numel():
            raise BadConfig(f"buffer {key!r} has {flat.numel()} elements and what is known of it has {held.numel()}")
        return held

    def state(self) -> dict[str, Tensor]:
        """What this rank must not lose, by stable names."""
        return self.large() | self.small()

    def large(self) -> dict[str, Tensor]:
        """The part that is about as large as the gradients: views of the live one."""
        held: dict[Owner, Tensor] = dict(self._loose)
        for key, residual in self._residuals.items():
            parameters = self._parameters.get(key)
            pieces = [residual] if parameters is None else cut_up(residual, parameters)
            held.update(zip(self._owners(key), pieces, strict=True))
        return {_RESIDUAL + self._name(owner): residual for owner, residual in held.items()}

    def small(self) -> dict[str, Tensor]:
        """The rest, which is asked for in every step."""
        owners = [*self._loose, *(owner for key in self._residuals for owner in self._owners(key))]
        if self._placed is None or self._placed[:2] != (owners, self.settled):
            settled = {key: list(found) for key, found in self.settled.items()}
            self._placed = (owners, settled, self._places(owners))
        return {_BUCKETS: self._placed[2], _PASSES: torch.tensor(self.passes)}

    def _owners(self, key: str) -> Sequence[Owner]:
        """Whose residuals a buffer has, in order."""
        parameters = self._parameters.get(key)
        return [key] if parameters is None else list(map(id, parameters))

    def _places(self, owners: Sequence[Owner]) -> Tensor:
        """Which bucket each is reduced in, and where; in the order of their names."""
        where: dict[Owner, tuple[int, int]] = {
            owner: (int(key), i) for key, found in self.settled.items() for i, owner in enumerate(found)
        }
        places = [where.get(owner, (-1, 0)) for owner in sorted(owners, key=self._name)]
        return torch.tensor(places, dtype=torch.int64).view(-1, 2)

    def holders(self) -> list[dict[Any, Tensor]]:
        """Where the large part lives, for whoever watches whether it was replaced."""
        return [self._residuals, self._loose]

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the place of the compressor that gave this state; bind() comes first."""
        owners = {name: owner for owner, name in self._names.items()}
        held = {name.removeprefix(_RESIDUAL): t for name, t in state.items() if name.startswith(_RESIDUAL)}
        self._parameters, self._holder, self._residuals, self.settled = {}, {}, {}, {}
        self._loose = {owners.get(name, name): residual.clone().flatten() for name, residual in held.items()}
        self.passes = int(state[_PASSES])
        rows = state[_BUCKETS].tolist()
        if len(rows) != len(held):
            raise Mismatch(f"the compressor's state has {len(held)} residuals and places for {len(rows)}")
        for (bucket, _), name in sorted(zip(rows, sorted(held), strict=True)):
            if bucket >= 0 and name not in owners:
                raise Mismatch(f"the compressor's state has a residual for {name}, which is no parameter here")
            if bucket >= 0:
                self.settled.setdefault(str(bucket), []).append(owners[name])

    def _name(self, owner: Owner) -> str:
        if isinstance(owner, str):
            return owner
        if owner not in self._names:
            raise BadConfig("a compressed parameter has no name; call bind() with the names of all parameters")
        return self._names[owner]


def finite(tensor: Tensor) -> Tensor:
    """Whether all of it is finite, as a tensor: one pass, no copy, no waiting host."""
    low, high = torch.aminmax(tensor)
    return low.isfinite() & high.isfinite()


def size_of(group: ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def gather(mine: Tensor, group: ProcessGroup) -> Tensor:
    """Every rank's tensor, stacked in the order of ranks."""
    everyone = mine.new_empty((group.size(), *mine.shape))
    dist.all_gather(list(everyone.unbind()), mine, group=group)
    return everyone


def _is(one: object, other: object) -> bool:
    return one is other


# -- under DDP


def communication_hook(compressor: Compressor, group: ProcessGroup | None = None) -> Hook:
    """For `ddp.register_comm_hook(None, communication_hook(compressor, group))`; no group means all ranks.

    What a compressor makes of a gradient depends on the buckets, and DDP finds its final ones only after the first
    backward pass of each process. So that a resumed run ends with the same bits, the first two passes of a run go by
    DDP's first buckets, and all others by its final ones, known from the second pass on. Where DDP's own differ, they
    are held back until all are there.
    """
    tap = _Tap(compressor, group or dist.group.WORLD)

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return tap.take(bucket)

    hook.__annotations__ = {"bucket": dist.GradBucket}  # DDP compares it, and not as a string
    return hook


class _Tap:
    """Where DDP's buckets arrive, one after the other, in every backward pass of one process."""

    def __init__(self, compressor: Compressor, group: ProcessGroup | None) -> None:
        self._compressor, self._group = compressor, group
        self._first: dict[str, list[int]] = {}  # the buckets of this process's first pass
        self._seen: dict[str, list[int]] = {}  # those of this pass
        self._held: list[tuple[Tensor, list[Tensor], torch.futures.Future[Tensor]]] = []

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        flat, parameters, key = bucket.buffer(), bucket.parameters(), str(bucket.index())
        answer: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
        wanted = self._first if self._compressor.passes < 2 else self._compressor.settled
        self._seen[key] = [id(parameter) for parameter in parameters]
        if not wanted or wanted.get(key) == self._seen[key]:
            self._reduce(flat, key, parameters)
            answer.set_result(flat)
        else:
            self._held.append((flat, parameters, answer))
        if bucket.is_last():
            if self._held:
                self._regroup(wanted)
            self._end_pass()
        return answer

    def _reduce(self, flat: Tensor, key: str, parameters: list[Tensor]) -> None:
        self._compressor.lay_out(key, parameters)
        self._compressor.packed[key] = (parameters, self._compressor.reduce(flat, key, self._group))

    def _regroup(self, wanted: Mapping[str, list[int]]) -> None:
        """Reduce the buckets that were held back as the buckets that were wanted."""
        missing = {key: ids for key, ids in wanted.items() if self._seen.get(key) != ids}
        gradients = {
            id(parameter): (parameter, piece)
            for flat, parameters, _ in self._held
            for parameter, piece in zip(parameters, cut_up(flat, parameters), strict=True)
        }
        if gradients.keys() != {owner for ids in missing.values() for owner in ids}:
            raise Mismatch("DDP reduces other parameters than the run that is resumed; is the same part of it frozen?")
        for key, ids in missing.items():
            pieces = [gradients[owner][1] for owner in ids]
            flat = torch.cat(pieces)
            self._reduce(flat, key, [gradients[owner][0] for owner in ids])
            torch._foreach_copy_(pieces, list(flat.split([piece.numel() for piece in pieces])))
        for flat, _, answer in self._held:
            answer.set_result(flat)
        self._held.clear()

    def _end_pass(self) -> None:
        if not self._first:
            self._first = self._seen
        elif not self._compressor.settled:
            self._compressor.settled = self._seen
        self._seen = {}
        self._compressor.passes += 1
