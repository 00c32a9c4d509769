"""The ways to keep a training loop on one device, behind one face: Everstep's own, and those of others.

A method keeps every `interval`-th step. A block of its steps is timed by `block`, which ends as the next one of its
kind would begin: whoever has one save in flight has waited for it by then.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import gpu_models
import torch
from common import timed
from gpu_models import Case
from log_peers import CheckFreq, TorchSave
from log_turns import end_watch, hooks_now, hooks_of, nothing, troubles
from peers import DcpAsync, DcpStaged, Saver, empty, end_keeper
from torch import Tensor

import everstep
from everstep.events import Degraded, Persisted, Skipped, read_events
from everstep.keeper.pace import OUTPACED

FIRST_BASE_S = 90.0  # for the largest state on a slow disk
RING_S = 30.0  # for the records of the last steps to be written
CHAIN_S = 1.5  # of a block of whole gradients: longer than the ring of most models


@dataclass
class Kept:
    """What blocks of a method have left behind."""

    steps: int = 0
    kept: int = 0  # of them: they survive the process, or with others are written
    durable: int = 0  # on the disk, synced
    done_s: list[float] = field(default_factory=list)  # one call
    bytes_moved: float = 0.0  # for one that is kept
    bytes_written: float = 0.0
    troubles: list[str] = field(default_factory=list)


class Method:
    """One way. `sync_s`: seconds a step of the last block that only went into being durable."""

    name = ""
    overlaps = True  # whether training goes on while one is saved
    is_reusable = True  # whether one object may keep a loop at several intervals, one after another
    sync_s = 0.0
    least_s = 0.0  # of a block, to see more than one step that is kept

    def __init__(self, case: Case, root: Path, interval: int) -> None:
        self.case, self.root = case, root
        self.begin(interval)

    def begin(self, interval: int) -> None:
        """Whatever comes now is counted for this interval."""
        self.interval, self.found = interval, Kept()

    def block(self, steps: int) -> float:
        """Seconds a step, of so many that are kept as the method does it."""
        raise NotImplementedError

    def plain(self, steps: int) -> float:
        """Seconds a step, of as many that are not."""
        return timed_steps(self.case, steps)

    def result(self) -> Kept:
        """Of all blocks since the interval was given."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of everything."""


def timed_steps(
    case: Case,
    steps: int,
    *,
    before: Callable[[], None] = nothing,
    after: Callable[[], object] = nothing,
    end: Callable[[], None] = nothing,
) -> float:
    """Seconds a step on the stream of training, from the middle of a loop; `end` comes before the clock stops."""
    for _ in range(case.lead):
        case.step()
        after()
    on_device = gpu_models.DEVICE == "cuda"
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_device else []
    began = time.time()
    with timed() as timer:
        for event in events[:1]:
            event.record()
        for _ in range(steps):
            before()
            case.step()
            after()
        end()
        for event in events[1:]:
            event.record()
            event.synchronize()
    case.timed = (began, time.time())
    return (events[0].elapsed_time(events[1]) / 1e3 if events else timer.seconds) / steps


# -- Everstep


