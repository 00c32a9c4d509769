"""The ways to keep a state, behind one face: save, let the next step pass, be durable, come back.

Each peer is called as its documentation says, on the same flat dictionary of tensors (made outside of all timing,
which favours the peers). Where a peer leaves something in the page cache it is synced here, so that "durable" means
the same for all.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import everstep
from everstep.capture.host import arena_root, populate
from everstep.capture.pinned import cuda_devices, pinned_until_let_go
from everstep.keeper.client import keeper_pid
from everstep.recover.assemble import view
from everstep.recover.needs import Needs
from everstep.recover.restore import restore
from everstep.recover.survey import Sources
from everstep.store.blocks import room_for
from everstep.store.places import Places
from everstep.types import Room

warnings.filterwarnings("ignore", module="torch.distributed")
warnings.filterwarnings("ignore", message=".*torch.distributed.*")

_CHUNK = 4 << 20
_THREADS = 4


class Subject:
    """A model that is only its parameters, with an optimizer that has stepped once."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], *, adam: bool, device: str = "cpu") -> None:
        self.model = nn.Module()
        for name, shape in shapes.items():
            self.model.register_parameter(name, nn.Parameter(torch.randn(shape, device=device)))
        parameters = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(parameters, lr=1e-4, fused=True) if adam else torch.optim.SGD(parameters, lr=1e-4)
        )
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.adam = adam
        self._like = {
            name: tensor if name.startswith("model.") else torch.empty_like(tensor, device="meta")
            for name, tensor in self.state().items()
        }

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the state, flat: what the peers are given."""
        found = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    found[f"optimizer.{name}.{key}"] = value
        return found

    def empty_state(self) -> dict[str, Tensor]:
        """What DCP loads into: the parameters as they are, and room for optimizer state that is not there yet."""
        return {
            name: tensor if name.startswith("model.") else torch.empty_like(tensor, device="cpu")
            for name, tensor in self._like.items()
        }

    @torch.no_grad()
    def take(self, loaded: dict[str, Tensor]) -> None:
        """Parameters are copied into, optimizer state is adopted: what load_state_dict does, at no cost."""
        for name, parameter in self.model.named_parameters():
            if loaded[f"model.{name}"] is not parameter:
                parameter.copy_(loaded[f"model.{name}"])
            keys = [key for key in self._like if key.startswith(f"optimizer.{name}.")] if self.adam else []
            for key in keys:
                self.optimizer.state[parameter][key.rpartition(".")[2]] = loaded[key]


class Saver:
    """One way. `where` is a directory that is there and empty."""

    name = ""
    asynchronous = False  # whether the loop goes on before the bytes are written

    def __init__(self, subject: Subject, root: Path) -> None:
        self.subject, self.root = subject, root

    def save(self, where: Path) -> None:
        """What the loop calls; it goes on when this returns."""
        raise NotImplementedError

    def step(self) -> float:
        """The next optimizer step; returns how long it had to wait before the state could change."""
        self.subject.optimizer.step()
        return 0.0

    def warm_up(self) -> None:
        """Whatever is done only in the first steps."""

    def gate(self, *_: object) -> None:
        """What the next update has to wait for."""

    def finish(self, where: Path) -> None:
        """Until everything is written that the call has left to others."""

    def durable(self, where: Path) -> None:
        self.finish(where)
        _sync(where)

    def restore(self, where: Path) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def pids(self) -> list[int]:
        return [os.getpid()]

    def files(self, where: Path) -> list[Path]:
        return [path for path in where.rglob("*") if path.is_file()]


class TorchSave(Saver):
    name = "torch.save"

    def save(self, where: Path) -> None:
        torch.save(self.subject.state(), where / "state.pt")

    def restore(self, where: Path) -> None:
        self.subject.take(torch.load(where / "state.pt", weights_only=True))


class Safetensors(Saver):
    name = "safetensors.save_file"

    def save(self, where: Path) -> None:
        safetensors.torch.save_file(self.subject.state(), where / "state.safetensors")

    def restore(self, where: Path) -> None:
        self.subject.take(safetensors.torch.load_file(where / "state.safetensors"))


class DcpSave(Saver):
    name = "DCP save"

    def save(self, where: Path) -> None:
        dcp.save(self.subject.state(), checkpoint_id=where, no_dist=True)

    def restore(self, where: Path) -> None:
        state = self.subject.empty_state()
        dcp.load(state, checkpoint_id=where, no_dist=True)
        self.subject.take(state)


class DcpAsync(DcpSave):
    name = "DCP async_save"
    asynchronous = True
    _saving: Any = None

    def save(self, where: Path) -> None:
        self._saving = dcp.async_save(self.subject.state(), checkpoint_id=where, no_dist=True)

    def finish(self, where: Path) -> None:
        self._saving.result()


class DcpStaged(DcpAsync):
    name = "DCP async_save, asynchronous staging"
    _staging: Any = None

    def __init__(self, subject: Subject, root: Path) -> None:
        super().__init__(subject, root)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=torch.cuda.is_available(), use_shared_memory=not torch.cuda.is_available(),
                use_async_staging=True, use_non_blocking_copy=torch.cuda.is_available(),
            )
        )  # fmt: skip
        # torch 2.11 closes what is below it after each save, and fails at the next (pytorch/pytorch#183413, mended
        # since): only its owner does here, so that it has its memory from save to save in every torch.
        inner = self._stager._state_dict_stager
        self._close_inner, inner.close = inner.close, lambda: None  # type: ignore[method-assign]

    def save(self, where: Path) -> None:
        answer = dcp.async_save(
            self.subject.state(), checkpoint_id=where, no_dist=True, async_stager=self._stager
        )  # fmt: skip
        self._staging, self._saving = answer.staging_completion, answer.upload_completion

    def gate(self, *_: object) -> None:
        if self._staging is not None:
            self._staging.result()

    def step(self) -> float:
        begin = time.perf_counter()
        self.gate()
        waited = time.perf_counter() - begin
        self.subject.optimizer.step()
        return waited

    def close(self) -> None:
        self._stager.close()
        self._close_inner()


class Everstep(Saver):
    name = "Everstep"
    asynchronous = True

    def __init__(self, subject: Subject, root: Path, *, slots: int | None = None, keep: int = 2) -> None:
        super().__init__(subject, root)
        # On request only, so that a capture which is timed does not meet the write of the one before.
        self.run = everstep.guard(
            subject.model, subject.optimizer, dir=root / "run", linger="1s", keep=keep,
            tiers=[everstep.Memory(slots=slots), everstep.Disk(every="1h")],
        )  # fmt: skip
        subject.optimizer.step()

    def save(self, where: Path) -> None:
        self.run.done()

    def step(self) -> float:
        before = self.run.status()["stall_s"]
        self.subject.optimizer.step()
        return self.run.status()["stall_s"] - before  # type: ignore[operator]

    def warm_up(self) -> None:
        for _ in range(4):  # the first captures are watched for writes that pass by the gates
            self.save(self.root)
            self.step()
        self.run.wait("durable")

    def durable(self, where: Path) -> None:
        self.run.wait("durable")

    def restore(self, where: Path, source: str = "disk") -> None:
        subjects = self.run._state.subjects
        with pinned_until_let_go(cuda_devices(subjects), room_for) as room:
            images = {0: self.fetch(source, room)}
        restore(view(images, self.run.step, Needs(None, 0, 1)), subjects, strict=True)

    def fetch(self, source: str = "disk", room: Room = room_for) -> Any:
        """The newest checkpoint from the disk, every byte checked; or from memory."""
        sources = Sources(Places(directory=str(self.root / "run")), str(self.run.status()["run"]))
        holding = max((h for h in sources.survey().holdings if h.source == source), key=lambda h: h.step)
        return sources.fetch(holding, room=room)

    def pids(self) -> list[int]:
        keeper = keeper_pid(str(self.run.status()["run"]))
        return [os.getpid(), *([keeper] if keeper else [])]

    def files(self, where: Path) -> list[Path]:
        return list((self.root / "run").glob(f"step-{self.run.step:010d}/*"))

    def close(self) -> None:
        self.run.close()


PEERS: list[type[Saver]] = [TorchSave, Safetensors, DcpSave, DcpAsync, DcpStaged]


def end_keeper(run: str) -> None:
    """And all that it holds in memory: 3 x 19 GB of one run leave no room for the next."""
    pid = keeper_pid(run)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        until_freed(pid)
    shutil.rmtree(arena_root(None) / run, ignore_errors=True)


def until_freed(pid: int) -> None:
    """Until a process that was killed holds no memory any more."""
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/maps").exists() and _has_memory(pid) and time.monotonic() < deadline:
        time.sleep(0.02)


def _has_memory(pid: int) -> bool:
    """Not so for one that is dead, even if nobody has asked for its exit code."""
    try:
        return bool(Path(f"/proc/{pid}/maps").read_text())
    except OSError:
        return False


def _sync(where: Path) -> None:
    for path in [*(p for p in where.rglob("*") if p.is_file()), where]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def drop_cache(paths: list[Path]) -> None:
    """So that a read comes from the disk."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue  # of a checkpoint that was just let go
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def empty(where: Path) -> Path:
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    return where


# -- the disk itself, asked by the plainest program


def raw_write(path: Path, data: memoryview) -> float:
    """Seconds for these bytes with O_DIRECT, 4 MiB at a time, four threads, and fsync."""
    begin = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda at: os.pwrite(descriptor, data[at : at + _CHUNK], at), range(0, len(data), _CHUNK)))
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - begin


def touch(size: int) -> float:
    """Have so much memory, and free it: a virtual machine asks its host for it, and who comes first would wait so long.

    Seconds."""
    begin = time.perf_counter()
    room = room_for(size)
    populate([room.obj.span])
    return time.perf_counter() - begin


def raw_read(path: Path) -> float:
    """Seconds to have a file's bytes in fresh memory, in large pages as ours, in the same manner."""
    size = path.stat().st_size
    begin = time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffer = room_for(size)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda at: os.preadv(descriptor, [buffer[at : at + _CHUNK]], at), range(0, size, _CHUNK)))
    os.close(descriptor)
    return time.perf_counter() - begin
