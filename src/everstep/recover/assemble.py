"""From images to tensors: whose pieces a rank needs, checked against the objects that will take them, then copied."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from everstep.capture.extras import decode
from everstep.capture.layout import TORCH_DTYPES, Listing, Subjects, innermost, optimizer_name, shaped, type_name
from everstep.capture.pinned import pinned_for
from everstep.capture.sharded import box_of, local_of, stepping
from everstep.errors import Damaged, Mismatch
from everstep.image import ITEM_BYTES, ImageLayout, extras_of
from everstep.recover.needs import Needs, overlap
from everstep.store.manifest import uncovered
from everstep.types import ImageInfo, Piece, Place

Image = tuple[ImageLayout, ImageInfo, memoryview]
Pair = tuple[Tensor, Tensor]  # where to, and from where
_States = list[tuple[dict[Any, Any], Tensor, dict[str, Tensor]]]


@dataclass(slots=True)
class Checkpoint:
    """A verified checkpoint in memory, as one rank sees it."""

    step: int
    world: int
    info: ImageInfo
    extras: dict[str, Any]
    own: bool  # whether this rank existed when it was taken
    pieces: dict[str, list[tuple[Piece, Tensor]]] = field(default_factory=dict)
    others: dict[str, Piece] = field(default_factory=dict)  # of tensors of which this rank needs nothing, one piece
    positions: list[Any] = field(default_factory=list)  # in the data, of all old ranks, if their number was another
    unlike: list[str] = field(default_factory=list)  # what each old rank had its own value of, and cannot be shared out

    def kind(self, name: str) -> Piece:
        """A piece that tells a tensor's shape and dtype."""
        return self.pieces[name][0][0] if name in self.pieces else self.others[name]

    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.pieces, *self.others]))

    def tensor(self, name: str) -> Tensor:
        """A whole tensor in memory of its own."""
        shape = self.pieces[name][0][0].shape
        return self.part(name, Place(shape, (0,) * len(shape), shape))

    def part(self, name: str, place: Place) -> Tensor:
        """A box of a tensor, in memory of its own."""
        pieces = self.pieces[name]
        found = torch.empty(place.extent, dtype=pieces[0][1].dtype)
        filled = 0
        for into, part in _common(pieces, found, place.start):
            into.copy_(part)
            filled += part.numel()
        if filled != found.numel():
            raise Damaged(f"{name} is not there as a whole", step=self.step)
        return found

    def state_names(self, prefix: str) -> dict[str, dict[str, str]]:
        """The tensors of an optimizer's state: parameter -> key -> full name, which several may have in common."""
        found: dict[str, dict[str, str]] = {}
        for name, kept_as in [*((name, name) for name in self.names()), *self.info.aliases.items()]:
            if name.startswith(f"{prefix}.state."):
                parameter, key = name.removeprefix(f"{prefix}.state.").rsplit(".", 1)
                found.setdefault(parameter, {})[key] = kept_as
        return found

    def scaler_state(self) -> dict[str, Any] | None:
        """What the GradScaler's state_dict() was; None if there was none, or it was not enabled."""
        if self.extras["scaler"] is None:
            return None
        state = dict(self.extras["scaler"])
        scale = state.pop("init_scale")
        tracked = "scaler._scale" in self.pieces
        state["scale"] = float(self.tensor("scaler._scale")) if tracked else scale
        state["_growth_tracker"] = int(self.tensor("scaler._growth_tracker")) if tracked else 0
        return state


