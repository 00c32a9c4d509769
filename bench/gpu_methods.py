"""The ways to keep a training loop on one device, behind one face: Everstep's own. Those of others: gpu_peers.py.

A method keeps every `interval`-th step. A block of its steps is timed by `block`, which ends as the next one of its
kind would begin: whoever has one save in flight has waited for it by then.
"""

from __future__ import annotations

import os
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
from log_peers import tensors_of
from log_turns import end_watch, hooks_now, hooks_of, nothing, troubles
from peers import end_keeper

import everstep
from everstep.cadence import Every
from everstep.events import Degraded, Persisted, Skipped, read_events
from everstep.keeper.pace import OUTPACED

FIRST_BASE_S = 90.0  # for the largest state on a slow disk
RING_S = 30.0  # for the records of the last steps to be written
REPLICA_S = 15.0  # until it is there: its process loads torch
STILL_S = 1.0  # that it says nothing new: more than one of its steps takes
CHAIN_S = 1.0  # of a block of whole gradients: longer than the ring of most models
WARM_STEPS, WARM_RECORDS = 8, 5  # before anything is timed: of most, and where a record takes the disk a while
LARGE_RECORD_BYTES = 10**9
LARGE_STATE_BYTES = 10**10  # of which three slots take longer than all that is timed, and more than most machines have
SHM = Path("/dev/shm")


UNIT = "EVERSTEP_BENCH_UNIT"  # in the environment of all that one call of bench/gpu.py starts


def folder_prefix() -> str:
    """So that whoever has to end a call knows what it leaves in shared memory."""
    return f"everstep-bench-{os.environ.get(UNIT, '')}-"


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
    saves_when_told = True  # at every step that it is asked for, however long that takes
    stays_in_memory = False  # nothing of it is written but what it begins with
    sync_s = 0.0
    least_s = 0.0  # of a block, to see more than one step that is kept

    def __init__(self, case: Case, root: Path, interval: int) -> None:
        self.case, self.root = case, root
        self.begin(interval)

    def begin(self, interval: int) -> None:
        """Whatever comes now is counted for this interval."""
        self.interval, self.found = interval, Kept()

    def goes_on(self, interval: int) -> bool:
        """Whether the same object can keep the loop at another interval from now on."""
        return True

    @classmethod
    def needs(cls, state: int, gradient: int, slots: int) -> tuple[float, float]:
        """Bytes of memory and of disk, about: others have a copy of the state, and the file before the newest."""
        return 1.1 * state, 2.1 * state

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


def state_bytes(case: Case) -> int:
    """Once the optimizer has stepped."""
    return sum(tensor.nbytes for tensor in tensors_of(case.model, case.optimizer))


def slots_for(state: int) -> int | None:
    """None: as many as Everstep takes by itself."""
    return 2 if state >= LARGE_STATE_BYTES else None


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

    saves_when_told = False
    options: ClassVar[dict[str, Any]] = {"strategy": "snapshot"}
    every: int | str = "1h"  # how often the keeper writes a base

    def __init__(self, case: Case, root: Path, interval: int) -> None:
        super().__init__(case, root, interval)
        self._not_ours = hooks_now(case.optimizer)
        self._slots = slots_for(state_bytes(case))
        self.run = everstep.guard(
            case.model, case.optimizer, dir=root / "run", lose_at_most=interval, linger="1s", keep=1,
            tiers=[*self.memory(), everstep.Disk(every=self.every)], **self.options,
        )  # fmt: skip
        try:
            self._warm_up()
        except BaseException:  # nobody has it yet who would close it
            self.close()
            raise

    def _warm_up(self) -> None:
        """The first captures make arenas, try optimizers and are watched."""
        recorder = self.run._keeping.recorder
        for at in range(max(WARM_STEPS, 3 * self.interval)):
            self.case.step()
            self.run.done()
            if at + 1 == WARM_RECORDS and recorder is not None and recorder.record_bytes >= LARGE_RECORD_BYTES:
                break  # all of them have to be written before anything is timed
        self._until_a_base_is_written()
        end_watch(self.run)

    def begin(self, interval: int) -> None:
        super().begin(interval)
        self._by_record: set[int] = set()  # steps that survive by one,
        self._by_base: set[int] = set()  # or by a base of their own
        self._behind = 0  # steps, at most

    def goes_on(self, interval: int) -> bool:
        """Bases in memory are taken when they are due, and nothing else depends on that."""
        if self.stays_in_memory:
            object.__setattr__(self.run.settings, "capture", Every(steps=interval))
        return self.stays_in_memory

    @classmethod
    def needs(cls, state: int, gradient: int, slots: int) -> tuple[float, float]:
        return slots * state, 1.1 * state

    def memory(self) -> list[Any]:
        return [everstep.Memory(slots=self._slots)] if self._slots else []

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
        recorder, step = self.run._keeping.recorder, self.run.step
        if recorder is not None and recorder.whole_since < step:
            self._by_record.add(step)
        elif self.run._capture.base_step == step:  # if it is not skipped
            self._by_base.add(step)

    def result(self) -> Kept:
        found, recorder, arena = self.found, self.run._keeping.recorder, self.run._capture.arena()
        record_bytes = recorder.record_bytes if recorder is not None else 0
        heavy = recorder._form.heavy if recorder is not None and recorder._form is not None else None
        if recorder is not None and not self._is_outpaced():
            self.run.wait("durable", timeout=RING_S)  # of what the ring still holds
        durable_step = self.run.status()["durable_step"]
        events = read_events(self.root / "run")
        skipped = {event.step for event in events if isinstance(event, Skipped)}
        by_base = self._by_base - skipped
        kept = self._by_record | by_base
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
            found.troubles += [f"{len(by_base)} of them by bases of their own"] if by_base else []
            found.troubles.append(f"at the end of a block up to {self._behind} steps were not on the disk")
        if self._slots:
            found.troubles.append(f"with Memory(slots={self._slots})")
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
    stays_in_memory = True


