"""How others keep a training loop on one device, behind the face of bench/gpu_methods.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gpu_models
import torch
from common import timed
from gpu_methods import Kept, Method, timed_steps
from gpu_models import Case
from log_peers import CheckFreq, TorchSave
from peers import DcpAsync, DcpStaged, Saver, empty
from torch import Tensor


class Peer(Method):
    """Whoever saves when it is told to: every `interval` steps, one in flight."""

    def save(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Until nothing is in flight."""

    def gate(self, *_: object) -> None:
        """What the next update waits for."""

    def block(self, steps: int) -> float:
        at = 0

        def before() -> None:
            nonlocal at
            if at % self.interval == 0:
                self.finish()
                with timed() as call:
                    self.save()
                self.found.done_s.append(call.seconds)
                self.found.kept += 1
            at += 1

        handle = self.case.optimizer.register_step_pre_hook(self.gate)
        try:
            seconds = timed_steps(self.case, steps, before=before, end=self.finish)
        finally:
            handle.remove()
        self.found.steps += steps
        return seconds

    def bytes(self) -> int:
        """Of one save."""
        raise NotImplementedError

    def result(self) -> Kept:
        size = self.bytes()
        return replace(self.found, durable=self.found.kept, bytes_moved=size, bytes_written=size)

    def close(self) -> None:
        self.finish()


class CheckFreqs(Peer):
    name = "CheckFreq's method"

    def __init__(self, case: Case, root: Path, interval: int) -> None:
        super().__init__(case, root, interval)
        self._peer = CheckFreq(case.model, case.optimizer, root)
        self.gate = self._peer.gate  # type: ignore[method-assign]
        self._peer.prepare()

    def save(self) -> None:
        self._peer.done()

    def finish(self) -> None:
        self._peer.settle()

    def bytes(self) -> int:
        return self._peer.bytes


class TorchSaves(Peer):
    name = "torch.save"
    overlaps = False

    def __init__(self, case: Case, root: Path, interval: int) -> None:
        super().__init__(case, root, interval)
        self._peer = TorchSave(case.model, case.optimizer, root)

    def save(self) -> None:
        self._peer.done()

    def block(self, steps: int) -> float:
        before = self._peer.sync_s
        seconds = super().block(steps)
        self.sync_s = (self._peer.sync_s - before) / steps
        return seconds

    def bytes(self) -> int:
        return self._peer.bytes


class Whole:
    """The state as the peers are given it: every tensor, flat."""

    def __init__(self, case: Case) -> None:
        self._case, self.optimizer = case, case.optimizer

    def state(self) -> dict[str, Tensor]:
        found = {f"model.{name}": tensor for name, tensor in self._case.model.state_dict().items()}
        for at, values in enumerate(self.optimizer.state.values()):
            found |= {f"optimizer.{at}.{key}": value for key, value in values.items() if isinstance(value, Tensor)}
        return found


class Dcp(Peer):
    """As users call it: the next save waits for the last upload."""

    name = "DCP async_save"
    saver: type[Saver] = DcpAsync

    def __init__(self, case: Case, root: Path, interval: int) -> None:
        super().__init__(case, root, interval)
        self._peer = self.saver(Whole(case), root)  # type: ignore[arg-type]
        self._where: Path | None = None
        self._saves = 0
        self._warm_up()

    def _warm_up(self) -> None:
        """What it makes only once has nothing to do with the state: that is copied anew by every save."""
        try_out(self.saver, self.root)

    def save(self) -> None:
        self._saves += 1
        self._where = empty(self.root / f"dcp-{self._saves % 2}")  # the one before stays
        self._peer.save(self._where)

    def gate(self, *_: object) -> None:
        self._peer.gate()

    def finish(self) -> None:
        if self._where is not None:
            self._peer.durable(self._where)  # DCP syncs its files; the folder is a moment's work
            self._where = None

    def bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.root / "dcp-1").rglob("*"))

    def close(self) -> None:
        self.finish()
        self._peer.close()


class DcpTuned(Dcp):
    name = "DCP async_save, pinned and staged"
    saver = DcpStaged

    def _warm_up(self) -> None:
        """Pinned memory for the state, too: it is taken once."""
        super()._warm_up()
        self.save()
        self.finish()


def try_out(kind: type[Saver], root: Path) -> None:
    """A save of a few bytes."""

    class Little:
        def state(self) -> dict[str, Tensor]:
            return {"little": torch.zeros(8, device=gpu_models.DEVICE)}

    saver, where = kind(Little(), root), empty(root / "little")  # type: ignore[arg-type]
    try:
        saver.save(where)
        saver.gate()
        saver.durable(where)
    finally:
        saver.close()


OTHERS: tuple[type[Method], ...] = (CheckFreqs, DcpTuned, Dcp, TorchSaves)
