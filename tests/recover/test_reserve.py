"""Memory for the captures of a life is taken while its past is read, and nothing else comes of it."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lives import forget_memory, live, must_finish, run_directory, tiny, train_tiny, undisturbed
from torch import nn

import everstep
from everstep.capture import arena, reserve
from everstep.capture.arena import Arena
from everstep.capture.host import SHARED_MEMORY, open_root
from everstep.capture.taken import Taken
from everstep.config import settings
from everstep.errors import Mismatch, NotEnoughMemory
from everstep.image import lay_out
from everstep.topology import Topology
from everstep.types import ImageInfo

MOUNT_BYTES = 64 << 20
RUN = "0" * 32
_NAMELESS = re.compile(r"everstep-\d+/#\d+ \(deleted\)|memfd:everstep-reserve")
populate = reserve.populate


def nameless() -> set[int]:
    """The inodes of files without a name that this process has open for a reserve."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if _NAMELESS.search(os.readlink(f"/proc/self/fd/{name}")):
                found.add(os.stat(f"/proc/self/fd/{name}").st_ino)
        except FileNotFoundError:
            continue  # closed in this moment
    return found


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("everstep-reserve")]


def end_of_first_life(run: everstep.Run) -> None:
    if run.step == 3:
        run.wait("durable")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A run whose disk has step 3, and whose memory is gone."""
    with run_directory() as folder:
        assert live(lambda: train_tiny(folder, end_of_first_life)).killed
        forget_memory(folder)
        yield folder


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """Shared memory in which nobody else has anything."""
    place = Path(tempfile.mkdtemp(prefix="everstep-test-", dir=SHARED_MEMORY))
    size = f"size={MOUNT_BYTES}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(place)], capture_output=True).returncode:
        place.rmdir()
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)  # whoever failed may still have it open
    place.rmdir()


def free_bytes(place: Path) -> int:
    return os.statvfs(place).f_bavail * os.statvfs(place).f_frsize


def resumed(directory: Path, **options: Any) -> dict[str, Any]:
    """A life that says what it had in reserve after guard(), what it has at the first step after, and its slots."""
    seen: dict[str, list[int]] = {}
    make = reserve.Reserve.give

    def watched(self: reserve.Reserve, slots: int, slot_bytes: int) -> Any:
        seen.setdefault("reserved", sorted(nameless()))
        return make(self, slots, slot_bytes)

    def at_step(run: everstep.Run) -> None:
        own = run._capture.arena()
        if own is not None and "slots" not in seen:
            seen["slots"] = sorted(os.fstat(slot).st_ino for slot in own.descriptors[1:])
            seen["left"] = sorted(nameless() - set(seen["slots"]))

    reserve.Reserve.give = watched  # type: ignore[method-assign]
    return {**train_tiny(directory, at_step, **options), **seen, "threads": threads()}


@pytest.mark.parametrize("strategy", ["snapshot", "log"])
@pytest.mark.parametrize("where", ["shared memory", "memfds"])
def test_the_first_cut_after_a_disk_finds_its_memory_taken(where: str, strategy: str, directory: Path) -> None:
    def life() -> dict[str, Any]:
        if where == "memfds":
            reserve.choose_place = lambda *_: None  # type: ignore[attr-defined]
        return resumed(directory, strategy=strategy)

    found = must_finish(life)
    assert found["resumed_from"] == 3 and found["digest"] == undisturbed()
    assert len(found["slots"]) == 3 and found["slots"] == found["reserved"]
    assert found["left"] == found["threads"] == []


def test_where_its_files_cannot_be_named_memory_is_taken_as_if_there_were_none(directory: Path) -> None:
    def refuse(self: Taken, *_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def life() -> dict[str, Any]:
        Taken.name = refuse  # type: ignore[method-assign]
        return resumed(directory, strategy="snapshot")

    found = must_finish(life)
    assert found["digest"] == undisturbed() and found["reserved"]
    assert len(found["slots"]) == 3 and not set(found["slots"]) & set(found["reserved"])
    assert found["left"] == found["threads"] == []


def test_what_lies_in_such_slots_is_found_by_the_next_life(directory: Path) -> None:
    """Under their names, and with a whole image in each."""

    def die(run: everstep.Run) -> None:
        if run.step == 5:
            run.wait("sealed")
            os.kill(os.getpid(), signal.SIGKILL)

    assert live(lambda: train_tiny(directory, die)).killed
    assert must_finish(lambda: train_tiny(directory))["resumed_from"] == 5


def test_memory_that_is_gone_on_with_needs_no_reserve(directory: Path) -> None:
    """Though the disk is read: what memory has was lost in it, and its place is as good as before."""

    def die(run: everstep.Run) -> None:
        if run.step == 5:
            run.wait("sealed")
            for slot in run._capture.arena().seals():  # type: ignore[union-attr]
                run._capture.arena().unseal(slot)  # type: ignore[union-attr]
            os.kill(os.getpid(), signal.SIGKILL)

    assert live(lambda: train_tiny(directory, die)).killed
    found = must_finish(lambda: resumed(directory))
    assert found["resumed_from"] < 5 and found["digest"] == undisturbed()
    assert "reserved" not in found and found["left"] == []  # no arena was made, and nothing kept for one


@pytest.mark.parametrize("width", [4, 2000])
def test_another_program_gets_what_it_needs_and_the_rest_is_let_go(width: int, directory: Path) -> None:
    def other() -> dict[str, Any]:
        model = nn.Linear(8, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with everstep.guard(model, optimizer, dir=directory, steps=6, keeper="inline", strict=False) as run:
            reserved = sorted(nameless())
            while not run.done():
                model(torch.ones(1, 8)).sum().backward()
                optimizer.step()
                run.wait("sealed")
            arena = run._capture.arena()
            assert arena is not None
            slots = {os.fstat(slot).st_ino for slot in arena.descriptors[1:]}
            sizes = {os.fstat(slot).st_size for slot in arena.descriptors[1:]}
            return {"reserved": reserved, "left": sorted(nameless() - slots), "sizes": sorted(sizes)}

    found = must_finish(other)
    assert len(found["reserved"]) == 3 and found["left"] == [] and len(found["sizes"]) == 1


def reserve_in(place: Path, world: int = 1) -> reserve.Reserve:
    tiers = [everstep.Memory(path=str(place))]
    chosen = settings(place / "run", lose_at_most=1, tiers=tiers, keep=2, mode="host", on_loss=())
    return reserve.Reserve(chosen, Topology(rank=0, world=world, node="here", nodes=("here",) * world))


def test_a_reserve_that_is_too_small_is_let_go_before_other_memory_is_taken(small_memory: Path) -> None:
    """Else both would have to have room."""
    with reserve_in(small_memory) as one:
        one.begin(8 << 20, 0)
        assert one.give(3, 16 << 20) is None
        assert free_bytes(small_memory) == MOUNT_BYTES and nameless() == set()


def test_whoever_inherited_it_does_not_keep_what_is_let_go(small_memory: Path) -> None:
    """Such as the workers of a loader."""
    until, end = os.pipe()
    with reserve_in(small_memory) as one:
        one.begin(8 << 20, 0)
        child = os.fork()
        if child == 0:
            os.close(end)
            os.read(until, 1)
            os._exit(0)
    assert free_bytes(small_memory) == MOUNT_BYTES
    os.close(end)
    os.close(until)
    os.waitpid(child, 0)


def test_where_an_arena_cannot_be_made_its_reserve_is_let_go(small_memory: Path) -> None:
    root = open_root(str(small_memory))
    taken = Taken.nameless(root, 3)
    taken.take(8 << 20, in_memory=True)
    assert len(nameless()) == 3
    (root / RUN).write_text("what should be a folder")
    with pytest.raises(NotEnoughMemory):
        make_arena(root, taken)
    assert nameless() == set() and free_bytes(small_memory) >= MOUNT_BYTES - 4096


@pytest.mark.parametrize("forgotten", [False, True])
def test_files_of_a_reserve_are_closed_once_whoever_is_interrupted(
    forgotten: bool, small_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = open_root(str(small_memory))
    taken = Taken.nameless(root, 3)
    taken.take(1 << 20, in_memory=True)
    assert len(nameless()) == 3
    interrupts: list[KeyboardInterrupt] = []
    if not forgotten:

        class Interrupted(weakref.finalize):  # type: ignore[type-arg]
            def __init__(self, *what: Any) -> None:
                super().__init__(*what)
                raise KeyboardInterrupt

        monkeypatch.setattr(arena, "weakref", SimpleNamespace(finalize=Interrupted))
        try:
            make_arena(root, taken)
        except KeyboardInterrupt as error:
            interrupts.append(error)  # whose traceback has the arena
        assert len(interrupts) == 1
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]  # which may have those numbers now
    interrupts.clear()
    del taken
    gc.collect()
    assert nameless() == set()
    for other in others:
        os.close(other)  # or somebody has done so


def make_arena(root: Path, taken: Taken) -> Arena:
    layout = lay_out([], ImageInfo(run=RUN, rank=0, world=1, format=1), 4096)
    taken.cut(layout.total_bytes)
    return Arena.create(root, run=RUN, rank=0, world=1, layout=layout, slots=3, reserved=taken)


@pytest.mark.parametrize(
    ("world", "slot_mb", "read_mb", "free_mb", "is_enough"),
    [(1, 8, 0, 31, True), (1, 8, 10, 31, False), (1, 8, 10, 53, True), (2, 5, 10, 53, False), (2, 5, 10, 99, True)],
)
def test_there_must_be_memory_beside_what_all_ranks_of_the_node_read(
    world: int, slot_mb: int, read_mb: int, free_mb: int, is_enough: bool, small_memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A slot has a megabyte to spare; a tenth of the memory is left alone; one rank has 3 slots and two have 4 each."""
    monkeypatch.setattr(reserve, "free_memory", lambda _: free_mb << 20)
    with reserve_in(small_memory, world) as one:
        one.begin(slot_mb << 20, read_mb << 20)
        assert bool(nameless()) == is_enough