class Device(Everstep):
    name = "Everstep, device"
    stays_in_memory = True
    options: ClassVar = {"strategy": "snapshot", "mode": "device"}


class Direct(Everstep):
    """A folder in shared memory stands for persistent memory."""

    name = "Everstep, direct"
    stays_in_memory = True
    options: ClassVar = {"strategy": "snapshot", "mode": "direct"}

    def memory(self) -> list[Any]:
        self._path = tempfile.mkdtemp(prefix=folder_prefix(), dir=SHM)
        return [everstep.Memory(path=self._path, slots=self._slots)]

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._path, ignore_errors=True)


class OnDisk(Everstep):
    """A step is captured when the one before is durable."""

    name = "Everstep, disk"
    options: ClassVar = {"strategy": "snapshot", "mode": "disk"}
    every = 1

    @classmethod
    def needs(cls, state: int, gradient: int, slots: int) -> tuple[float, float]:
        return slots * state, 2.1 * state

    @property
    def least_s(self) -> float:  # type: ignore[override]
        return (2.2 if not self._slots else 1.2) * self.run._keeper.base_write_s  # two, or of a large state one


class DenseLog(Everstep):
    """Where the disk is too slow for it bases are taken often: through spare device memory."""

    name = "Everstep, dense log"
    options: ClassVar = {"strategy": "log", "mode": "device"}
    least_s = CHAIN_S

    @classmethod
    def needs(cls, state: int, gradient: int, slots: int) -> tuple[float, float]:
        return slots * state + 4 * gradient, state + 5 * gradient  # its shortest ring, and what is in it at first


class TopKLog(Everstep):
    """Over training that compresses its gradients: what the log adds to that."""

    name = "Everstep, log of top-k"

    def __init__(self, case: Case, root: Path, interval: int) -> None:
        self.options = {"strategy": "log", "compress": everstep.compress.TopK(0.01)}  # type: ignore[misc]
        super().__init__(case, root, interval)

    @classmethod
    def needs(cls, state: int, gradient: int, slots: int) -> tuple[float, float]:
        whole = state + gradient  # residuals are in every base, and the ring is as large as a base
        return (slots + 1) * whole + 3 * gradient, whole + 3 * gradient


class Replica(Everstep):
    name = "Everstep, replica"
    options: ClassVar = {"strategy": "replica"}
    least_s = CHAIN_S

    @classmethod
    def needs(cls, state: int, gradient: int, slots: int) -> tuple[float, float]:
        return (slots + 2) * state + 4 * gradient, state + 5 * gradient

    def _warm_up(self) -> None:
        super()._warm_up()
        deadline = time.monotonic() + REPLICA_S
        while self.run.status()["replica"] is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def plain(self, steps: int) -> float:
        """When it has nothing left to do, or waits for a base: beside it BERT-large took 94 ms a step instead of 71."""
        before, since = -1, time.monotonic()
        while (behind := self._behind_now()) and time.monotonic() - since < STILL_S:
            if behind != before:
                before, since = behind, time.monotonic()
            time.sleep(0.05)
        return super().plain(steps)

    def _behind_now(self) -> int:
        where: Any = self.run.status()["replica"]
        return where["behind"] if where else 0

    def result(self) -> Kept:
        where: Any = self.run.status()["replica"]
        found = super().result()
        # It has not seen the plain steps, so it finds itself wrong at the next base.
        found.troubles = [trouble for trouble in found.troubles if not trouble.startswith("the replica was wrong")]
        return replace(found, troubles=[*found.troubles, f"{where['behind']} steps behind" if where else "no replica"])


OURS: tuple[type[Method], ...] = (Host, Device, Direct, OnDisk, DenseLog, TopKLog, Replica)
IN_MEMORY = (Host, Device, Direct)  # of ours: a step is on the disk only if it is a base
