"""What gc may give back on one node of a job that has several."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import everstep
from everstep.capture.arena import Arena
from everstep.capture.host import open_root
from everstep.errors import EverstepError
from everstep.image import FORMAT, ImageLayout, lay_out
from everstep.keeper import flush
from everstep.keeper.scavenge import Left, give_back, look, scavenge, sign
from everstep.store.disk import DiskTier
from everstep.store.log import LogWriter, log_name, segments
from everstep.store.manifest import RUN_RECORD, committed_steps, encode
from everstep.store.places import Places
from everstep.types import Frame, ImageInfo, RunRecord

RUN, LIFE = "5" * 32, "1" * 32


def layout(rank: int, world: int) -> ImageLayout:
    return lay_out([], ImageInfo(format=FORMAT, run=RUN, rank=rank, world=world), 4096)


@pytest.fixture
def disk(tmp_path: Path) -> DiskTier:
    tier = DiskTier(tmp_path / "run")
    tier.put(RUN_RECORD, memoryview(encode(RunRecord(format=FORMAT, run=RUN, created_time=0.0))))
    return tier


@pytest.fixture
def memory(tmp_path: Path) -> str:
    (tmp_path / "memory").mkdir()
    return str(tmp_path / "memory")


def sealed(memory: str, disk: DiskTier, *, rank: int, world: int, step: int = 7) -> Arena:
    """The memory of a rank whose trainer is dead."""
    root = open_root(memory)
    arena = Arena.create(root, run=RUN, rank=rank, world=world, layout=layout(rank, world), slots=2)
    arena.seal(0, step=step, cut_time=0.0, generation=LIFE)
    arena.control[128:136] = (2**22 + 1).to_bytes(8, "little")  # the owner's pid: nobody has this one
    sign(root / RUN, disk.root, lambda event: None)
    return arena


def left(memory: str) -> Left:
    (found,) = look(memory)
    return found


def test_memory_of_a_rank_whose_others_are_on_other_nodes_stays(memory: str, disk: DiskTier) -> None:
    arena = sealed(memory, disk, rank=0, world=2)
    assert left(memory).state == "holding a part of step 7, the rest of which is on other nodes"
    assert give_back(left(memory), memory).startswith("kept: ")
    assert Path(arena.place).exists()


def test_memory_of_a_rank_goes_once_the_disk_of_its_node_has_the_step(memory: str, disk: DiskTier) -> None:
    arena = sealed(memory, disk, rank=0, world=2)
    assert flush.persist_part(disk, arena, 0, torch_version="") is not None
    assert flush.commit(disk, 7, [0], 2, LIFE)
    assert left(memory).state == "spent"
    give_back(left(memory), memory)
    assert not Path(arena.place).exists()


def test_memory_of_ranks_that_have_no_step_in_common_is_spent(memory: str, disk: DiskTier) -> None:
    arenas = [sealed(memory, disk, rank=rank, world=2, step=7 + rank) for rank in (0, 1)]
    assert left(memory).state == "spent"
    give_back(left(memory), memory)
    assert not any(Path(arena.place).exists() for arena in arenas)


def test_what_only_memory_holds_goes_to_the_disk_that_the_run_was_given(
    memory: str, disk: DiskTier, tmp_path: Path
) -> None:
    sealed(memory, disk, rank=0, world=1)
    Places(directory=str(disk.root), memory=memory, disk=str(tmp_path / "nvme")).write()
    assert give_back(left(memory), memory) == "step 7 is on disk; removed"
    assert committed_steps(DiskTier(tmp_path / "nvme")) == [7]
    assert committed_steps(disk) == []


def test_memory_stays_if_what_was_written_cannot_be_committed(
    memory: str, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = sealed(memory, disk, rank=0, world=1)
    monkeypatch.setattr(flush, "commit", lambda *_: False)  # a part that cannot be read back
    with pytest.raises(EverstepError, match="step 7"):
        scavenge(disk, [arena], RUN)


def test_the_log_of_a_node_stays_though_the_bases_of_others_are_elsewhere(memory: str, disk: DiskTier) -> None:
    arena, shape = sealed(memory, disk, rank=0, world=2), layout(0, 2)
    assert flush.persist_part(disk, arena, 0, torch_version="") is not None
    assert flush.commit(disk, 7, [0], 2, LIFE)
    arena.remove()
    frame = Frame(
        format=FORMAT, run=RUN, generation=LIFE, step=8, rank=0, world=2, cut_time=0.0, kind="record",
        layout=shape.digest, ranges=((len(shape.header), 8),),
    )  # fmt: skip
    LogWriter(disk, 7, 0, RUN, shape.header).append([(frame, [memoryview(bytes(8))])])
    assert segments(disk) == [7]
    assert everstep.open(disk.root, memory=memory).clean()["segments"] == []
    assert disk.size(log_name(7, 0)) > 0
    spent = msgspec.structs.replace(frame, step=4)
    LogWriter(disk, 3, 0, RUN, shape.header).append([(spent, [memoryview(bytes(8))])])
    assert everstep.open(disk.root, memory=memory).clean()["segments"] == [3]