@pytest.mark.parametrize("when", ["while it is taken", "before the first cut"])
def test_a_process_that_is_killed_leaves_nothing_of_it(when: str, directory: Path, small_memory: Path) -> None:
    def kill(spans: Sequence[tuple[int, int]], **how: int) -> int:
        assert populate(spans, **how) == 0 and free_bytes(small_memory) < MOUNT_BYTES - (1 << 20)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def life() -> dict[str, Any]:
        if when == "while it is taken":
            reserve.populate = kill  # type: ignore[attr-defined]
        model, optimizer, loader = train_with
        everstep.guard(model, optimizer, loader, dir=directory, tiers=tiers, epochs=None, extra={"losses": []})
        assert len(nameless()) == 3
        if when == "while it is taken":
            time.sleep(20)  # who takes it kills all of this process
            return {}
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    train_with, tiers = tiny(), [everstep.Memory(path=str(small_memory))]
    assert live(life).killed
    assert list(small_memory.rglob("slot-*")) == list(small_memory.rglob("rank-*")) == []
    deadline = time.monotonic() + 10
    while free_bytes(small_memory) < MOUNT_BYTES - (64 << 10):  # the run's folder, for the keeper
        assert time.monotonic() < deadline  # a keeper that was being forked has it until it is a program of its own
        time.sleep(0.01)


