"""Host memory that a device reads and writes by itself, at the speed of the link."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from everstep.capture.host import populate
from everstep.capture.layout import Subjects
from everstep.events import Degraded, Sink
from everstep.mapped import Mapped
from everstep.types import Room

_WORTH_BYTES = 32 << 20  # less is copied as fast without
_NEAR_BYTES = 1 << 20  # what lies closer together is pinned at once
_PAGE = 4096


def cuda_devices(subjects: Subjects) -> set[torch.device]:
    """Those that parameters lie on. Module.parameters() would make a name for each, which takes as long as a copy."""
    modules = (module for _, whole in subjects.named_modules() for module in whole.modules())
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    parameters += [p for optimizer in subjects.optimizers for group in optimizer.param_groups for p in group["params"]]
    return {p.device for p in parameters if p.is_cuda}


def pin(memory: Sequence[Mapped], devices: Collection[torch.device], emit: Sink) -> bool:
    """Until it is unpinned or unmapped: all of it, or nothing."""
    for one in memory:
        status = pin_first(len(one), one, devices)
        if status != 0:
            for other in memory:
                other.unpin()
            reason = f"cudaHostRegister answered {status}; copies are slower. Raise the memlock limit."
            emit(Degraded(what="shared memory is not pinned", reason=reason))
            return False
    return True


def pin_first(size: int, memory: Mapped, devices: Collection[torch.device]) -> int:
    """Of one, the first bytes: 0, or what is wrong."""
    begin, device = memory.span[0], min(devices, key=str)  # a thread would begin with one that may be somebody else's
    return memory.pin(size, partial(_register, begin, size, device), partial(_unregister, begin, device))


@contextmanager
def pinned_until_let_go(devices: Collection[torch.device], make: Room) -> Iterator[Room]:
    """Makes memory for what is read now and copied to devices later, and pins it while it is filled.

    At the end all that was made is pinned, or cannot be. Whoever lets go of it has waited for the copies.
    """
    if not devices:
        yield make
        return
    made, pinning = list[Mapped](), list[Future[int]]()
    with ThreadPoolExecutor(1, "everstep-pin") as pool:

        def pin_made() -> int:
            one = made.pop()  # nobody holds it when this is over: it may have been made in vain
            return pin_first(len(one), one, devices)

        def finish() -> None:
            while pinning:
                pinning.pop().result()

        def room(size: int) -> memoryview:
            finish()
            memory = make(size)
            if size >= _WORTH_BYTES and isinstance(memory.obj, Mapped):
                made.append(memory.obj)
                pinning.append(pool.submit(pin_made))
            return memory

        yield room
        finish()


@contextmanager
def pinned_for(devices: Collection[torch.device], sources: Iterable[Tensor]) -> Iterator[None]:
    """While large amounts are copied to devices; at the end they are there. What cannot be pinned is copied slower."""
    if not devices:
        yield
        return
    spans, begins, device = _spans(sources), list[int](), min(devices, key=str)
    try:
        if sum(size for _, size in spans) >= _WORTH_BYTES:
            populate(spans)  # pages that are mapped are pinned three times as fast
            for begin, size in spans:
                begins.append(begin)
                if _register(begin, size, device) != 0:
                    begins.pop()
        yield
    finally:
        try:
            for one in devices:
                torch.cuda.synchronize(one)
        finally:
            for begin in begins:
                _unregister(begin, device)


def _spans(sources: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Address and size of whole pages in which tensors of the host lie; not where the first of them is pinned already.

    To ask of each would take longer than to copy many that are small.
    """
    tensors = sorted((s for s in sources if s.nbytes and not s.is_cuda), key=Tensor.data_ptr)
    if not tensors:
        return []
    addresses = np.fromiter(map(Tensor.data_ptr, tensors), np.int64)
    sizes = np.fromiter(map(attrgetter("nbytes"), tensors), np.int64)
    begins = addresses // _PAGE * _PAGE
    ends = np.maximum.accumulate(-(-(addresses + sizes) // _PAGE) * _PAGE)
    firsts = np.flatnonzero(np.append(True, begins[1:] > ends[:-1] + _NEAR_BYTES))
    lasts = np.append(firsts[1:], len(tensors)) - 1
    return [
        (int(begins[first]), int(ends[last] - begins[first]))
        for first, last in zip(firsts, lasts, strict=True)
        if not tensors[first].is_pinned()
    ]


def _register(begin: int, size: int, device: torch.device) -> int:
    """0, or what is wrong."""
    with torch.cuda.device(device):
        return _heard(int(torch.cuda.cudart().cudaHostRegister(begin, size, 0)))


def _unregister(begin: int, device: torch.device) -> None:
    try:
        with torch.cuda.device(device):
            _heard(int(torch.cuda.cudart().cudaHostUnregister(begin)))
    except RuntimeError:
        pass  # the device is lost, and all that it knew


def _heard(status: int) -> int:
    """Torch asks for the last error after every kernel: let it not be this one, of which the next would hear."""
    if status != 0:
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError:
            pass  # it has been heard now
    return status