@contextmanager
def _uncollected() -> Iterator[None]:
    """Thousands of objects are made, all to stay: a collector that went through them again and again finds nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_uncollected()
def view(images: dict[int, Image], step: int, needs: Needs) -> Checkpoint:
    """What a rank needs of the images of all old ranks."""
    missing = uncovered(layout.pieces for layout, _, _ in images.values())
    if missing is not None:
        raise Damaged(f"the images are not a whole checkpoint: {missing}", step=step)
    source = needs.source(len(images))
    layout, info, data = images[source]
    tree = decode(extras_of(layout, data))
    if not isinstance(tree, dict) or tree.get("step") != step:
        raise Damaged(f"the extras are not of step {step}", step=step, rank=source)
    checkpoint = Checkpoint(step=step, world=info.world, info=info, extras=tree, own=source == needs.rank)
    if needs.has_other_world(info):
        checkpoint.positions = [_position(images[rank], step, rank) for rank in sorted(images)]
    first: dict[str, memoryview] = {}  # the bytes that the first rank has of what all must have alike
    for old_rank, (layout, info, data) in sorted(images.items()):
        base = len(layout.header)
        for piece, tensor in zip(layout.pieces, _tensors_in(layout, data), strict=True):
            if needs.compares(piece, info):
                there = data[base + piece.offset : base + piece.offset + piece.length]
                if first.setdefault(piece.name, there) != there:
                    checkpoint.unlike.append(piece.name)
            if needs.takes(piece, old_rank, info.world):
                checkpoint.pieces.setdefault(piece.name, []).append((piece, tensor))
            elif not piece.private or old_rank == source:
                checkpoint.others[piece.name] = piece
    return checkpoint


def whole_views(images: dict[int, Image], step: int) -> Callable[[int], Checkpoint]:
    """All of the images, as each of the old ranks sees it: with its own of what is each rank's own."""
    return lambda rank: view(images, step, Needs(None, rank, len(images)))