@pytest.mark.parametrize("lack", ["on the machine", "on the mount", "in the end"])
def test_too_little_memory_for_a_reserve_is_no_failure(lack: str, directory: Path) -> None:
    def refuse(*_: object) -> Path | None:
        raise NotEnoughMemory("memory", 2, 1, "")

    def life() -> dict[str, Any]:
        if lack == "on the machine":
            reserve.free_memory = lambda _: 3 << 20  # type: ignore[attr-defined]
        elif lack == "on the mount":
            reserve.choose_place = refuse  # type: ignore[attr-defined]
        else:
            reserve.populate = lambda *_, **how: errno.ENOSPC  # type: ignore[attr-defined]
        return resumed(directory)

    found = must_finish(life)
    assert found["resumed_from"] == 3 and found["digest"] == undisturbed()
    assert len(found["reserved"]) == (3 if lack == "in the end" else 0)
    assert not set(found["reserved"]) & set(found["slots"]) and found["left"] == []


def until_it_is_refused(spans: Sequence[tuple[int, int]], **how: int) -> int:
    """More than is ever taken: who lets go does not wait for the end."""
    while not (problem := populate(spans, **how)):
        pass
    return problem


@pytest.mark.parametrize("taking", [populate, until_it_is_refused], ids=["done", "under way"])
def test_a_guard_that_refuses_leaves_no_thread_and_no_descriptor(
    taking: Callable[[Sequence[tuple[int, int]]], int], directory: Path
) -> None:
    def life() -> dict[str, Any]:
        begun: list[int] = []
        begin = reserve.Reserve.begin

        def watched(self: reserve.Reserve, *sizes: int) -> None:
            begin(self, *sizes)
            begun.extend(nameless())

        reserve.populate, reserve.Reserve.begin = taking, watched  # type: ignore[attr-defined,method-assign]
        model = nn.Linear(8, 30)
        before = sorted(os.listdir("/proc/self/fd"))
        with pytest.raises(Mismatch):
            everstep.guard(model, torch.optim.SGD(model.parameters(), lr=0.1), dir=directory, keeper="inline")
        assert sorted(os.listdir("/proc/self/fd")) == before
        return {"begun": len(begun), "left": sorted(nameless()), "threads": threads()}

    assert must_finish(life) == {"begun": 3, "left": [], "threads": []}


def test_a_run_that_ends_without_a_cut_lets_it_go(directory: Path) -> None:
    def life() -> dict[str, Any]:
        model, optimizer, loader = tiny()
        reserve.populate = until_it_is_refused  # type: ignore[attr-defined]
        with everstep.guard(model, optimizer, loader, dir=directory, keeper="inline", extra={"losses": []}):
            begun = len(nameless())
        return {"begun": begun, "left": sorted(nameless()), "threads": threads()}

    assert must_finish(life) == {"begun": 3, "left": [], "threads": []}
