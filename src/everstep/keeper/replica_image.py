"""One rank's state on the host, advanced by what each step consumed.

A rank's base holds some rows of every parameter with the same rows of its optimizer's state, and its record the same
rows of the gradient. So the image is advanced without the other ranks, in place, by the optimizer's own class: the
parameters that it steps are views of the image. Where training is on the host the bits are those of training. Where it
is on a device the optimizer takes its host form, and the image says so in its header.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from everstep.capture.digest import MODULUS, digest, number
from everstep.capture.extras import decode, encode
from everstep.capture.form import CALL, DIGEST, GRADIENT, tree_of_base
from everstep.capture.layout import TORCH_DTYPES, optimizer_name, shaped
from everstep.capture.update import Call, Double, Member, rebuild, recorded_call
from everstep.image import ImageLayout, Wanted, extras_of, lay_out
from everstep.types import ImageInfo, OptimizerInfo, Piece

_AT_ONCE = 1 << 22  # elements that are compared at a time


class Lost(Exception):
    """This replica cannot go on; the next true base begins another one."""


class View:
    """The tensors of an image in memory, by name."""

    def __init__(self, memory: memoryview, layout: ImageLayout) -> None:
        self.memory, self.layout = memory, layout
        self._flat = torch.frombuffer(memory, dtype=torch.uint8)
        self.pieces = {piece.name: piece for piece in layout.pieces}
        self._tensors: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        found = self._tensors.get(name)
        if found is None:
            piece = self.pieces[name]
            begin = len(self.layout.header) + piece.offset
            found = shaped(self._flat[begin : begin + piece.length].view(TORCH_DTYPES[piece.dtype]), piece)
            self._tensors[name] = found
        return found

    def named(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): self[name] for name in self.pieces if name.startswith(prefix)}

    def tree(self, step: int) -> dict[str, Any]:
        tree = decode(extras_of(self.layout, self.memory))
        if not isinstance(tree, dict) or tree.get("step") != step:
            raise Lost(f"the extras are not of step {step}")
        return tree


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank consumed in one step, in memory that nobody else writes."""

    step: int
    generation: str
    cut_time: float
    view: View


def labelled(layout: ImageLayout, info: ImageInfo, device: str) -> tuple[ImageLayout, ImageInfo]:
    """The layout of a replica: that of a base, which says whose arithmetic it does not have."""
    if device == "cpu":
        return layout, info
    info = msgspec.structs.replace(info, replica=device)
    pieces = [
        Wanted(
            name=p.name, dtype=p.dtype, shape=p.shape, start=p.start, extent=p.extent, private=p.private, order=p.order
        )
        for p in layout.pieces
    ]
    return lay_out(pieces, info, layout.extras_bytes), info


def rowless(view: View, info: ImageInfo) -> dict[str, Tensor]:
    """State that has no rows: only the rank with a parameter's first row keeps it, and all need it."""
    found = {}
    for full, parameter, _ in _state(view, info):
        if view.pieces[full].shape != view.pieces[parameter].shape:
            found[full] = view[full].clone()
    return found


def _state(view: View, info: ImageInfo) -> Iterator[tuple[str, str, str]]:
    """Every tensor of an optimizer's state: its full name, its parameter, its key."""
    for i in range(len(info.optimizers)):
        prefix = f"{_prefix(info, i)}.state."
        for full in view.pieces:
            if full.startswith(prefix):
                parameter, key = full.removeprefix(prefix).rsplit(".", 1)
                yield full, parameter, key


def _prefix(info: ImageInfo, index: int) -> str:
    return optimizer_name(index, len(info.optimizers))


