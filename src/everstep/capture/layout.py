"""What the state is made of: every tensor by its full name, who holds it, and when it may change.

`Subjects` holds the objects that a user gave to guard() and lists their tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
from everstep.types import OptimizerInfo, Piece

COMPRESSOR = "compressor."  # how the residuals of a gradient compressor are called

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

_Held = tuple[str, Tensor, dict[str, Any], str]  # a name, the tensor, who holds it, and under which key

_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the state."""

    name: str
    tensor: Tensor
    gate: int | None  # the optimizer whose step overwrites it; None: several, or if anybody the loop, after a step
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


def own_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the state_dict() of its class has beside that of every optimizer; nothing, for nearly all."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict or is_zero(optimizer):
        return {}
    return {key: value for key, value in optimizer.state_dict().items() if key not in ("state", "param_groups")}


def is_state(name: str) -> bool:
    """Whether a tensor of this name is an optimizer's state of a parameter."""
    return name.startswith("optimizer") and ".state." in name


def _numbered(name: str, index: int, count: int) -> str:
    return name if count == 1 else f"{name}.{index}"


@dataclass(slots=True)
class Listing:
    entries: list[Entry]
    named: dict[str, Entry]  # the same
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

    def _names(self, parameters: Iterable[Iterable[_Held]]) -> dict[int, str]:
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

    def _gates(self) -> dict[int, int | None]:
        """The optimizer that overwrites a parameter, by the id of that; None: several do."""
        found: dict[int, int | None] = {}
        for index, optimizer in enumerate(self.optimizers):
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                found[id(parameter)] = index if found.get(id(parameter), index) == index else None
        return found

    def listing(self) -> Listing:
        walked = [(prefix, model, list(_parameters(prefix, model))) for prefix, model in self.named_modules()]
        names = self._names(parameters for _, _, parameters in walked)
        gates = self._gates()
        making = _Making()
        for prefix, model, parameters in walked:
            making.add_module(prefix, model, parameters, gates)
        for i, (prefix, optimizer) in enumerate(self._named_optimizers()):
            making.add_optimizer(i, prefix, optimizer, names, gates)
        if self.scaler is not None:
            making.add_scaler(self.scaler)
        if self.compressor is not None:
            making.add_compressor(self.compressor)
        return making.listing(names)


