"""A commit names the parts that are there: not those of a life whose parts were written over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from everstep.capture.arena import Arena
from everstep.capture.host import open_root
from everstep.errors import Damaged
from everstep.image import FORMAT, lay_out
from everstep.keeper import flush
from everstep.store.disk import DiskTier
from everstep.store.manifest import (
    commit_name,
    part_name,
    put_record,
    read_commit,
    read_part,
    read_single_part,
    step_folder,
)
from everstep.types import ImageInfo, Part

RUN, LIFE, NEXT = "5" * 32, "1" * 32, "2" * 32


@pytest.fixture
def write(tmp_path: Path) -> Callable[[DiskTier, str], Part]:
    def write(tier: DiskTier, life: str) -> Part:
        """Step 7 as a life has it."""
        (tmp_path / life).mkdir(exist_ok=True)
        layout = lay_out([], ImageInfo(format=FORMAT, run=RUN, rank=0, world=1), 4096)
        arena = Arena.create(open_root(str(tmp_path / life)), run=RUN, rank=0, world=1, layout=layout, slots=2)
        arena.seal(0, step=7, cut_time=float(life[0]), generation=life)
        part = flush.persist_part(tier, arena, 0, torch_version="")
        arena.remove()
        assert part is not None
        return part

    return write


@pytest.mark.parametrize("left", ["as it was", "damaged"])
def test_a_commit_that_an_earlier_life_left_of_the_same_step_is_replaced(
    left: str, write: Callable[[DiskTier, str], Part], tmp_path: Path
) -> None:
    tier = DiskTier(tmp_path / "run")
    write(tier, LIFE)
    assert flush.commit(tier, 7, [0], 1, LIFE)
    if left == "damaged":
        (tier.root / commit_name(7)).write_bytes(b"{}")
    write(tier, NEXT)
    assert list(flush.sound_steps(tier, RUN)) == [], "it names parts that are no longer there"
    assert flush.commit(tier, 7, [0], 1, NEXT)
    commit = read_commit(tier, 7, RUN)
    assert commit.generation == NEXT and read_part(tier, commit, 0).generation == NEXT
    assert list(flush.sound_steps(tier, RUN)) == [7]


def test_a_commit_of_the_same_parts_stays_as_it_is(write: Callable[[DiskTier, str], Part], tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "run")
    write(tier, LIFE)
    assert flush.commit(tier, 7, [0], 1, LIFE)
    before = (tier.root / commit_name(7)).stat()
    assert flush.commit(tier, 7, [0], 1, LIFE)
    assert (tier.root / commit_name(7)).stat() == before


def test_parts_that_are_known_are_not_decoded_again(
    write: Callable[[DiskTier, str], Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path / "run")
    part = write(tier, LIFE)
    with monkeypatch.context() as patch:
        patch.setattr(flush, "read_record", lambda *_, **__: pytest.fail("it was"))
        assert flush.commit(tier, 7, [0], 1, LIFE, [part])
    assert read_part(tier, read_commit(tier, 7, RUN), 0) == part
    assert list(flush.sound_steps(tier, RUN)) == [7]


@pytest.mark.parametrize("now", ["gone", "cut off", "with another bit", "another life's"])
def test_parts_that_are_known_are_not_committed_if_something_else_lies_there(
    now: str, write: Callable[[DiskTier, str], Part], tmp_path: Path
) -> None:
    tier = DiskTier(tmp_path / "run")
    part = write(tier, LIFE)
    file = tier.root / part_name(7, 0)
    if now == "gone":
        file.unlink()
    elif now == "cut off":
        file.write_bytes(file.read_bytes()[:-5])
    elif now == "with another bit":
        data = bytearray(file.read_bytes())
        data[20] ^= 1
        file.write_bytes(data)
    else:
        write(tier, NEXT)
        assert flush.commit(tier, 7, [0], 1, NEXT)
    assert not flush.commit(tier, 7, [0], 1, LIFE, [part])
    assert list(flush.sound_steps(tier, RUN)) == ([7] if now == "another life's" else [])


@pytest.mark.parametrize("pieces", [b'[{"name":"w"}]', b"7", b'[{"name":"\xff"}]', b"[ ]", b"[" * 5000 + b"]" * 5000])
def test_a_part_whose_pieces_nobody_can_read_is_not_committed(
    pieces: bytes, write: Callable[[DiskTier, str], Part], tmp_path: Path
) -> None:
    """With a digest that is right: its pieces are decoded only when somebody asks for them."""
    tier = DiskTier(tmp_path / "run")
    part = msgspec.structs.replace(write(tier, LIFE), raw_pieces=msgspec.Raw(pieces))
    tier.delete(part_name(7, 0))
    put_record(tier, part_name(7, 0), part)
    with pytest.raises(Damaged, match=r"unreadable (pieces|record): .*step 7, rank 0"):
        assert read_single_part(tier, 7, 0, RUN, step_folder).pieces
    assert not flush.commit(tier, 7, [0], 1, LIFE)
