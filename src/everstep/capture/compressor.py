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

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from everstep.errors import BadConfig, Mismatch

Owner = int | str  # of a residual: the id of a parameter, or the key of a buffer whose parameters nobody told
Hook = Callable[[object, dist.GradBucket], torch.futures.Future[Tensor]]

_RESIDUAL, _BUCKETS = "residual.", "buckets"


class Compressor(ABC):
    """Averages flat buffers lossily; `packed` holds what the buffers of this step became, in order."""

    def __init__(self) -> None:
        self.packed: dict[str, tuple[list[Tensor], dict[str, Tensor]]] = {}
        self.resumed: dict[str, list[int]] = {}  # the buckets of the life before, as ids of their parameters
        self._names: dict[int, str] = {}
        self._parameters: dict[str, list[Tensor]] = {}
        self._holder: dict[int, str] = {}  # which buffer holds a parameter's residual
        self._residuals: dict[str, Tensor] = {}
        self._loose: dict[Owner, Tensor] = {}  # residuals that no buffer holds now

    @abstractmethod
    def _compress(
        self, total: Tensor, flat: Tensor, key: str, group: ProcessGroup | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The packed average of `total`, and what of `total` this rank must send again; both buffers may be used up."""

    @classmethod
    @abstractmethod
    def unpack(cls, packed: Mapping[str, Tensor], into: Tensor) -> None:
        """Fill `into` with the very bits that the buffer had after `reduce`."""

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
        self._names = dict(names)

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
        pieces = _cut(self._residuals.pop(key), parameters) if key in self._residuals else ()
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
        """What this rank must not lose, by stable names; residuals are views of the live ones."""
        held: dict[Owner, Tensor] = dict(self._loose)
        where: dict[Owner, tuple[int, int]] = {}
        for key, residual in self._residuals.items():
            parameters = self._parameters.get(key)
            if parameters is None:
                held[key] = residual
                continue
            held.update(zip(map(id, parameters), _cut(residual, parameters), strict=True))
            if key.isdecimal():
                where.update((id(parameter), (int(key), i)) for i, parameter in enumerate(parameters))
        found = {self._name(owner): owner for owner in held}
        if not found:
            return {}
        buckets = torch.tensor([where.get(found[name], (-1, 0)) for name in sorted(found)], dtype=torch.int64)
        return {_RESIDUAL + name: held[owner] for name, owner in found.items()} | {_BUCKETS: buckets}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the place of the compressor that gave this state; bind() comes first."""
        owners = {name: owner for owner, name in self._names.items()}
        held = {name.removeprefix(_RESIDUAL): t for name, t in state.items() if name.startswith(_RESIDUAL)}
        self._parameters, self._holder, self._residuals, self.resumed = {}, {}, {}, {}
        self._loose = {owners.get(name, name): residual.clone().flatten() for name, residual in held.items()}
        if not held:
            return
        rows = state[_BUCKETS].tolist()
        if len(rows) != len(held):
            raise Mismatch(f"the compressor's state has {len(held)} residuals and places for {len(rows)}")
        for (bucket, _), name in sorted(zip(rows, sorted(held), strict=True)):
            if bucket >= 0 and name not in owners:
                raise Mismatch(f"the compressor's state has a residual for {name}, which is no parameter here")
            if bucket >= 0:
                self.resumed.setdefault(str(bucket), []).append(owners[name])

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


def _cut(flat: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = flat.split([parameter.numel() for parameter in parameters])
    return pieces


# -- under DDP


def communication_hook(compressor: Compressor, group: ProcessGroup | None = None) -> Hook:
    """For `ddp.register_comm_hook(None, communication_hook(compressor, group))`; no group means all ranks.

    What a compressor makes of a gradient depends on the buckets, and DDP finds its final buckets only after the first
    backward pass of a process. A resumed run therefore goes on with the buckets it had: as long as DDP's own differ,
    their gradients are held back until all are there, and reduced as before.
    """
    group = group or dist.group.WORLD
    back: list[tuple[Tensor, list[Tensor], torch.futures.Future[Tensor]]] = []
    done: set[str] = set()

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        flat, parameters, key = bucket.buffer(), bucket.parameters(), str(bucket.index())
        answer: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
        before = compressor.resumed
        if not before or before.get(key) == [id(parameter) for parameter in parameters]:
            _reduce(compressor, flat, key, parameters, group)
            answer.set_result(flat)
            done.add(key)
        else:
            back.append((flat, parameters, answer))
        if bucket.is_last():
            _regroup(compressor, back, {key: ids for key, ids in before.items() if key not in done}, group)
            back.clear()
            done.clear()
        return answer

    hook.__annotations__ = {"bucket": dist.GradBucket}  # DDP compares it, and not as a string
    return hook


def _reduce(
    compressor: Compressor, flat: Tensor, key: str, parameters: list[Tensor], group: ProcessGroup | None
) -> None:
    compressor.lay_out(key, parameters)
    compressor.packed[key] = (parameters, compressor.reduce(flat, key, group))


def _regroup(
    compressor: Compressor,
    held: Sequence[tuple[Tensor, list[Tensor], torch.futures.Future[Tensor]]],
    before: Mapping[str, list[int]],
    group: ProcessGroup | None,
) -> None:
    """Reduce the buckets that were held back as the buckets that were there before."""
    gradients = {
        id(parameter): (parameter, piece)
        for flat, parameters, _ in held
        for parameter, piece in zip(parameters, _cut(flat, parameters), strict=True)
    }
    if gradients.keys() != {owner for ids in before.values() for owner in ids} and held:
        raise Mismatch("DDP reduces other parameters than the run that is resumed; is the same part of it frozen?")
    for key, ids in before.items() if held else ():
        pieces = [gradients[owner][1] for owner in ids]
        flat = torch.cat(pieces)
        _reduce(compressor, flat, key, [gradients[owner][0] for owner in ids], group)
        torch._foreach_copy_(pieces, list(flat.split([piece.numel() for piece in pieces])))
    for flat, _, answer in held:
        answer.set_result(flat)