@dataclass(slots=True)
class _Making:
    """A listing that is not done yet."""

    entries: dict[int, Entry] = field(default_factory=dict)  # by the id of what the program has
    aliases: dict[str, str] = field(default_factory=dict)
    on_host: list[str] = field(default_factory=list)
    common: dict[int, bool] = field(default_factory=dict)  # parameters of models, by id
    watch: Watch = field(default_factory=Watch)
    watch_at_cut: Watch = field(default_factory=Watch)

    def listing(self, names: dict[int, str]) -> Listing:
        entries = list(self.entries.values())
        named = {entry.name: entry for entry in entries}
        if len(named) < len(entries):
            ((name, _),) = Counter(entry.name for entry in entries).most_common(1)
            raise BadConfig(f"two different tensors are called {name}")
        return Listing(entries, named, names, self.aliases, tuple(self.on_host), self.watch, self.watch_at_cut)

    def add(
        self, name: str, tensor: Tensor, holder: dict[Any, Any], key: Any, *, gate: int | None = None,
        at_cut: bool = False, common: bool = False, family: str = "", box: Box | None = None,
    ) -> None:  # fmt: skip
        local, given = tensor, None
        if is_sharded(tensor):
            local, box, given = local_of(tensor), box_of(name, tensor), tensor
        _check(name, local)
        (self.watch_at_cut if at_cut else self.watch).add(holder, key, tensor, local)
        entry = Entry(
            name=name, tensor=local, gate=gate, at_cut=at_cut, common=common or box is not None, family=family or name,
            box=box, given=given,
        )  # fmt: skip
        known = self.entries.setdefault(id(tensor), entry)
        if known.name != name:
            self.aliases[name] = known.name

    def add_module(
        self, prefix: str, model: nn.Module, parameters: Iterable[_Held], gates: dict[int, int | None]
    ) -> None:  # fmt: skip
        is_common = is_replicated(model)
        for name, parameter, holder, key in parameters:
            common = self.common[id(parameter)] = is_common or self.common.get(id(parameter), False)
            self.add(name, parameter, holder, key, gate=gates.get(id(parameter)), common=common)
        for path, module in model.named_modules(remove_duplicate=False):
            self.watch.grows(module._modules)
            self.watch.grows(module._parameters)
            self.watch_at_cut.grows(module._buffers)
            for key, buffer in module._buffers.items():
                if buffer is None:
                    self.watch_at_cut.plain(module._buffers, key)
                else:
                    kind = "" if key not in module._non_persistent_buffers_set else "volatile."
                    name = f"{kind}{prefix}.{plain_name(f'{path}.{key}' if path else key)}"
                    self.add(name, buffer, module._buffers, key, at_cut=True)

    def add_optimizer(
        self, index: int, prefix: str, optimizer: torch.optim.Optimizer, names: dict[int, str],
        gates: dict[int, int | None],
    ) -> None:  # fmt: skip
        states = stepping(optimizer).state
        self.watch.same(vars(stepping(optimizer)), "state")  # load_state_dict() brings another dict,
        self.watch_at_cut.same(vars(optimizer), "param_groups")  # and another list
        self.watch.grows(states)
        self.watch.grows(optimizer.param_groups)
        for group in optimizer.param_groups:
            self.watch.grows(group["params"])
        for g, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, Tensor) and value.is_cuda:
                    self.add(f"{prefix}.group.{g}.{key}", value, group, key, at_cut=True)
            for parameter in group["params"]:
                name, common = names[id(parameter)], self.common.get(id(parameter), False)
                if id(parameter) not in self.common:
                    self.add(name, parameter, {"params": parameter}, "params", gate=gates[id(parameter)])
                state = states.get(parameter, {})
                self.watch.grows(state)
                self.watch.same(states, parameter)
                for key, value in state.items():
                    full = f"{prefix}.state.{name}.{key}"
                    if not isinstance(value, Tensor):
                        check_plain_state(full, value, optimizer)
                        self.watch.plain(state, key)
                        continue
                    _check_found_again(full, key, value)
                    check_state(full, value, parameter)
                    if value.device != parameter.device:
                        self.on_host.append(full)
                    box = box_of_state(optimizer, value)
                    self.add(full, value, state, key, gate=index, common=common, family=name, box=box)

    def add_scaler(self, scaler: Any) -> None:
        for key in ("_scale", "_growth_tracker"):
            value = getattr(scaler, key, None)
            if isinstance(value, Tensor):
                self.add(f"scaler.{key}", value, vars(scaler), key, at_cut=True)
            else:
                self.watch_at_cut.plain(vars(scaler), key)  # a GradScaler makes its tensors when it is first used

    def add_compressor(self, compressor: Compressor) -> None:
        for holder in compressor.holders():
            self.watch_at_cut.grows(holder)
            for key, tensor in holder.items():
                self.watch_at_cut.add(holder, key, tensor, tensor)
        for name, tensor in compressor.large().items():
            full = COMPRESSOR + name
            entry = Entry(name=full, tensor=tensor, gate=None, at_cut=True, common=False, family=full)
            self.entries[id(tensor)] = entry


def _parameters(prefix: str, model: nn.Module) -> Iterator[_Held]:
    """Every parameter under each of its names: full name, parameter, and who holds it under which key."""
    sharded = sharded_parameters(model)
    for path, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{plain_name(f'{path}.{key}' if path else key)}"
                holder = sharded.get((id(module), key)) if sharded else None
                if holder is None:
                    yield name, parameter, module._parameters, key
                else:
                    yield name, holder[SHARDED], holder, SHARDED


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
