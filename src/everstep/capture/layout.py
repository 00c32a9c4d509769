"""What the state is made of: every tensor by its full name, whose share it is, and in which bucket it travels.

`Subjects` holds the objects that a user gave to guard() and lists their tensors. `share` cuts common tensors among the
ranks, by rows, so that each rank copies about the same number of bytes; it is a function of the listing alone, so the
ranks need not talk. Of what ranks have together only the replicas of a box share the work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from everstep.capture.compressor import Compressor
from everstep.capture.sharded import (
    SHARDED,
    Box,
    Sharers,
    box_of,
    box_of_state,
    check_plain_state,
    check_state,
    is_sharded,
    is_zero,
    local_of,
    sharded_parameters,
    stepping,
)
from everstep.capture.watch import Watch
from everstep.errors import BadConfig, Unstorable
from everstep.image import Wanted
from everstep.types import OptimizerInfo, Piece

COMPRESSOR = "compressor."  # how the residuals of a gradient compressor are called

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
Held = tuple[str, Tensor, dict[str, Any], str]  # a name, the tensor, who holds it, and under which key

_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the state."""

    name: str
    tensor: Tensor
    gate: int | None  # the optimizer whose step overwrites it; None: if anybody, the loop, after a step
    at_cut: bool  # may change at any time after the cut, so it is copied in the cut
    common: bool  # the same on every rank, or a box of what ranks have together; else this rank's own
    family: str  # the parameter that it is, or that it is an optimizer's state of; else its own name
    box: Box | None = None  # where the tensor lies, if ranks have a larger one together,
    given: Tensor | None = None  # and the object that stands for that one in the program, if there is any

    @property
    def held(self) -> Tensor:
        """The object that the program has."""
        return self.given if self.given is not None else self.tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.box.shape if self.box is not None else tuple(self.tensor.shape)

    @property
    def start(self) -> tuple[int, ...]:
        return self.box.start if self.box is not None else (0,) * self.tensor.dim()


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
        entry, local = self.entry, tuple(self.entry.tensor.shape)
        start = (entry.start[0] + self.first, *entry.start[1:]) if local else ()
        return Wanted(
            name=entry.name, dtype=DTYPES[entry.tensor.dtype], shape=entry.shape, start=start,
            extent=(self.rows, *local[1:]) if local else (), private=not entry.common, order=_order(entry.tensor),
        )  # fmt: skip

    def chunks(self, most: int) -> Iterator[Share]:
        """The same rows in shares of at most so many bytes, as far as rows can be cut."""
        at_once = max(1, self.rows * most // max(1, self.bytes))
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
        return elements if len(piece.extent) == 1 else elements.view(piece.extent)
    return elements.view(piece.stored).permute([piece.order.index(one) for one in range(len(piece.order))])


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes that DDP, compile and activation checkpointing put in."""
    for wrapper in _WRAPPERS:
        if wrapper in name:
            name = name.removeprefix(wrapper).replace("." + wrapper, ".")
    return name


def type_name(optimizer: torch.optim.Optimizer) -> str:
    """What kind of optimizer steps."""
    kind = type(stepping(optimizer))
    return f"{kind.__module__}.{kind.__qualname__}"


def innermost(module: nn.Module) -> nn.Module:
    """The user's own module, without DDP and compile around it."""
    while isinstance(module, nn.parallel.DistributedDataParallel) or hasattr(module, "_orig_mod"):
        module = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module._orig_mod  # type: ignore[assignment]
    return module


def ddp_of(module: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """The DDP around a model, if there is one."""
    while hasattr(module, "_orig_mod"):
        module = module._orig_mod  # type: ignore[assignment]
    return module if isinstance(module, nn.parallel.DistributedDataParallel) else None


def is_replicated(module: nn.Module) -> bool:
    """Whether all ranks have the same: what is so among some of them only is each rank's own."""
    ddp = ddp_of(module)
    if ddp is None or not torch.distributed.is_initialized():
        return ddp is not None
    return ddp.process_group.size() == torch.distributed.get_world_size()


def optimizer_name(index: int, count: int) -> str:
    """How one of so many optimizers is called."""
    return _numbered("optimizer", index, count)


def is_state(name: str) -> bool:
    """Whether a tensor of this name is an optimizer's state of a parameter."""
    return name.startswith("optimizer") and ".state." in name


def _numbered(name: str, index: int, count: int) -> str:
    return name if count == 1 else f"{name}.{index}"


@dataclass(slots=True)
class Listing:
    entries: list[Entry]
    names: dict[int, str]  # of every parameter, by its id
    aliases: dict[str, str]  # second names of tied tensors
    on_host: tuple[str, ...]  # optimizer state that lies on the host though its parameter does not
    watch: Watch
    watch_at_cut: Watch

    def unchanged(self, between: Callable[[], object] | None = None) -> bool:
        """Whether the objects still hold these very tensors, but for those that are copied in the cut."""
        return self.watch.unchanged(between)

    def unchanged_at_cut(self) -> bool:
        """The same, for those that are."""
        return self.watch_at_cut.unchanged()


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
        return self._names(_parameters(prefix, model) for prefix, model in self.named_modules())

    def _names(self, parameters: Iterable[Iterable[Held]]) -> dict[int, str]:
        found: dict[int, str] = {}
        for name, parameter, _, _ in chain.from_iterable(parameters):
            found.setdefault(id(parameter), name)
        for prefix, optimizer in self._named_optimizers():
            for g, group in enumerate(optimizer.param_groups):
                for i, parameter in enumerate(group["params"]):
                    if id(parameter) not in found:
                        found[id(parameter)] = f"{prefix}.params.{g}.{i}"
        return found

    def optimizer_infos(self, names: dict[int, str]) -> tuple[OptimizerInfo, ...]:
        return tuple(
            OptimizerInfo(
                type=type_name(optimizer),
                groups=tuple(tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups),
            )
            for optimizer in self.optimizers
        )

    def what_is_sharded(self) -> str:
        """What of the optimizers' parameters and state ranks have parts of only, in words; empty if all have all."""
        if any(map(is_zero, self.optimizers)):
            return "ranks have taken the state of ZeroRedundancyOptimizer apart among them"
        parameters = (p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"])
        sharded = next(filter(is_sharded, parameters), None)
        return "" if sharded is None else f"{self.names()[id(sharded)]} is a DTensor, of which ranks have parts"

    def named_modules(self) -> list[tuple[str, nn.Module]]:
        models = [(_numbered("model", i, len(self.models)), model) for i, model in enumerate(self.models)]
        return models + [(f"extra.{key}", module) for key, module in self.modules.items()]

    def listing(self) -> Listing:
        walked = [(prefix, model, list(_parameters(prefix, model))) for prefix, model in self.named_modules()]
        names = self._names(parameters for _, _, parameters in walked)
        gate = {id(p): i for i, one in enumerate(self.optimizers) for many in one.param_groups for p in many["params"]}
        entries: dict[int, Entry] = {}
        aliases, on_host = dict[str, str](), list[str]()
        watch, at_cut = Watch(), Watch()

        def add(
            name: str, tensor: Tensor, holder: dict[Any, Any], key: Any, *, gate: int | None, is_at_cut: bool,
            common: bool, family: str = "", box: Box | None = None,
        ) -> None:  # fmt: skip
            local, given = tensor, None
            if is_sharded(tensor):
                local, box, given = local_of(tensor), box_of(name, tensor), tensor
            _check(name, local)
            (at_cut if is_at_cut else watch).add(holder, key, tensor, local)
            entry = Entry(
                name=name, tensor=local, gate=gate, at_cut=is_at_cut, common=common or box is not None,
                family=family or name, box=box, given=given,
            )  # fmt: skip
            known = entries.setdefault(id(tensor), entry)
            if known.name != name:
                aliases[name] = known.name

        common: dict[int, bool] = {}
        for prefix, model, parameters in walked:
            _list_module(prefix, model, parameters, gate, common, add, watch, at_cut)
        for i, (prefix, optimizer) in enumerate(self._named_optimizers()):
            states = stepping(optimizer).state
            watch.same(vars(stepping(optimizer)), "state")  # load_state_dict() brings another dict,
            at_cut.same(vars(optimizer), "param_groups")  # and another list
            for growing in (states, optimizer.param_groups, *(group["params"] for group in optimizer.param_groups)):
                watch.grows(growing)
            for name, parameter in _list_groups(prefix, optimizer, names, add):
                is_common = common.get(id(parameter), False)
                if id(parameter) not in common:
                    add(name, parameter, {"params": parameter}, "params", gate=i, is_at_cut=False, common=False)
                state = states.get(parameter, {})
                watch.grows(state)
                watch.same(states, parameter)
                for key, value in state.items():
                    full = f"{prefix}.state.{name}.{key}"
                    if not isinstance(value, Tensor):
                        check_plain_state(full, value, optimizer)
                        watch.plain(state, key)
                        continue
                    _check_found_again(full, key, value)
                    check_state(full, value, parameter)
                    if value.device != parameter.device:
                        on_host.append(full)
                    box = box_of_state(optimizer, value)
                    add(full, value, state, key, gate=i, is_at_cut=False, common=is_common, family=name, box=box)
        for key in ("_scale", "_growth_tracker") if self.scaler is not None else ():
            value = getattr(self.scaler, key, None)
            if isinstance(value, Tensor):
                add(f"scaler.{key}", value, vars(self.scaler), key, gate=None, is_at_cut=True, common=False)
            else:
                at_cut.plain(vars(self.scaler), key)  # a GradScaler makes its tensors when it is first used
        if self.compressor is not None:
            for holder in self.compressor.holders():
                at_cut.grows(holder)
                for key, tensor in holder.items():
                    at_cut.add(holder, key, tensor, tensor)
            for name, tensor in self.compressor.large().items():
                full = COMPRESSOR + name
                entries[id(tensor)] = Entry(name=full, tensor=tensor, gate=None, at_cut=True, common=False, family=full)
        found = list(entries.values())
        _check_unique(found)
        return Listing(found, names, aliases, tuple(on_host), watch, at_cut)


def _list_module(
    prefix: str, model: nn.Module, parameters: Iterable[Held], gate: dict[int, int], common: dict[int, bool],
    add: Callable[..., None], watch: Watch, at_cut: Watch,
) -> None:  # fmt: skip
    replicated = is_replicated(model)
    for name, parameter, holder, key in parameters:
        is_common = common[id(parameter)] = replicated or common.get(id(parameter), False)
        add(name, parameter, holder, key, gate=gate.get(id(parameter)), is_at_cut=False, common=is_common)
    for path, module in model.named_modules(remove_duplicate=False):
        watch.grows(module._modules)
        watch.grows(module._parameters)
        at_cut.grows(module._buffers)
        for key, buffer in module._buffers.items():
            if buffer is None:
                at_cut.plain(module._buffers, key)
            else:
                kind = "" if key not in module._non_persistent_buffers_set else "volatile."
                name = f"{kind}{prefix}.{plain_name(f'{path}.{key}' if path else key)}"
                add(name, buffer, module._buffers, key, gate=None, is_at_cut=True, common=False)


def _parameters(prefix: str, model: nn.Module) -> Iterator[Held]:
    """Every parameter under each of its names: full name, parameter, and who holds it under which key."""
    sharded = sharded_parameters(model)
    for path, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{plain_name(f'{path}.{key}' if path else key)}"
                holder = sharded.get((id(module), key)) if sharded else None
                as_it_is = (name, parameter, module._parameters, key)
                yield as_it_is if holder is None else (name, holder[SHARDED], holder, SHARDED)


def _list_groups(
    prefix: str, optimizer: torch.optim.Optimizer, names: dict[int, str], add: Callable[..., None]
) -> Iterator[tuple[str, Tensor]]:
    """Add what the groups hold on a device, and go through their parameters."""
    for g, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, Tensor) and value.is_cuda:
                add(f"{prefix}.group.{g}.{key}", value, group, key, gate=None, is_at_cut=True, common=False)
        for parameter in group["params"]:
            yield names[id(parameter)], parameter


def _check(name: str, tensor: Tensor) -> None:
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        raise Unstorable(name, tensor, "only plain tensors and DTensors of them can be captured")
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPES or not (tensor.is_cuda or tensor.is_cpu):
        raise Unstorable(name, tensor, f"it is {tensor.layout}, {tensor.dtype}, on {tensor.device}")
    if tensor.is_conj() or tensor.is_neg():
        raise Unstorable(name, tensor, "its memory holds other values than it shows; resolve_conj() and resolve_neg()")


def _check_found_again(name: str, key: object, value: Tensor) -> None:
    """Whether a restore would find a state: by the name of its parameter, and behind the last dot its own."""
    if not isinstance(key, str) or "." in key:
        raise Unstorable(name, value, f"its optimizer has it under {key!r}, and only names without a dot can be kept")


def _check_unique(entries: Sequence[Entry]) -> None:
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise BadConfig(f"two different tensors are called {Counter(names).most_common(1)[0][0]}")


def share(entries: Sequence[Entry], rank: int, world: int) -> list[Share]:
    """What this rank keeps: all of its own, and its part of what others have too, cut between rows.

    A parameter and its optimizer's state are cut at the same rows, so that whoever keeps some rows of them can repeat
    their update. What has other rows than its parameter stays with the parameter's first row.
    """
    everybody = Sharers("everybody", rank, world)
    groups: dict[Sharers, dict[str, list[Entry]]] = {}  # those who have the same entries -> families
    for entry in entries:
        if entry.common:
            families = groups.setdefault(entry.box.sharers if entry.box is not None else everybody, {})
            families.setdefault(entry.family, []).append(entry)
    spans = {sharers: _spans(families, sharers) for sharers, families in groups.items()}
    kept: list[Share] = []
    for entry in entries:
        if not entry.common:
            kept.append(Share(entry, 0, _rows(entry)))
            continue
        if entry.box is not None and not entry.tensor.numel() and 0 not in entry.shape:
            continue  # others have all of it
        sharers = entry.box.sharers if entry.box is not None else everybody
        first, last = spans[sharers][entry.family]
        if last < 0:
            continue
        if entry.tensor.shape == groups[sharers][entry.family][0].tensor.shape:
            kept.append(Share(entry, first, last - first))
        elif first == 0:
            kept.append(Share(entry, 0, _rows(entry)))
    return kept


def _spans(families: dict[str, list[Entry]], sharers: Sharers) -> dict[str, tuple[int, int]]:
    """Of each family the rows that this one of the sharers keeps, from and to; to -1: none."""
    row_bytes = {name: sum(map(_row_bytes, _alike(members))) for name, members in families.items()}
    total = sum(row_bytes[name] * _rows(members[0]) for name, members in families.items())
    low, high = (total * one // sharers.count for one in (sharers.index, sharers.index + 1))
    spans: dict[str, tuple[int, int]] = {}
    at = 0
    for name, members in families.items():
        rows, size = _rows(members[0]), row_bytes[name]
        if size == 0:
            spans[name] = (0, rows if sharers.index == 0 else -1)
        else:
            first, last = (min(rows, max(0, -((at - edge) // size))) for edge in (low, high))
            spans[name] = (first, last if first < last else -1)
        at += size * rows
    return spans


def _rows(entry: Entry) -> int:
    return entry.tensor.shape[0] if entry.tensor.dim() else 1


def _row_bytes(entry: Entry) -> int:
    return entry.tensor.nbytes // max(1, _rows(entry))


def _alike(family: list[Entry]) -> list[Entry]:
    """The members that are cut like their parameter, which comes first."""
    return [entry for entry in family if entry.tensor.shape == family[0].tensor.shape]
