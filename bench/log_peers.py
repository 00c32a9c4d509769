"""Other ways to have every step on a disk, each with `done`, `behind`, `settle` and the bytes of a step."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def save(what: object, path: Path) -> tuple[int, float]:
    """torch.save, synced and in place of what was there, so that a crash leaves one or the other.

    Its bytes, and the seconds that the syncing took.
    """
    temporary = path.with_suffix(".new")
    with temporary.open("wb") as file:
        torch.save(what, file)
        began = time.perf_counter()
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    return path.stat().st_size, time.perf_counter() - began


class TorchSave:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, root: Path) -> None:
        self._model, self._optimizer, self._path = model, optimizer, root / "whole.pt"
        self.bytes, self.sync_s = 0, 0.0  # of one, and of all

    def done(self) -> None:
        self.bytes, seconds = save([self._model.state_dict(), self._optimizer.state_dict()], self._path)
        self.sync_s += seconds


class CheckFreq:
    """A whole snapshot a step, one in flight: copied beside the next forward and backward, then written by a thread.

    The next update waits for the copy (`gate`), and the next snapshot for the write. From a device it goes into pinned
    memory on a stream of its own, and only the stream of training waits.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, root: Path) -> None:
        self._model, self._optimizer, self._path = model, optimizer, root / "snapshot.pt"
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None
        self._copy: list[Tensor] = []
        self._step = self._durable = 0
        self._side = torch.cuda.Stream() if next(model.parameters()).is_cuda else None
        self.bytes = 0

    def done(self) -> None:
        self.settle()
        self._step += 1
        self._copied.clear()
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
        self._thread = threading.Thread(target=self._persist, args=(self._step,))
        self._thread.start()

    def gate(self, *_: object) -> None:
        self._copied.wait()
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)

    def prepare(self) -> list[Tensor]:
        """The state; memory for its copy is made once."""
        state = tensors_of(self._model, self._optimizer)
        if len(self._copy) != len(state):
            self._copy = [torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for t in state]
        return state

    @torch.no_grad()
    def _persist(self, step: int) -> None:
        state = self.prepare()
        with torch.cuda.stream(self._side):  # without a side this does nothing
            torch._foreach_copy_(self._copy, state, non_blocking=True)
        self._copied.set()
        if self._side is not None:
            self._side.synchronize()
        self.bytes, _ = save(self._copy, self._path)
        self._durable = step

    def behind(self) -> int:
        return self._step - self._durable

    def settle(self) -> None:
        if self._thread is not None:
            self._thread.join()


class Differences:
    """What changed since the step before, the largest hundredth of it. It is not exact: the rest is lost."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, root: Path, ratio: float) -> None:
        self._model, self._optimizer, self._root, self._ratio = model, optimizer, root, ratio
        self._before: Tensor | None = None
        self._step = 0
        self.bytes = 0

    @torch.no_grad()
    def done(self) -> None:
        now = _flat(self._model, self._optimizer)
        if self._before is None:
            self._before = now
            return
        difference = self._before.sub_(now)
        chosen = torch.topk(difference.abs(), round(self._ratio * len(now)), sorted=False).indices
        self._step += 1
        what = [chosen.to(torch.int32), difference[chosen]]
        self.bytes, _ = save(what, self._root / f"difference-{self._step % 100}.pt")
        self._before = now

    def settle(self) -> None:
        self._before = None  # others train now: what they change is no difference of ours


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state: list[Any] = [value for one in optimizer.state.values() for value in one.values()]
    return [*(p.detach() for p in model.parameters()), *(value for value in state if isinstance(value, Tensor))]


def _flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors_of(model, optimizer)])
