"""Gradients on their way from the reductions to the optimizer: copied as soon as DDP has averaged them.

DDP reduces buckets while backward still computes. The tap is its communication hook: it reduces as DDP would, and when
a bucket is there, copies this rank's rows of it into the record, in the order of communication; those of a device
leave it at once. What the optimizer sees is usually what DDP averaged. Where the loop changes
it in between (clipping, unscaling) the tap is of no use and is left alone: gradients are taken in front of step() then.
Which of the two holds is found out by looking, at the bits in the first steps and now and then, by signs in between.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from everstep.capture.bits import cut_up, same_bits
from everstep.capture.copier import Copier
from everstep.capture.form import Form
from everstep.capture.layout import Subjects
from everstep.capture.moments import Moments
from everstep.capture.reductions import has_hook
from everstep.capture.shares import Share
from everstep.events import Sink, TapMoved

_LOOKS, _LOOK_EVERY = 4, 64  # steps at which bits are compared
_version = attrgetter("_version")


class Tap:
    """The communication hooks of a run's DDP models."""

    def __init__(self, subjects: Subjects, copier: Copier, emit: Sink, moments: Moments) -> None:
        self._subjects, self._copier, self._emit, self._moments = subjects, copier, emit, moments
        self._moved = True  # gradients are taken in front of step() instead
        self._form: Form | None = None
        self._slot = -1
        self._targets: dict[int, tuple[Share, list[Tensor]]] = {}
        self._taken: set[int] = set()  # parameters of this step, by id,
        self._closed: set[int] = set()  # and those whose optimizer has stepped
        self._expected, self._looked = -1, 0
        for model in subjects.models:
            while hasattr(model, "_orig_mod"):
                model = model._orig_mod  # type: ignore[assignment]
            if isinstance(model, nn.parallel.DistributedDataParallel) and not has_hook(model) and _multiplies(model):
                model.register_comm_hook(model.process_group, self._hook())
                self._moved = False

    def _hook(self) -> Callable[[object, dist.GradBucket], torch.futures.Future[Tensor]]:
        was_last = True

        def hook(group: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            nonlocal was_last
            assert isinstance(group, dist.ProcessGroup)
            self._moments.reduces()
            flat, parameters = bucket.buffer(), bucket.parameters()
            # in the first pass of a static graph every bucket claims to be the first, and has its parameters
            is_known = flat.layout is torch.strided and (bucket.index() > 0 or was_last)
            was_last = bucket.is_last()
            if flat.layout is torch.strided:
                # as DDP itself does; a division would round otherwise
                flat.mul_(1.0 / group.size() if self._subjects.share is None else self._subjects.share)
            else:
                flat.div_(group.size())
            reduced = dist.all_reduce(flat, group=group, async_op=True).get_future()
            ends_pass = was_last and not flat.is_cuda  # of a device only the launching would be seen

            def take(done: torch.futures.Future[list[Tensor]]) -> Tensor:
                if ends_pass:
                    self._moments.reduced()
                return self._take(parameters, done.value()[0]) if is_known else done.value()[0]

            answer: torch.futures.Future[Tensor] = reduced.then(take)
            return answer

        hook.__annotations__ = {"bucket": dist.GradBucket}  # DDP compares it, and not as a string
        return hook

    # -- for the recorder

    def begin(self, form: Form | None, slot: int | None) -> None:
        """Gradients of the next step go into this slot; None: nowhere."""
        self._taken, self._closed = set(), set()
        if form is not self._form:
            self._form = form
            self._targets = {
                id(parameter): (item, [targets[i] for targets in slots])
                for consumer in (form.consumers if form is not None else ())
                for parameters, shares, slots in zip(
                    consumer.parameters, consumer.shares, zip(*consumer.targets, strict=True), strict=True
                )
                for i, (parameter, item) in enumerate(zip(parameters, shares, strict=True))
            }
        self._slot = -1 if slot is None or self._moved else slot

    def has(self, parameters: list[Tensor], gradients: list[Tensor | None]) -> bool:
        """Whether the record already has what the optimizer is about to see."""
        if self._moved or not self._taken.issuperset(map(id, parameters)):
            return False
        writes = sum(map(_version, (g for g in gradients if g is not None)))
        look = self._looked < _LOOKS or self._looked % _LOOK_EVERY == 0 or writes != self._expected
        self._looked += 1
        if look and not self._is_same(parameters, gradients):
            self._moved = True
            self._emit(TapMoved(reason="gradients are changed between their reduction and optimizer.step()"))
            return False
        self._expected = writes
        return True

    def close(self, parameters: list[Tensor]) -> None:
        """They were consumed: whatever is reduced for them now belongs to nobody, until the next step begins."""
        if self._slot >= 0:
            self._closed.update(map(id, parameters))

    def _is_same(self, parameters: list[Tensor], gradients: list[Tensor | None]) -> bool:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            item, slots = self._targets[id(parameter)]
            if gradient is not None and not same_bits(slots[self._slot], item.source(gradient)):
                return False
        return True

    # -- whatever thread completes a reduction

    @torch.no_grad()
    def _take(self, parameters: list[Tensor], flat: Tensor) -> Tensor:
        form = self._form
        if form is None or self._slot < 0:
            return flat
        open_ = self._targets.keys() - self._closed
        found = [(p, piece) for p, piece in zip(parameters, cut_up(flat, parameters), strict=True) if id(p) in open_]
        if not found:
            return flat
        form.record.await_drain(self._copier)
        targets = [self._targets[id(p)][1][self._slot] for p, _ in found]
        sources = [
            self._targets[id(p)][0].source(piece.as_strided(p.shape, p.stride(), piece.storage_offset()))
            for p, piece in found
        ]
        torch._foreach_copy_(targets, sources)
        form.record.drain_early(self._slot, targets, self._copier)
        self._taken.update(id(p) for p, _ in found)
        return flat


def _multiplies(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Whether DDP averages as the tap does: it divides gradients that lie in its buckets already, as only it knows."""
    return not ddp.gradient_as_bucket_view or ddp.process_group.size().bit_count() == 1
