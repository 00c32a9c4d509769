"""Training on compressed gradients: where the compressor sits.

Under DDP it is the communication hook, so that less is sent. Elsewhere it stands in front of the optimizer's step: the
gradient that is about to be applied is replaced by what the packed form can hold. Either way what the optimizer sees
comes back from the packed form bit for bit, unless somebody changes it in between: `changed` finds that out.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from everstep.capture.bits import cut_up, same_bits
from everstep.capture.compressor import Compressor, communication_hook
from everstep.capture.hooks import around_step
from everstep.capture.layout import Subjects, ddp_of
from everstep.capture.reductions import has_hook
from everstep.errors import BadConfig

_grad, _version = attrgetter("grad"), attrgetter("_version")


class Compression:
    """A compressor at work on all gradients of a run."""

    def __init__(self, subjects: Subjects, compressor: Compressor) -> None:
        self.compressor = compressor
        compressor.bind(subjects.names())
        replicated = [ddp for ddp in map(ddp_of, subjects.models) if ddp is not None]
        hooked = {id(p) for model in replicated for p in model.parameters()}
        for model in replicated:
            if has_hook(model):
                raise BadConfig("compress= needs the communication hook of DDP, and one is registered already")
            model.register_comm_hook(None, communication_hook(compressor, model.process_group))
        self._buffers: dict[str, tuple[Tensor, list[Tensor]]] = {}  # flat, and a piece for each parameter
        self._kinds: dict[int, dict[Any, list[Tensor]]] = {}
        self._handles: list[RemovableHandle] = []
        for i, optimizer in enumerate(subjects.optimizers):
            plain = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in hooked and p.requires_grad]
            for parameter in plain:
                self._kinds.setdefault(i, {}).setdefault((parameter.device, parameter.dtype), []).append(parameter)
            if plain:
                self._handles += around_step(optimizer, partial(self._squeeze, i))
        self._expected = -1  # how often the gradients are written between the compressor and the step
        self.skipped = ""  # why the gradients of this step are not compressed

    @torch.no_grad()
    def _squeeze(self, index: int, *_: object) -> None:
        """Replace the gradients that an optimizer is about to consume."""
        for number, parameters in enumerate(self._kinds[index].values()):
            gradients = list(map(_grad, parameters))
            if any(g is None or g.layout is not torch.strided for g in gradients):
                self.skipped = "a parameter has no gradient, so none of this step were compressed"
                return
            key = f"{index}.{number}"
            if key not in self._buffers:
                self._buffers[key] = self._make_buffer(key, parameters, gradients[0])
            flat, pieces = self._buffers[key]
            torch._foreach_copy_(pieces, gradients)
            self.compressor.packed[key] = (parameters, self.compressor.reduce(flat, key, None))
            torch._foreach_copy_(gradients, pieces)

    def _make_buffer(self, key: str, parameters: list[Tensor], like: Tensor) -> tuple[Tensor, list[Tensor]]:
        self.compressor.lay_out(key, parameters)
        flat = torch.empty(sum(p.numel() for p in parameters)).to(like)
        return flat, [piece.view(p.shape) for piece, p in zip(cut_up(flat, parameters), parameters, strict=True)]

    @torch.no_grad()
    def changed(self, *, look: bool) -> bool:
        """Whether DDP's gradients are no longer what was packed. `look`: at the bits, and not only for signs."""
        hooked = {k: one for k, one in self.compressor.packed.items() if k not in self._buffers}
        gradients = [p.grad for parameters, _ in hooked.values() for p in parameters]
        writes = sum(map(_version, (g for g in gradients if g is not None)))
        if not look and writes == self._expected:
            return False
        self._expected = writes
        for parameters, packed in hooked.values():
            if any(p.grad is None for p in parameters):
                return True
            flat = torch.empty(sum(p.numel() for p in parameters)).to(parameters[0].grad)
            self.compressor.unpack(packed, flat)
            pieces = zip(cut_up(flat, parameters), parameters, strict=True)
            if not all(same_bits(piece, p.grad) for piece, p in pieces if p.grad is not None):
                return True
        return False

    def end_step(self) -> None:
        self.compressor.begin_step()
        self.skipped = ""

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
