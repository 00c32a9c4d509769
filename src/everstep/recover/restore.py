"""From a checkpoint into the objects that go on: compared with them first, then copied.

Models and whatever optimizers hold already are written in place: others may have these tensors, and a device may have
no room for two. What optimizers do not hold yet is made, and given to them once it is filled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everstep.capture.collector import uncollected
from everstep.capture.layout import (
    TORCH_DTYPES,
    Entry,
    Listing,
    Subjects,
    innermost,
    is_state,
    optimizer_name,
    type_name,
)
from everstep.capture.pinned import cuda_devices, pinned_for
from everstep.capture.sharded import box_of, local_of, stepping
from everstep.errors import Damaged, Mismatch
from everstep.recover.assemble import Checkpoint, Pair, common
from everstep.types import Piece


def differences(checkpoint: Checkpoint, subjects: Subjects, listing: Listing) -> list[str]:
    """How the program differs from what was saved; empty if it is the same."""
    now, was = listing.named, checkpoint.kinds()
    found: list[str] = []
    for name, piece in was.items():
        entry, dtype = now.get(name), TORCH_DTYPES[piece.dtype]
        if entry is not None and piece.shape == entry.shape and dtype == entry.tensor.dtype:
            continue
        if not _is_model(name):
            continue
        if entry is None:
            found.append(f"missing in the program: {name} {piece.shape}")
            continue
        if piece.shape != entry.shape:
            found.append(f"{name}: shape was {piece.shape}, is {entry.shape}")
        if dtype != entry.tensor.dtype:
            found.append(f"{name}: dtype was {dtype}, is {entry.tensor.dtype}")
    new = (entry for name, entry in now.items() if name not in was and _is_model(name))
    found += [f"missing in the checkpoint: {entry.name} {entry.shape}" for entry in new]
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
        name.startswith("optimizer.") and ".params." in name and not is_state(name)
    )


def check(checkpoint: Checkpoint, subjects: Subjects, listing: Listing, *, strict: bool) -> list[str]:
    found = differences(checkpoint, subjects, listing)
    if found and strict:
        raise Mismatch(f"checkpoint {checkpoint.step} does not fit this program (strict=False loads what fits):", found)
    return found


@uncollected()
@torch.no_grad()
def restore(checkpoint: Checkpoint, subjects: Subjects, *, strict: bool, listing: Listing | None = None) -> list[str]:
    """Copy into models, and give the optimizers their state, as far as it fits; how the program differs.

    `listing`: of the subjects as they are, where there is one already.
    """
    listing = listing or subjects.listing()
    found = check(checkpoint, subjects, listing, strict=strict)
    states = _states(checkpoint, subjects, listing)
    there = {name: entry for name, entry in listing.named.items() if not is_state(name) or name in states.kept}
    with _pinned(checkpoint, subjects):
        _copy([*_tensors_to_copy(checkpoint, subjects, there), *states.pairs])
    for holder, parameter, state in states.held:  # once they are filled
        if state:
            holder[parameter] = state
        else:
            holder.pop(parameter, None)  # made in steps that are taken back
    _restore_beside(checkpoint, subjects, listing.names)
    return found


def _pinned(checkpoint: Checkpoint, subjects: Subjects) -> AbstractContextManager[None]:
    sources = (part for pieces in checkpoint.pieces.values() for _, part in pieces)
    return pinned_for(cuda_devices(subjects), sources)


@dataclass(slots=True)
class _States:
    """What optimizers are to hold: who of which parameter which tensors."""

    held: list[tuple[dict[Any, Any], Tensor, dict[str, Tensor]]] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)  # those that they hold already: a device may have no room for two
    pairs: list[Pair] = field(default_factory=list)  # what to copy into the others


def _states(checkpoint: Checkpoint, subjects: Subjects, listing: Listing) -> _States:
    names, on_host = listing.names, set(checkpoint.info.on_host)
    apart, found = _apart(listing.named), _States()
    tensors: dict[str, Tensor] = {}  # by full name; several parameters may have one in common
    for prefix, index, optimizer in _same_optimizers(checkpoint, subjects):
        state_of, worker = checkpoint.state_names(prefix), stepping(optimizer)
        if not state_of and not any(state for key, state in worker.state.items() if isinstance(key, Tensor)):
            continue
        known = {name for group in checkpoint.info.optimizers[index].groups for name in group}
        for parameter in (p for group in worker.param_groups for p in group["params"]):
            name = names[id(parameter)]
            if not _fits(checkpoint, name, parameter):
                continue
            saved = state_of.get(name, {})
            for full in (full for full in saved.values() if full not in tensors):
                device = torch.device("cpu") if full in on_host else parameter.device
                entry = listing.named.get(full) if full in apart or not is_state(full) else None
                if entry is not None and _is_alike(entry.held, checkpoint.kind(full), device):
                    tensors[full] = entry.held
                    found.kept.add(full)
                else:
                    tensors[full], pairs = _like(checkpoint, full, parameter, device)
                    found.pairs += pairs
            if saved or name in known:
                found.held.append((worker.state, parameter, {key: tensors[full] for key, full in saved.items()}))
    return found


def _is_alike(tensor: Tensor, saved: Piece, device: torch.device) -> bool:
    alike = tensor.shape == saved.shape and tensor.dtype == TORCH_DTYPES[saved.dtype]
    return alike and tensor.device == device


def _apart(entries: dict[str, Entry]) -> set[str]:
    """The names of states that can be filled without writing over anything: all their elements have places alone."""
    if not any(map(is_state, entries)):
        return set()
    tensors = {name: entry.tensor for name, entry in entries.items()}
    found = {name for name, tensor in tensors.items() if not tensor.numel()}
    spans = sorted((one.data_ptr(), _end(one), name) for name, one in tensors.items() if name not in found)
    reached = 0  # by all before
    for (begin, end, name), following in zip(spans, [*(span[0] for span in spans[1:]), math.inf], strict=True):
        is_alone = begin >= reached and end <= following
        if is_alone and torch._debug_has_internal_overlap(tensors[name]) == 0:
            found.add(name)
        reached = max(reached, end)
    return found


def _end(tensor: Tensor) -> int:
    """Behind the last byte of its memory."""
    if tensor.is_contiguous():
        return tensor.data_ptr() + tensor.nbytes
    last = sum((size - 1) * apart for size, apart in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.itemsize


def _fits(checkpoint: Checkpoint, name: str, parameter: Tensor) -> bool:
    """Not if it had another shape or dtype: then it was not loaded, and its state is of no use to it."""
    pieces = checkpoint.pieces.get(name)
    return pieces is None or (pieces[0][0].shape, pieces[0][1].dtype) == (parameter.shape, parameter.dtype)


@torch.no_grad()
def apply_rest(record: Checkpoint, subjects: Subjects) -> None:
    """Copy the values that a record has, and put back what optimizers hold beside the tensors of parameters."""
    listing = subjects.listing()
    with _pinned(record, subjects):
        _copy(list(_tensors_to_copy(record, subjects, listing.named)))
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


def _tensors_to_copy(checkpoint: Checkpoint, subjects: Subjects, entries: dict[str, Entry]) -> Iterator[Pair]:
    for name, pieces in checkpoint.pieces.items():
        entry = entries.get(name)
        first, part = pieces[0]
        if entry is None or entry.shape != first.shape:
            if name.startswith("volatile."):
                _replace_buffer(subjects, name, checkpoint.tensor(name))
        elif entry.tensor.dtype == part.dtype:
            yield from common(pieces, entry.tensor, entry.start)


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


def _like(checkpoint: Checkpoint, name: str, parameter: Tensor, device: torch.device) -> tuple[Tensor, list[Pair]]:
    """A state tensor in the memory format of its parameter, and what is to be copied into it."""
    one = checkpoint.kind(name)
    shape, dtype = one.shape, TORCH_DTYPES[one.dtype]
    box = box_of(name, parameter) if shape == tuple(parameter.shape) else None
    if shape == tuple(parameter.shape):
        target = torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False).detach()
    else:
        target = torch.empty(shape, dtype=dtype, device=device)
    start = box.start if box is not None else (0,) * len(shape)
    pairs = list(common(checkpoint.pieces.get(name, []), local_of(target), start))
    if sum(part.numel() for _, part in pairs) < local_of(target).numel():
        raise Damaged(f"{name} is not there as a whole", step=checkpoint.step)
    return target, pairs


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
