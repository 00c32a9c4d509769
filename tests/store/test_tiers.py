"""Every tier keeps the promises of store/tier.py."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from everstep.errors import Damaged, EverstepError, NotEnoughSpace, TierFailed
from everstep.image import CHUNK_BYTES
from everstep.store.blocks import room_for
from everstep.store.disk import DiskTier
from everstep.store.manifest import data_name, read_data
from everstep.store.memory import MemoryTier
from everstep.store.tier import Arrived, Passing, freely, unseen
from everstep.testing import check_tier
from everstep.types import Part, Room, as_raw


@pytest.mark.parametrize("tier", [DiskTier, MemoryTier])
def test_a_tier_keeps_its_promises_when_killed_before_every_operation(tier: type[DiskTier]) -> None:
    check_tier(tier)


class RenamesTooEarly(DiskTier):
    """A tier that publishes before it has written: what the suite must notice."""

    def put(self, name: str, data: memoryview, passing: Passing = freely) -> tuple[int, ...]:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            raise FileExistsError(name)
        try:
            return self._write(path, data, passing)
        except Exception:
            path.unlink()
            raise


class KeepsWhatWasCalledOff(DiskTier):
    """A tier that publishes as much as it has when a put is called off: what the suite must notice."""

    def put(self, name: str, data: memoryview, passing: Passing = freely) -> tuple[int, ...]:
        try:
            return super().put(name, data, passing)
        except (FileExistsError, EverstepError):
            raise
        except Exception:
            super().put(name, data[:CHUNK_BYTES])
            raise


class ShowsTheFirstChunkOnly(DiskTier):
    """A tier whose readers would take bytes that nobody has checked: what the suite, and they, must notice."""

    def get(self, name: str, *, room: Room = room_for, arrived: Arrived = unseen) -> memoryview:
        whole = super().get(name, room=room)
        if whole:
            arrived(0, whole[:CHUNK_BYTES])
        return whole


def test_a_file_that_becomes_shorter_while_it_is_read_is_named_with_its_tier(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    tier.put("blob", memoryview(bytes(40 * CHUNK_BYTES)))
    with pytest.raises(TierFailed, match="disk failed reading blob: the file became shorter"):
        tier.get("blob", arrived=lambda offset, chunk: os.truncate(tmp_path / "blob", CHUNK_BYTES))


class TakesMemoryOfItsOwn(DiskTier):
    def get(self, name: str, *, room: Room = room_for, arrived: Arrived = unseen) -> memoryview:
        return super().get(name, arrived=arrived)


class GoesOnWithWhatIsNoGood(DiskTier):
    def get(self, name: str, *, room: Room = room_for, arrived: Arrived = unseen) -> memoryview:
        def forgiving(offset: int, chunk: memoryview) -> None:
            with suppress(ValueError):
                arrived(offset, chunk)

        return super().get(name, room=room, arrived=forgiving)


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        (ShowsTheFirstChunkOnly, "not every chunk was shown"),
        (TakesMemoryOfItsOwn, "elsewhere than into the memory given"),
        (GoesOnWithWhatIsNoGood, "went on with a chunk that is no good"),
    ],
)
def test_the_suite_notices_a_tier_whose_reads_cannot_be_checked(tier: type[DiskTier], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_tier(tier)


def test_bytes_that_a_tier_has_not_shown_are_not_taken_for_checked(tmp_path: Path) -> None:
    data = memoryview(bytes(3 * CHUNK_BYTES))
    part = Part(
        format=1, run="0" * 32, step=3, rank=0, world=1, generation="a", bytes=len(data), chunk_bytes=CHUNK_BYTES,
        chunks=DiskTier(tmp_path).put(data_name(3, 0), data), raw_pieces=as_raw(()), cut_time=0.0, torch="",
    )  # fmt: skip
    assert read_data(DiskTier(tmp_path), part) == data
    with pytest.raises(Damaged, match="1 of 3 chunks were checked"):
        read_data(ShowsTheFirstChunkOnly(tmp_path), part)


def test_the_suite_notices_a_tier_that_keeps_what_was_called_off() -> None:
    with pytest.raises(AssertionError, match="a put that was called off is listed"):
        check_tier(KeepsWhatWasCalledOff)


def test_the_suite_notices_a_tier_that_publishes_before_it_has_written() -> None:
    with pytest.raises(AssertionError, match="torn blob"):
        check_tier(RenamesTooEarly)


class GrowsByWritingAnew(DiskTier):
    """A tier that takes away what was there in order to add to it: what the suite must notice."""

    def append(self, name: str, parts: Sequence[memoryview]) -> None:
        path = self._path(name)
        before = self.get(name) if path.exists() else b""
        path.unlink(missing_ok=True)
        super().append(name, [memoryview(before), *parts])


@pytest.mark.soak
def test_the_suite_notices_a_tier_whose_append_endangers_what_was_there() -> None:
    with pytest.raises(AssertionError, match="took bytes away"):
        check_tier(GrowsByWritingAnew)


class CutsByWritingAnew(DiskTier):
    def cut(self, name: str, length: int) -> None:
        data = self.get(name)[:length]
        super().cut(name, 0)
        self.append(name, [data])


@pytest.mark.soak
def test_the_suite_notices_a_tier_whose_cut_endangers_what_is_to_stay() -> None:
    with pytest.raises(AssertionError, match="a cut killed before operation"):
        check_tier(CutsByWritingAnew)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("fails", ["pwrite", "fdatasync"])
@pytest.mark.parametrize("before", [b"", bytes(range(256)) * 16])
def test_an_append_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fails: str, before: bytes
) -> None:
    tier = DiskTier(tmp_path)
    if before:
        tier.append("log/grows", [memoryview(before)])
    real, left = getattr(os, fails), [1 if fails == "pwrite" else 0]

    def refuse(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(f"everstep.store.disk.os.{fails}", refuse)
    with pytest.raises(NotEnoughSpace if number == errno.ENOSPC else TierFailed):
        tier.append("log/grows", [memoryview(bytes(5 << 20))])
    monkeypatch.undo()
    assert tier.names("log") == (["log/grows"] if before else [])
    tier.append("log/grows", [memoryview(b"more")])
    assert tier.get("log/grows") == before + b"more"


def test_an_append_to_a_full_disk_is_refused_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path)
    monkeypatch.setattr(DiskTier, "free_bytes", lambda self: 100)
    with pytest.raises(NotEnoughSpace, match="needs"):
        tier.append("log/grows", [memoryview(bytes(1000))])
    assert os.listdir(tmp_path) == []


def test_appends_and_cuts_are_made_durable_and_so_is_the_name_by_whoever_did_not_make_it(tmp_path: Path) -> None:
    DiskTier(tmp_path).append("log/grows", [memoryview(b"one")])
    tier, done = DiskTier(tmp_path), []
    tier.before = done.append
    tier.append("log/grows", [memoryview(b"two")])
    assert f"fsync folder {tmp_path.name}" in done and "fsync folder log" in done
    done.clear()
    tier.append("log/grows", [memoryview(b"three")])
    assert done == ["append log/grows", "write log/grows at 6", "fsync log/grows"]
    done.clear()
    tier.cut("log/grows", 3)
    assert done == ["cut log/grows", "fsync log/grows"]
    tier.delete("log/grows")
    done.clear()
    tier.append("log/grows", [memoryview(b"four")])
    assert "fsync folder log" in done


def test_a_full_disk_is_refused_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path)
    monkeypatch.setattr(DiskTier, "free_bytes", lambda self: 6_300_000)
    with pytest.raises(NotEnoughSpace) as refused:
        tier.put("blob", memoryview(bytes(1000)))
    need = "the write needs 1,000 bytes beside the 16.8 MB that always stay free"
    assert str(refused.value) == f"{tmp_path} has 6.3 MB free, and {need}. Free some space."
    assert os.listdir(tmp_path) == []


@pytest.mark.soak
def test_the_file_system_may_refuse_direct_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def no_direct(path: str, flags: int, mode: int = 0o777, **rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode, **rest)

    monkeypatch.setattr("everstep.store.disk.os.open", no_direct)
    check_tier(DiskTier)


def test_a_folder_that_somebody_else_deletes_at_the_same_time_is_gone_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keepers of several ranks let go of the same step."""
    tier, real = DiskTier(tmp_path), shutil.rmtree
    tier.put("folder/file", memoryview(b"data"))

    def raced(path: Path) -> None:
        real(path)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "file")

    monkeypatch.setattr(shutil, "rmtree", raced)
    tier.delete_folder("folder")
    assert not (tmp_path / "folder").exists()


def test_a_link_to_a_directory_in_the_place_of_a_blob_goes_and_the_directory_stays(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "tier")
    tier.put("one.json", memoryview(b"1"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("somebody's")
    (tier.root / "two.json").symlink_to(tmp_path / "elsewhere")
    tier.delete("two.json")
    assert [path.name for path in tier.root.iterdir()] == ["one.json"]
    assert (tmp_path / "elsewhere" / "file").exists()


def test_a_memory_tier_whose_place_has_vanished_makes_it_anew_for_nobody_else(tmp_path: Path) -> None:
    """Else the private folder of arenas and sockets would be everybody's, and the next keeper would refuse it."""
    tier = MemoryTier(tmp_path / "everstep-0" / "run" / "guests")
    tier.put("step-0000000001/rank-00000.json", memoryview(b"{}"))
    made = [tmp_path / "everstep-0", *(path for path in tmp_path.rglob("everstep-0/**/*") if path.is_dir())]
    assert len(made) == 4 and {path.stat().st_mode & 0o777 for path in made} == {0o700}