class Image:
    """The state of one rank, in a slot of its replica's arena."""

    def __init__(self, view: View, info: ImageInfo, step: int, rowless: Mapping[str, Tensor]) -> None:
        """`rowless`: of all ranks on this node."""
        self.view, self._info = view, info
        self._exact = not info.replica
        self._rowless = {full: value.clone() for full, value in rowless.items() if full not in view.pieces}
        tree = view.tree(step)
        if any(saved["plain"] or saved["shared"] for saved in tree["optimizers"]):
            raise Lost("an optimizer has state that is no tensor")
        self._doubles = [self._double(i, saved["groups"]) for i, saved in enumerate(tree["optimizers"])]

    def _double(self, index: int, groups: list[dict[str, Any]]) -> tuple[list[str], Double] | None:
        """An optimizer over views of the image; None if this rank has none of its rows."""
        info = self._info.optimizers[index]
        mine = OptimizerInfo(
            type=info.type, groups=tuple(tuple(n for n in group if n in self.view.pieces) for group in info.groups)
        )
        names = [name for group in mine.groups for name in group]
        if not names:
            return None
        parameters = {name: nn.Parameter(self.view[name]) for name in names}
        prefix, state = f"{_prefix(self._info, index)}.state.", dict[str, dict[str, Tensor]]()
        for full in (*self.view.pieces, *self._rowless):
            if full.startswith(prefix):
                parameter, key = full.removeprefix(prefix).rsplit(".", 1)
                state.setdefault(parameter, {})[key] = self._place(full)
        members = [
            Member(group=g, parameter=parameters[name], state=state.get(name, {}))
            for g, group in enumerate(mine.groups)
            for name in group
        ]
        return names, Double(rebuild(mine, parameters, groups, {}), members, {})

    def _place(self, full: str) -> Tensor:
        return self.view[full] if full in self.view.pieces else self._rowless[full]

    # -- going on

    def advance(self, record: Record) -> None:
        """Bring the image to after the record's step."""
        tree = record.view.tree(record.step)
        torch.set_flush_denormal(tree["flushes"])
        for saved in tree["calls"]:
            scalars = record.view.named(f"{CALL}{saved['optimizer']}.")
            self._call(recorded_call(saved, scalars, saved["absent"]), record.view)
        for name in record.view.pieces:
            if not name.startswith((GRADIENT, CALL, DIGEST)):
                if name not in self.view.pieces:
                    raise Lost(f"the base has no {name}")
                self.view[name].copy_(record.view[name])
        self._write_extras(tree_of_base(tree))
        if self._exact and tree["digested"]:
            self._prove(record)

    def _call(self, call: Call, record: View) -> None:
        found = self._doubles[call.optimizer]
        if found is None:
            return
        names, double = found
        gradients: list[Tensor | None] = []
        for name in names:
            if name not in call.absent and f"{GRADIENT}{name}" not in record.pieces:
                raise Lost(f"the record of its step has no gradient of {name}")
            gradients.append(None if name in call.absent else record[f"{GRADIENT}{name}"])
        if not self._exact:
            if call.found_inf is not None and call.found_inf.item():
                return
            call = _on_host(call, gradients)
        double.step(call, gradients)
        prefix = f"{_prefix(self._info, call.optimizer)}.state."
        for name, member in zip(names, double.members, strict=True):
            self._settle(f"{prefix}{name}.", member)

    def _settle(self, prefix: str, member: Member) -> None:
        """State that a step replaced goes to its place in the image."""
        for key, value in member.state.items():
            full = f"{prefix}{key}"
            if full not in self.view.pieces and full not in self._rowless:
                raise Lost(f"{full} is new, and the base has no room for it")
            place = self._place(full)
            if value.data_ptr() != place.data_ptr():
                place.copy_(value)
                member.state[key] = place

    def _write_extras(self, tree: dict[str, Any]) -> None:
        layout, payload = self.view.layout, encode(tree, "state")
        if len(payload) > layout.extras_bytes - 8:
            raise Lost("the extras have outgrown their room")
        room = struct.pack("<Q", len(payload)) + payload
        self.view.memory[layout.extras_offset : layout.extras_offset + len(room)] = room

    # -- is it right

    def _prove(self, record: Record) -> None:
        """Compare with the digest that training took of the same rows."""
        sums = {False: 0, True: 0}
        for piece in self._updated():
            row_elements = piece.length // max(1, piece.extent[0]) if piece.extent else 0
            first = piece.start[0] * row_elements // TORCH_DTYPES[piece.dtype].itemsize if piece.extent else 0
            sums[piece.private] += number(digest(piece.name, self.view[piece.name], first))
        expected = [int(one) % MODULUS for one in record.view[DIGEST].tolist()]
        if [sums[False] % MODULUS, sums[True] % MODULUS] != expected:
            raise Lost(f"at step {record.step} it is not what training had")

    def _updated(self) -> Iterable[Piece]:
        """What optimizers write."""
        names = {name for info in self._info.optimizers for group in info.groups for name in group}
        names.update(full for full, _, _ in _state(self.view, self._info))
        return (piece for piece in self.view.layout.pieces if piece.name in names)

    def drift(self, base: View) -> tuple[int, float]:
        """How many elements that optimizers write have other bits than in a true base, and the largest difference."""
        differing, largest = 0, 0.0
        for piece in self._updated():
            mine, true = self.view[piece.name].reshape(-1), base[piece.name].reshape(-1)
            for at in range(0, mine.numel(), _AT_ONCE):
                some, others = mine[at : at + _AT_ONCE], true[at : at + _AT_ONCE]
                if torch.equal(some.view(torch.uint8), others.view(torch.uint8)):
                    continue
                bits = (some.view(-1, 1).view(torch.uint8) != others.view(-1, 1).view(torch.uint8)).any(1)
                differing += int(bits.sum())
                apart = (some[bits].to(torch.float64) - others[bits].to(torch.float64)).abs()
                largest = max(largest, float(apart.nan_to_num(nan=float("inf")).max()))
        return differing, largest


def _on_host(call: Call, gradients: list[Tensor | None]) -> Call:
    """The host form of an update: no kernels of a device, which also divide by the scaler's scale."""
    if call.scale is not None:
        for gradient in gradients:
            if gradient is not None:
                gradient.div_(call.scale.to(gradient.dtype))
    plain = {"fused": False, "foreach": False, "capturable": False}
    groups = [{key: plain.get(key, value) for key, value in group.items()} for group in call.groups]
    return replace(call, groups=groups, scale=None, found_inf=None)
