"""Host memory that a device reads and writes by itself, at the speed of the link."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from everstep.capture.host import populate
from everstep.capture.layout import Subjects
from everstep.events import Degraded, Sink
from everstep.types import Room

_WORTH_BYTES = 32 << 20  # less is copied as fast without
_NEAR_BYTES = 1 << 20  # what lies closer together is pinned at once
_PAGE = 4096


def cuda_devices(subjects: Subjects) -> set[torch.device]:
    """Those that parameters lie on."""
    parameters = [p for _, module in subjects.named_modules() for p in module.parameters()]
    parameters += [p for optimizer in subjects.optimizers for group in optimizer.param_groups for p in group["params"]]
    return {p.device for p in parameters if p.is_cuda}


def pin(flats: list[Tensor], emit: Sink) -> list[Tensor]:
    """What is pinned from now on, until unpin(): all, or nothing."""
    for at, flat in enumerate(flats):
        status = _register(flat.data_ptr(), flat.numel())
        if status != 0:
            unpin(flats[:at])
            reason = f"cudaHostRegister answered {status}; copies are slower. Raise the memlock limit."
            emit(Degraded(what="shared memory is not pinned", reason=reason))
            return []
    return flats


def unpin(flats: list[Tensor]) -> None:
    for flat in flats:
        torch.cuda.cudart().cudaHostUnregister(flat.data_ptr())


@contextmanager
def pinned_until_let_go(devices: Collection[torch.device], make: Room) -> Iterator[Room]:
    """Makes memory for what is read now and copied to devices later, and pins it while it is filled.

    At the end all that was made is pinned, or cannot be. Whoever lets go of it has waited for the copies.
    """
    if not devices:
        yield make
        return
    device, pinning = min(devices, key=str), list[Future[None]]()
    with ThreadPoolExecutor(1, "everstep-pin") as pool:

        def finish() -> None:
            while pinning:
                pinning.pop().result()

        def room(size: int) -> memoryview:
            finish()  # which holds the room before this one, though that may have been of no use
            if size < _WORTH_BYTES:
                return make(size)
            memory = make(size)
            shown = np.frombuffer(memory, np.uint8)
            pinning.append(pool.submit(_pin_for_life, shown, memory, device))
            return shown.data

        yield room
        finish()


def _pin_for_life(shown: npt.NDArray[np.uint8], memory: memoryview, device: torch.device) -> None:
    """Pinned for as long as anybody looks into `shown`. Nobody else has `memory`, so that it is still there then."""
    begin = shown.ctypes.data
    with torch.cuda.device(device):  # this thread would else begin with the first one, which may be somebody else's
        if _register(begin, shown.nbytes) == 0:
            weakref.finalize(shown, _unregister, begin, device, memory).atexit = False


def _unregister(begin: int, device: torch.device, memory: memoryview) -> None:
    """`memory`: only to hold it until now."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(begin)


@contextmanager
def pinned_for(devices: Collection[torch.device], sources: Iterable[Tensor]) -> Iterator[None]:
    """While large amounts are copied to devices; at the end they are there. What cannot be pinned is copied slower."""
    spans = _spans(sources) if devices else []
    begins: list[int] = []
    try:
        if sum(size for _, size in spans) >= _WORTH_BYTES:
            populate(spans)  # pages that are mapped are pinned three times as fast
            begins += (begin for begin, size in spans if _register(begin, size) == 0)
        yield
    finally:
        for device in devices:
            torch.cuda.synchronize(device)
        for begin in begins:
            torch.cuda.cudart().cudaHostUnregister(begin)


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


def _register(begin: int, size: int) -> int:
    """0, or what is wrong."""
    status = int(torch.cuda.cudart().cudaHostRegister(begin, size, 0))
    if status != 0:
        try:
            torch.zeros(1, device="cuda")  # torch asks for the last error after every kernel: let it be this one
        except RuntimeError:
            pass
    return status
