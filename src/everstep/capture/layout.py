"""What the state is made of: every tensor by its full name, whose share it is, and in which bucket it travels.

`Subjects` holds the objects that a user gave to guard() and lists their tensors. `share` cuts common tensors among the
ranks, by rows, so that each rank copies about the same number of bytes; it is a function of the listing alone, so the
ranks need not talk. `buckets` groups pieces in the order in which the optimizers will overwrite them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from everstep.capture.compressor import Compressor
from everstep.errors import BadConfig, Unstorable
from everstep.image import Wanted
from everstep.types import OptimizerInfo, Piece

COMPRESSOR = "compressor."  # how the residuals of a gradient compressor are called

BUCKET_BYTES = 8 << 20  # on one H200 32 MB cost GPT-2 2.8 %, 8 MB 0.5 %: what is queued delays the loop

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of the state."""

    name: str
    tensor: Tensor
    gate: int | None  # the optimizer whose step overwrites it; None: if anybody, the loop, after a step
    at_cut: bool  # may change at any time after the cut, so it is copied in the cut
    common: bool  # the same on every rank
    family: str  # the parameter that it is, or that it is an optimizer's state of; else its own name


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of an entry that this rank keeps."""

    entry: Entry
    first: int
    rows: int

    def source(self, tensor: Tensor | None = None) -> Tensor:
        tensor = (self.entry.tensor if tensor is None else tensor).detach()
        return tensor if tensor.dim() == 0 or self.rows == tensor.shape[0] else tensor.narrow(0, self.first, self.rows)

    def wanted(self) -> Wanted:
        shape = tuple(self.entry.tensor.shape)
        start = (self.first, *(0,) * (len(shape) - 1)) if shape else ()
        extent = (self.rows, *shape[1:]) if shape else ()
        return Wanted(
            name=self.entry.name, dtype=DTYPES[self.entry.tensor.dtype], shape=shape, start=start, extent=extent,
            private=not self.entry.common, order=_order(self.entry.tensor),
        )  # fmt: skip

    def chunks(self) -> Iterator[Share]:
        """The same rows in shares of at most a bucket, as far as rows can be cut."""
        at_once = max(1, self.rows * BUCKET_BYTES // max(1, self.bytes))
        for first in range(self.first, self.first + self.rows, at_once):
            yield Share(self.entry, first, min(at_once, self.first + self.rows - first))

    @property
    def bytes(self) -> int:
        tensor = self.entry.tensor
        return tensor.nbytes if tensor.dim() == 0 else tensor.nbytes // max(1, tensor.shape[0]) * self.rows


def _order(tensor: Tensor) -> tuple[int, ...] | msgspec.UnsetType:
    """How the dimensions lie in memory, if otherwise than they are numbered: a copy in that order moves whole runs.

    Only where rows come first and nothing lies between: other tensors are put in order as they are copied.
    """
    if tensor.is_contiguous():
        return msgspec.UNSET
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda one: -strides[one])
    return tuple(order) if order[0] == 0 and tensor.permute(order).is_contiguous() else msgspec.UNSET


def shaped(elements: Tensor, piece: Piece) -> Tensor:
    """The elements of a piece, one after the other in memory, as the tensor that they are."""
    if piece.order is msgspec.UNSET:
        return elements.view(piece.extent)
    return elements.view(piece.stored).permute([piece.order.index(one) for one in range(len(piece.order))])


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes that DDP, compile and activation checkpointing put in."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper).replace("." + wrapper, ".")
    return name


def innermost(module: nn.Module) -> nn.Module:
    """The user's own module, without DDP and compile around it."""
    while isinstance(module, nn.parallel.DistributedDataParallel) or hasattr(module, "_orig_mod"):
        module = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module._orig_mod  # type: ignore[assignment]
    return module


def is_replicated(module: nn.Module) -> bool:
    while hasattr(module, "_orig_mod"):
        module = module._orig_mod  # type: ignore[assignment]
    return isinstance(module, nn.parallel.DistributedDataParallel)


def optimizer_name(index: int, count: int) -> str:
    """How one of so many optimizers is called."""
    return _numbered("optimizer", index, count)


def _numbered(name: str, index: int, count: int) -> str:
    return name if count == 1 else f"{name}.{index}"


@dataclass(slots=True)
class Listing:
    entries: list[Entry]
    aliases: dict[str, str]  # second names of tied tensors
    on_host: tuple[str, ...]  # optimizer state that lies on the host though its parameter does not
    unchanged: Callable[[], bool]  # whether the objects still hold these very tensors
    unchanged_at_cut: Callable[[], bool]  # the same, for those that are copied in the cut