class Everstep(Method):
    """In one of its modes or strategies."""

    is_reusable = False
    options: ClassVar[dict[str, Any]] = {"strategy": "snapshot"}
    every: int | str = "1h"  # how often the keeper writes a base

    def __init__(self, case: Case, root: Path, interval: int) -> None:
        super().__init__(case, root, interval)
        self._not_ours = hooks_now(case.optimizer)
        self.run = everstep.guard(
            case.model, case.optimizer, dir=root / "run", lose_at_most=interval, linger="1s", keep=1,
            tiers=[*self.memory(), everstep.Disk(every=self.every)], **self.options,
        )  # fmt: skip
        self._kept: set[int] = set()
        self._behind = 0  # steps, at most
        for _ in range(max(8, 3 * interval)):  # the first captures make arenas, try optimizers and are watched
            case.step()
            self.run.done()
        self._until_a_base_is_written()
        end_watch(self.run)

    def memory(self) -> list[Any]:
        return []

    def _until_a_base_is_written(self) -> None:
        """The keeper begins with one, and writes no other unasked: asking for the newest step would write two.

        Of records it has to have all, or the ring is full before anything is timed.
        """
        if self.run._keeping.recorder is not None:
            self.run.wait("durable", timeout=FIRST_BASE_S)
            return
        deadline = time.monotonic() + FIRST_BASE_S
        while self.run.status()["durable_step"] is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no base was on the disk after {FIRST_BASE_S:.0f} s")
            time.sleep(0.02)

    def plain(self, steps: int) -> float:
        """Without any hook of ours; one that compresses gradients is not ours alone, and stays."""
        compression = self.run._keeping.compression
        with hooks_of(self.case.optimizer, self._not_ours, *([compression] if compression is not None else [])):
            end_step = compression.end_step if compression is not None else nothing
            return timed_steps(self.case, steps, after=end_step)

    def block(self, steps: int) -> float:
        self.case.step()
        self.run.done()
        self.run.wait("sealed")  # after plain steps this is a base, and records lead on from it
        seconds = timed_steps(self.case, steps, after=self._done)
        self.found.steps += steps + self.case.lead
        durable_step = self.run.status()["durable_step"]
        self._behind = max(self._behind, self.run.step - (durable_step if isinstance(durable_step, int) else 0))
        self.run.wait("sealed")
        return seconds

    def _done(self) -> None:
        with timed() as call:
            self.run.done()
        self.found.done_s.append(call.seconds)
        recorder = self.run._keeping.recorder
        is_lost = recorder is not None and recorder.whole_since == self.run.step  # not by a record, that is
        if self.run._keeping.last_step == self.run.step and not is_lost:
            self._kept.add(self.run.step)

    def result(self) -> Kept:
        found, recorder, arena = self.found, self.run._keeping.recorder, self.run._capture.arena()
        record_bytes = recorder.record_bytes if recorder is not None else 0
        heavy = recorder._form.heavy if recorder is not None and recorder._form is not None else None
        if recorder is not None and not self._is_outpaced():
            self.run.wait("durable", timeout=RING_S)  # of what the ring still holds
        durable_step = self.run.status()["durable_step"]
        self.close()
        events = read_events(self.root / "run")
        skipped = {event.step for event in events if isinstance(event, Skipped)}
        kept = self._kept - skipped
        found.kept = len(kept)
        written = {event.step: event.bytes for event in events if isinstance(event, Persisted)}
        if recorder is not None:
            found.bytes_moved = record_bytes + (heavy[0].arena.slot_bytes if heavy is not None else 0)  # and residuals
            found.bytes_written = record_bytes
            found.durable = sum(step <= durable_step for step in kept) if isinstance(durable_step, int) else 0
            if self._is_outpaced():
                found.durable = len(kept & written.keys())  # by bases only
        else:
            found.bytes_moved = arena.slot_bytes if arena is not None else 0
            found.bytes_written = max(written.values(), default=0) if self.every == 1 else 0  # of a step: not the base
            found.durable = len(kept & written.keys())
        found.troubles = troubles(self.root / "run")
        if recorder is not None:
            found.troubles.append(f"at the end of a block up to {self._behind} steps were not on the disk")
        return found

    def _is_outpaced(self) -> bool:
        """Whether records stay in memory, and only bases become durable."""
        return any(isinstance(event, Degraded) and event.what == OUTPACED for event in read_events(self.root / "run"))

    def close(self) -> None:
        """Without a last base, which takes as long as the disk needs for it, and at once."""
        if self.run.give_up():
            end_keeper(self.run.status()["run"])  # type: ignore[arg-type]


class Host(Everstep):
    name = "Everstep, host"


class Device(Everstep):
    name = "Everstep, device"
    options: ClassVar = {"strategy": "snapshot", "mode": "device"}


class Direct(Everstep):
    """A folder in shared memory stands for persistent memory."""

    name = "Everstep, direct"
    options: ClassVar = {"strategy": "snapshot", "mode": "direct"}

    def memory(self) -> list[Any]:
        self._path = tempfile.mkdtemp(prefix="everstep-bench-", dir="/dev/shm")
        return [everstep.Memory(path=self._path)]

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._path, ignore_errors=True)


class OnDisk(Everstep):
    """A step is captured when the one before is durable."""

    name = "Everstep, disk"
    options: ClassVar = {"strategy": "snapshot", "mode": "disk"}
    every = 1

    @property
    def least_s(self) -> float:  # type: ignore[override]
        return 2.2 * self.run._keeper.base_write_s


class DenseLog(Everstep):
    """Where the disk is too slow for it bases are taken often: through spare device memory."""

    name = "Everstep, dense log"
    options: ClassVar = {"strategy": "log", "mode": "device"}
    least_s = CHAIN_S


class TopKLog(Everstep):
    """Over training that compresses its gradients: what the log adds to that."""

    name = "Everstep, log of top-k"

    def __init__(self, case: Case, root: Path, interval: int) -> None:
        self.options = {"strategy": "log", "compress": everstep.compress.TopK(0.01)}  # type: ignore[misc]
        super().__init__(case, root, interval)


class Replica(Everstep):
    name = "Everstep, replica"
    options: ClassVar = {"strategy": "replica"}
    least_s = CHAIN_S

    def result(self) -> Kept:
        where: Any = self.run.status()["replica"]
        found = super().result()
        # It has not seen the plain steps, so it finds itself wrong at the next base.
        found.troubles = [trouble for trouble in found.troubles if not trouble.startswith("the replica was wrong")]
        return replace(found, troubles=[*found.troubles, f"{where['behind']} steps behind" if where else "no replica"])


# -- others


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
        self._peer.done()  # pinned memory is made once
        self._peer.settle()

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
        self.save()  # what it makes only once
        self.finish()

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


OURS: tuple[type[Method], ...] = (Host, Device, Direct, OnDisk, DenseLog, TopKLog, Replica)
IN_MEMORY = (Host, Device, Direct)  # of ours: a step is on the disk only if it is a base
OTHERS: tuple[type[Method], ...] = (CheckFreqs, DcpTuned, Dcp, TorchSaves)