def _tensors_in(layout: ImageLayout, data: memoryview) -> Iterator[Tensor]:
    """All pieces of an image. Nothing lies between them, so neighbours of one dtype are cut out of it at once."""
    base = len(layout.header)
    for dtype, run in groupby(layout.pieces, key=attrgetter("dtype")):
        pieces = list(run)
        there = data[base + pieces[0].offset : base + pieces[-1].offset + pieces[-1].length]
        parts = _elements_in(there, dtype).split([piece.length // ITEM_BYTES[dtype] for piece in pieces])
        yield from map(shaped, parts, pieces)


def tensor_in(data: memoryview, piece: Piece) -> Tensor:
    """A piece's bytes as the tensor that they are."""
    return shaped(_elements_in(data, piece.dtype), piece)


def _elements_in(data: memoryview, dtype: str) -> Tensor:
    if not data:
        return torch.empty(0, dtype=TORCH_DTYPES[dtype])
    with _unwarned() if data.readonly else nullcontext():
        return torch.frombuffer(data, dtype=TORCH_DTYPES[dtype])


@contextmanager
def _unwarned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nobody here writes to it
        yield


def _position(found: Image, step: int, rank: int) -> Any:
    layout, _, data = found
    tree = decode(extras_of(layout, data))
    if not isinstance(tree, dict) or tree.get("step") != step:
        raise Damaged(f"the extras are not of step {step}", step=step, rank=rank)
    return tree.get("position")


# -- into the objects


def differences(checkpoint: Checkpoint, subjects: Subjects, listing: Listing) -> list[str]:
    """How the program differs from what was saved; empty if it is the same."""
    now = {e.name: e for e in listing.entries if _is_model(e.name)}
    was = {name: checkpoint.kind(name) for name in checkpoint.names() if _is_model(name)}
    found = [f"missing in the program: {name} {was[name].shape}" for name in was if name not in now]
    found += [f"missing in the checkpoint: {name} {now[name].shape}" for name in now if name not in was]
    for name in sorted(was.keys() & now.keys()):
        shape, dtype = was[name].shape, TORCH_DTYPES[was[name].dtype]
        if shape != now[name].shape:
            found.append(f"{name}: shape was {shape}, is {now[name].shape}")
        if dtype != now[name].tensor.dtype:
            found.append(f"{name}: dtype was {dtype}, is {now[name].tensor.dtype}")
    before, after = checkpoint.info.optimizers, subjects.optimizer_infos(listing.names)
    if not before:
        return found  # it was brought from elsewhere, without any
    if [o.type for o in before] != [o.type for o in after]:
        found.append(f"optimizer was {', '.join(o.type for o in before)}, is {', '.join(o.type for o in after)}")
    elif before != after:
        found.append("the optimizer's parameter groups hold other parameters, or the same in another order")
    words = f"each of {checkpoint.world} ranks had its own value, so that only as many ranks can go on with it"
    return found + [f"{name}: {words}" for name in sorted(set(checkpoint.unlike))]


def _is_model(name: str) -> bool:
    return name.startswith(("model.", "extra.")) or (
        name.startswith("optimizer.") and ".params." in name and ".state." not in name
    )


def check(checkpoint: Checkpoint, subjects: Subjects, listing: Listing, *, strict: bool) -> list[str]:
    found = differences(checkpoint, subjects, listing)
    if found and strict:
        raise Mismatch(f"checkpoint {checkpoint.step} does not fit this program (strict=False loads what fits):", found)
    return found


@_uncollected()
@torch.no_grad()
def restore(checkpoint: Checkpoint, subjects: Subjects, *, strict: bool) -> list[str]:
    """Copy into models, and give the optimizers their state, as far as it fits; how the program differs."""
    listing = subjects.listing()
    found = check(checkpoint, subjects, listing, strict=strict)
    states, of_states = _states(checkpoint, subjects, listing)
    with _pinned(checkpoint, subjects):
        _copy([*_tensors_to_copy(checkpoint, subjects, listing), *of_states])
    for holder, parameter, state in states:  # once they are filled
        if state:
            holder[parameter] = state
        else:
            holder.pop(parameter, None)  # made in steps that are taken back
    _restore_beside(checkpoint, subjects, listing.names)
    return found


def _pinned(checkpoint: Checkpoint, subjects: Subjects) -> AbstractContextManager[None]:
    of_modules = (p for _, module in subjects.named_modules() for p in module.parameters())
    of_optimizers = (
        p for optimizer in subjects.optimizers for group in optimizer.param_groups for p in group["params"]
    )
    devices = {p.device for p in chain(of_modules, of_optimizers) if p.is_cuda}
    return pinned_for(devices, (part for pieces in checkpoint.pieces.values() for _, part in pieces))


def _states(checkpoint: Checkpoint, subjects: Subjects, listing: Listing) -> tuple[_States, list[Pair]]:
    """What optimizers are to hold: who of which parameter which tensors; and what to copy into those that are new.

    Where they hold such a tensor already it stays: a device may have no room for both.
    """
    names, on_host = listing.names, set(checkpoint.info.on_host)
    there = {entry.name: entry.held for entry in listing.entries}
    found: _States = []
    pairs: list[Pair] = []
    for prefix, index, optimizer in _same_optimizers(checkpoint, subjects):
        state_of, worker = checkpoint.state_names(prefix), stepping(optimizer)
        if not state_of and not any(worker.state.values()):
            continue
        known = {name for group in checkpoint.info.optimizers[index].groups for name in group}
        for parameter in (p for group in worker.param_groups for p in group["params"]):
            name = names[id(parameter)]
            saved = state_of.get(name, {}) if _fits(checkpoint, name, parameter) else {}
            for full in saved.values():
                device = torch.device("cpu") if full in on_host else parameter.device
                if not _is_alike(there.get(full), checkpoint.kind(full), device):
                    there[full], its_pairs = _like(checkpoint, full, parameter, device)
                    pairs += its_pairs
            if saved or name in known:
                found.append((worker.state, parameter, {key: there[full] for key, full in saved.items()}))
    return found, pairs


def _is_alike(tensor: Tensor | None, saved: Piece, device: torch.device) -> bool:
    return (
        tensor is not None and tensor.device == device
        and tensor.shape == saved.shape and tensor.dtype == TORCH_DTYPES[saved.dtype]
    )  # fmt: skip


def _fits(checkpoint: Checkpoint, name: str, parameter: Tensor) -> bool:
    """Not if it had another shape or dtype: then it was not loaded, and its state is of no use to it."""
    pieces = checkpoint.pieces.get(name)
    return pieces is None or (pieces[0][0].shape, pieces[0][1].dtype) == (parameter.shape, parameter.dtype)


@torch.no_grad()
def apply_rest(record: Checkpoint, subjects: Subjects) -> None:
    """Copy the values that a record has, and put back what optimizers hold beside the tensors of parameters."""
    listing = subjects.listing()
    with _pinned(record, subjects):
        _copy(list(_tensors_to_copy(record, subjects, listing)))
    _restore_beside(record, subjects, listing.names)


def _restore_beside(checkpoint: Checkpoint, subjects: Subjects, names: dict[int, str]) -> None:
    for prefix, index, optimizer in _same_optimizers(checkpoint, subjects):
        saved = checkpoint.extras["optimizers"][index]
        somewhere = optimizer.param_groups[0]["params"][0].device
        states = stepping(optimizer).state
        for key, value in saved["shared"].items():
            states[key] = _on(somewhere, value)
        for g, group in enumerate(optimizer.param_groups):
            for parameter in group["params"] if saved["plain"] else ():
                plain = saved["plain"].get(names[id(parameter)], {})
                if plain and _fits(checkpoint, names[id(parameter)], parameter):
                    states[parameter].update(_on(parameter.device, plain))
            if g < len(saved["groups"]):
                _restore_group(group, saved["groups"][g])
            for key, value in group.items():
                full = f"{prefix}.group.{g}.{key}"
                if isinstance(value, Tensor) and full in checkpoint.pieces:
                    value.copy_(checkpoint.tensor(full))


def _same_optimizers(checkpoint: Checkpoint, subjects: Subjects) -> Iterator[tuple[str, int, torch.optim.Optimizer]]:
    """Those that were of the same kind when the checkpoint was taken: prefix of their names, index, optimizer."""
    before = checkpoint.info.optimizers
    for index, optimizer in enumerate(subjects.optimizers):
        if index < len(before) and before[index].type == type_name(optimizer):
            yield optimizer_name(index, len(subjects.optimizers)), index, optimizer


def _tensors_to_copy(checkpoint: Checkpoint, subjects: Subjects, listing: Listing) -> Iterator[Pair]:
    current = {entry.name: entry for entry in listing.entries}
    for name, pieces in checkpoint.pieces.items():
        entry = current.get(name)
        whole, part = pieces[0]
        if entry is not None and entry.shape == whole.shape and entry.tensor.dtype == part.dtype:
            yield from _common(pieces, entry.tensor, entry.start)
        elif name.startswith("volatile."):
            _replace_buffer(subjects, name, checkpoint.tensor(name))


def _copy(pairs: list[Pair]) -> None:
    if pairs:
        targets, sources = zip(*(_once(*pair) for pair in pairs), strict=True)
        torch._foreach_copy_(targets, sources, non_blocking=True)


def _once(into: Tensor, part: Tensor) -> Pair:
    """An expanded tensor has one place for many elements that are alike: it is written once."""
    if into.is_contiguous():
        return into, part
    sides = zip(into.shape, into.stride(), strict=True)
    places = tuple(slice(0, 1) if many > 1 and not apart else slice(None) for many, apart in sides)
    return into[places], part[places]


def _common(pieces: list[tuple[Piece, Tensor]], local: Tensor, start: tuple[int, ...]) -> Iterator[Pair]:
    """What pieces have for a tensor that lies somewhere in the whole one: where to, and from where."""
    extent = tuple(local.shape)
    for piece, part in pieces:
        if (piece.start, piece.extent) == (start, extent):  # the whole, as most are: cutting it takes its time
            yield local, part
            continue
        found = overlap(piece, start, extent)
        if found is not None:
            in_piece, in_box = found
            yield (local[in_box], part[in_piece]) if in_box else (local, part)


def _on(device: torch.device, value: Any) -> Any:
    """A tree with its tensors on a device, as Optimizer.load_state_dict would have it."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _on(device, item) for key, item in value.items()}
    return type(value)(_on(device, item) for item in value) if isinstance(value, list | tuple) else value


def _restore_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, value in saved.items():
        if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
            group[key].copy_(value)  # the optimizer and its scheduler hold this very tensor
        else:
            group[key] = value


def _like(checkpoint: Checkpoint, name: str, parameter: Tensor, device: torch.device) -> tuple[Tensor, Iterator[Pair]]:
    """A state tensor in the memory format of its parameter, and what is to be copied into it."""
    one = checkpoint.kind(name)
    shape, dtype = one.shape, TORCH_DTYPES[one.dtype]
    box = box_of(name, parameter) if shape == tuple(parameter.shape) else None
    if shape == tuple(parameter.shape):
        target = torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False).detach()
    else:
        target = torch.empty(shape, dtype=dtype, device=device)
    start = box.start if box is not None else (0,) * len(shape)
    return target, _common(checkpoint.pieces.get(name, []), local_of(target), start)


def _replace_buffer(subjects: Subjects, name: str, value: Tensor) -> None:
    for prefix, module in subjects.named_modules():
        path = name.removeprefix("volatile.")
        if path.startswith(f"{prefix}."):
            *parents, key = path.removeprefix(f"{prefix}.").split(".")
            holder: Any = innermost(module)
            for parent in parents:
                holder = getattr(holder, parent, None)
            if holder is None:
                return
            old = holder._buffers.get(key)
            holder._buffers[key] = value.clone().to(old.device if old is not None else "cpu")