@dataclass(slots=True, kw_only=True)
class Subjects:
    """The objects whose state is kept."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    scaler: Any = None
    compressor: Compressor | None = None
    modules: dict[str, nn.Module] = field(default_factory=dict)  # from extra=
    share: float | None = None  # of this rank in averages over all, where ranks have unequal parts of a batch

    def _named_optimizers(self) -> list[tuple[str, torch.optim.Optimizer]]:
        count = len(self.optimizers)
        return [(optimizer_name(i, count), optimizer) for i, optimizer in enumerate(self.optimizers)]

    def names(self) -> dict[int, str]:
        """The full name of every parameter, by its id."""
        found: dict[int, str] = {}
        for prefix, model in self.named_modules():
            for name, parameter in model.named_parameters(remove_duplicate=False):
                found.setdefault(id(parameter), f"{prefix}.{plain_name(name)}")
        for prefix, optimizer in self._named_optimizers():
            for g, group in enumerate(optimizer.param_groups):
                for i, parameter in enumerate(group["params"]):
                    found.setdefault(id(parameter), f"{prefix}.params.{g}.{i}")
        return found

    def optimizer_infos(self) -> tuple[OptimizerInfo, ...]:
        names = self.names()
        return tuple(
            OptimizerInfo(
                type=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
                groups=tuple(tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups),
            )
            for optimizer in self.optimizers
        )

    def named_modules(self) -> list[tuple[str, nn.Module]]:
        models = [(_numbered("model", i, len(self.models)), model) for i, model in enumerate(self.models)]
        return models + [(f"extra.{key}", module) for key, module in self.modules.items()]

    def listing(self) -> Listing:
        names = self.names()
        gate = {
            id(parameter): i
            for i, optimizer in enumerate(self.optimizers)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        entries: dict[int, Entry] = {}
        aliases: dict[str, str] = {}
        on_host: list[str] = []
        watch, at_cut = _Watch(), _Watch()

        def add(name: str, tensor: Tensor, holder: dict[Any, Any], key: Any, **how: Any) -> None:
            _check(name, tensor)
            (at_cut if how["at_cut"] else watch).add(holder, key, tensor)
            known = entries.get(id(tensor))
            if known is None:
                entries[id(tensor)] = Entry(name=name, tensor=tensor, family=how.pop("family", name), **how)
            elif known.name != name:
                aliases[name] = known.name

        common: dict[int, bool] = {}
        for prefix, model in self.named_modules():
            _list_module(prefix, model, gate, common, add, watch, at_cut)
        for i, (prefix, optimizer) in enumerate(self._named_optimizers()):
            watch.grows(optimizer.state)
            watch.grows(optimizer.param_groups)
            for group in optimizer.param_groups:
                watch.grows(group["params"])
            for name, parameter in _list_groups(prefix, optimizer, names, add):
                same = common.get(id(parameter), False)
                if id(parameter) not in common:
                    add(name, parameter, {"params": parameter}, "params", gate=i, at_cut=False, common=False)
                state = optimizer.state.get(parameter, {})
                watch.grows(state)
                watch.same(optimizer.state, parameter)
                for key, value in state.items():
                    if not isinstance(value, Tensor):
                        watch.plain(state, key)
                    else:
                        full = f"{prefix}.state.{name}.{key}"
                        if value.device != parameter.device:
                            on_host.append(full)
                        add(full, value, state, key, gate=i, at_cut=False, common=same, family=name)
        for key in ("_scale", "_growth_tracker") if self.scaler is not None else ():
            value = getattr(self.scaler, key, None)
            if isinstance(value, Tensor):
                add(f"scaler.{key}", value, vars(self.scaler), key, gate=None, at_cut=True, common=False)
            else:
                at_cut.plain(vars(self.scaler), key)  # a GradScaler makes its tensors when it is first used
        if self.compressor is not None:
            for holder in self.compressor.holders():
                at_cut.grows(holder)
                for key, tensor in holder.items():
                    at_cut.add(holder, key, tensor)
            for name, tensor in self.compressor.large().items():
                full = COMPRESSOR + name
                entries[id(tensor)] = Entry(name=full, tensor=tensor, gate=None, at_cut=True, common=False, family=full)
        _check_unique(entries.values())
        return Listing(list(entries.values()), aliases, tuple(on_host), watch.unchanged, at_cut.unchanged)


def _list_module(
    prefix: str,
    model: nn.Module,
    gate: dict[int, int],
    common: dict[int, bool],
    add: Callable[..., None],
    watch: _Watch,
    at_cut: _Watch,
) -> None:
    replicated = is_replicated(model)
    for path, module in model.named_modules(remove_duplicate=False):
        watch.grows(module._modules)
        watch.grows(module._parameters)
        for key, parameter in module._parameters.items():
            if parameter is not None:
                common[id(parameter)] = common.get(id(parameter), False) or replicated
                name = f"{prefix}.{plain_name(f'{path}.{key}' if path else key)}"
                how = {"gate": gate.get(id(parameter)), "at_cut": False, "common": common[id(parameter)]}
                add(name, parameter, module._parameters, key, **how)
        at_cut.grows(module._buffers)
        for key, buffer in module._buffers.items():
            if buffer is None:
                at_cut.plain(module._buffers, key)
            else:
                kind = "" if key not in module._non_persistent_buffers_set else "volatile."
                name = f"{kind}{prefix}.{plain_name(f'{path}.{key}' if path else key)}"
                add(name, buffer, module._buffers, key, gate=None, at_cut=True, common=False)


def _list_groups(
    prefix: str, optimizer: torch.optim.Optimizer, names: dict[int, str], add: Callable[..., None]
) -> Iterator[tuple[str, Tensor]]:
    """Add what the groups hold on a device, and go through their parameters."""
    for g, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, Tensor) and value.is_cuda:
                add(f"{prefix}.group.{g}.{key}", value, group, key, gate=None, at_cut=True, common=False)
        for parameter in group["params"]:
            yield names[id(parameter)], parameter


class _Watch:
    """Sees, without a line of Python per tensor, whether any of many tensors was replaced or added."""

    def __init__(self) -> None:
        self._holders: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []
        self._growing: list[Any] = []
        self._sizes: list[int] = []
        self._plain_holders: list[dict[Any, Any]] = []
        self._plain_keys: list[Any] = []
        self._outer_holders: list[dict[Any, Any]] = []
        self._outer_keys: list[Any] = []
        self._inner: list[Any] = []

    def add(self, holder: dict[Any, Any], key: Any, tensor: Tensor) -> None:
        self._holders.append(holder)
        self._keys.append(key)
        self._tensors.append(tensor)
        self._addresses.append(tensor.data_ptr())

    def grows(self, container: Any) -> None:
        self._growing.append(container)
        self._sizes.append(len(container))

    def same(self, holder: dict[Any, Any], key: Any) -> None:
        """A dict of tensors that may be replaced as a whole."""
        self._outer_holders.append(holder)
        self._outer_keys.append(key)
        self._inner.append(holder.get(key))

    def plain(self, holder: dict[Any, Any], key: Any) -> None:
        """Something that is no tensor yet."""
        self._plain_holders.append(holder)
        self._plain_keys.append(key)

    def unchanged(self) -> bool:
        return (
            list(map(len, self._growing)) == self._sizes
            and all(map(operator.is_, map(dict.get, self._outer_holders, self._outer_keys), self._inner))
            and Tensor not in set(map(type, map(dict.get, self._plain_holders, self._plain_keys)))
            and all(map(operator.is_, map(dict.get, self._holders, self._keys), self._tensors))
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
        )


def _check(name: str, tensor: Tensor) -> None:
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        raise Unstorable(name, tensor, "only plain tensors can be captured; sharded and wrapped ones are not supported")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in DTYPES:
        raise Unstorable(name, tensor, f"it is {tensor.layout}, {tensor.dtype}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise Unstorable(name, tensor, f"it is on {tensor.device}")


def _check_unique(entries: Any) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise BadConfig(f"two different tensors are called {entry.name}")
        seen.add(entry.name)


def share(entries: Sequence[Entry], rank: int, world: int) -> list[Share]:
    """What this rank keeps: all of its own, and its part of what is common, cut between rows.

    A parameter and its optimizer's state are cut at the same rows, so that whoever keeps some rows of them can repeat
    their update. What has other rows than its parameter stays with the parameter's first row.
    """
    families: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.common:
            families.setdefault(entry.family, []).append(entry)
    row_bytes = {name: sum(map(_row_bytes, _alike(members))) for name, members in families.items()}
    total = sum(row_bytes[name] * _rows(members[0]) for name, members in families.items())
    low, high = total * rank // world, total * (rank + 1) // world
    spans: dict[str, tuple[int, int]] = {}  # whose rows are whose
    at = 0
    for name, members in families.items():
        rows, size = _rows(members[0]), row_bytes[name]
        if size == 0:
            spans[name] = (0, rows if rank == 0 else -1)
        else:
            first, last = (min(rows, max(0, -((at - edge) // size))) for edge in (low, high))
            spans[name] = (first, last if first < last else -1)
        at += size * rows
    kept: list[Share] = []
    for entry in entries:
        if not entry.common:
            kept.append(Share(entry, 0, _rows(entry)))
            continue
        first, last = spans[entry.family]
        if last < 0:
            continue
        if entry.tensor.shape == families[entry.family][0].tensor.shape:
            kept.append(Share(entry, first, last - first))
        elif first == 0:
            kept.append(Share(entry, 0, _rows(entry)))
    return kept


def _rows(entry: Entry) -> int:
    return entry.tensor.shape[0] if entry.tensor.dim() else 1


def _row_bytes(entry: Entry) -> int:
    return entry.tensor.nbytes // max(1, _rows(entry))


def _alike(family: list[Entry]) -> list[Entry]:
    """The members that are cut like their parameter, which comes first."""
    return [entry for entry in family if entry.tensor.shape == family[0].tensor.shape]


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
        by_device.setdefault(item.entry.tensor.device, []).extend(item.chunks())
    devices = sorted(by_device, key=lambda device: (device.type != "cpu", str(device)))
    return [bucket for device in devices for bucket in _packed(by_device[device], optimizers)]


def _packed(shares: list[Share], optimizers: int) -> Iterator[Bucket]:
    current: list[Share] = []
    size = 0
    for item in shares:
        if current and size + item.bytes > BUCKET_BYTES:
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
