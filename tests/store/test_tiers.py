"""Every tier keeps the promises of store/tier.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everstep.errors import NotEnoughSpace
from everstep.store.disk import DiskTier
from everstep.store.memory import MemoryTier
from everstep.testing import check_tier


@pytest.mark.parametrize("tier", [DiskTier, MemoryTier])
def test_a_tier_keeps_its_promises_when_killed_before_every_operation(tier: type[DiskTier]) -> None:
    check_tier(tier)


class RenamesTooEarly(DiskTier):
    """A tier that publishes before it has written: what the suite must notice."""

    def put(self, name: str, data: memoryview) -> tuple[int, ...]:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            raise FileExistsError(name)
        return self._write(path, data)


def test_the_suite_notices_a_tier_that_publishes_before_it_has_written() -> None:
    with pytest.raises(AssertionError, match="torn blob"):
        check_tier(RenamesTooEarly)


def test_a_full_disk_is_refused_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path)
    monkeypatch.setattr(DiskTier, "free_bytes", lambda self: 100)
    with pytest.raises(NotEnoughSpace, match="needs"):
        tier.put("blob", memoryview(bytes(1000)))
    assert os.listdir(tmp_path) == []


def test_the_file_system_may_refuse_direct_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def no_direct(path: str, flags: int, mode: int = 0o777, **rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode, **rest)

    monkeypatch.setattr("everstep.store.disk.os.open", no_direct)
    check_tier(DiskTier)
