"""A checkpoint of DCP climbs like any base, and is loaded from the nearest place that still has it."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import blank, give_memory_back, loaded, ranks, save
from lives import Countdown, digest, end_keeper, forget_memory, fork_keeper, kill_keeper, live, run_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import everstep
from everstep import Disk, Keep, Parity, Partner, Shared, image
from everstep.capture.host import arena_root
from everstep.errors import BadConfig, Damaged, Misuse, NotEnoughMemory, RunHeld
from everstep.integrations.dcp import Reader, Writer
from everstep.integrations.dcp_table import contents_of
from everstep.keeper import client
from everstep.keeper.client import keeper_pid
from everstep.store import claim
from everstep.types import ImageInfo

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*CheckpointException")
SELDOM = Disk(every="1h")


@pytest.fixture(autouse=True)
def memory_is_given_back(tmp_path: Path) -> Iterator[None]:
    yield
    give_memory_back(tmp_path)


def state(number: int) -> dict[str, Any]:
    return {"w": torch.arange(3_000_000.0) * number, "n": number}  # three chunks


def sources(directory: Path) -> dict[int, tuple[str, ...]]:
    return {kept.step: kept.sources for kept in everstep.open(directory).kept()}


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 16]))


def flip_in_memory(directory: Path, step: int, at: int = 6_000_000) -> None:
    """In the arena, as bad memory would have it."""
    with everstep.open(directory)._sources() as found:
        (arena,) = found.arenas
        slot = arena.slot_of(step)
        flip(Path(arena.place) / f"slot-{slot}.safetensors", at)


def flip_on_disk(directory: Path, step: int, at: int = 6_000_000) -> None:
    flip(directory / f"step-{step:010d}/rank-00000.safetensors", at)


def killed_after(life: Callable[[], None]) -> None:
    def and_die() -> dict[str, Any]:
        life()
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    outcome = live(and_die)
    assert outcome.killed, outcome.error


def test_a_save_is_in_memory_that_outlives_its_process_and_its_keeper(tmp_path: Path) -> None:
    def life() -> None:
        writer = Writer(tmp_path, until="sealed", tiers=[SELDOM])
        for number in (1, 2):
            dcp.save(state(number), storage_writer=writer, no_dist=True)
        assert kill_keeper(tmp_path)

    killed_after(life)
    assert sources(tmp_path)[2] == ("memory",)
    assert digest(loaded(tmp_path, state(0))) == digest(state(2))
    with Writer(tmp_path, tiers=[SELDOM]) as writer:  # goes on in the same memory
        dcp.save(state(3), storage_writer=writer, no_dist=True)
    assert everstep.open(tmp_path).steps()[-1] == 3


def test_a_bit_that_turns_in_memory_is_noticed_from_the_first_moment(tmp_path: Path) -> None:
    def life() -> None:
        writer = Writer(tmp_path, until="sealed", tiers=[SELDOM])
        dcp.save(state(1), storage_writer=writer, no_dist=True)
        keeper = keeper_pid(run_of(tmp_path)) or 0
        os.kill(keeper, signal.SIGSTOP)
        dcp.save(state(2), storage_writer=writer, no_dist=True)
        os.kill(keeper, signal.SIGKILL)

    killed_after(life)
    assert sources(tmp_path)[2] == ("memory",)
    flip_in_memory(tmp_path, 2)
    with pytest.raises(CheckpointException, match=r"memory: the bytes do not match their checksum .* chunk 1"):
        loaded(tmp_path, state(0))


def test_a_keeper_brings_what_its_program_left_to_the_disk(tmp_path: Path) -> None:
    killed_after(lambda: dcp.save(state(1), storage_writer=Writer(tmp_path, until="sealed"), no_dist=True))
    deadline = time.monotonic() + 30
    while "disk" not in sources(tmp_path)[1]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    end_keeper(tmp_path)
    forget_memory(tmp_path)
    assert digest(loaded(tmp_path, state(0))) == digest(state(1))


@pytest.mark.soak
@pytest.mark.parametrize("operation", [4, *(pytest.param(n, marks=pytest.mark.soak) for n in (0, 1, 2, 3, 5, 6, 7, 8))])
def test_a_keeper_that_is_killed_while_it_writes_is_followed_by_another(
    operation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keepers: list[int] = []

    def start(run: str, directory: Path) -> None:
        keepers.append(len(keepers))
        fork_keeper(run, directory, Countdown(operation).install if len(keepers) == 1 else lambda: None)

    monkeypatch.setattr(client, "start", start)
    with Writer(tmp_path) as writer:
        dcp.save(state(1), storage_writer=writer, no_dist=True)
    assert len(keepers) == 2 or operation > 7  # a save has no more
    forget_memory(tmp_path)
    assert digest(loaded(tmp_path, state(0))) == digest(state(1))
    assert [one.problem for one in everstep.open(tmp_path).verify()] == [""]


def test_what_is_damaged_in_one_place_is_read_from_another(tmp_path: Path) -> None:
    place, shared = tmp_path / "run", tmp_path / "shared"
    tiers = [Shared(str(shared), every=1)]
    with Writer(place, tiers=tiers, until="shared") as writer:
        dcp.save(state(1), storage_writer=writer, no_dist=True)
        dcp.save(state(2), storage_writer=writer, no_dist=True)
        assert sources(place)[2] == ("memory", "disk", "shared")
        for spoil in (flip_in_memory, flip_on_disk):
            spoil(place, 2)
            assert digest(loaded(place, state(0))) == digest(state(2))
        flip_on_disk(shared, 2)
        with pytest.raises(CheckpointException, match=r"no copy of rank 0's part is good(.|\n)*memory(.|\n)*shared"):
            loaded(place, state(0))
        assert digest(loaded(place, state(0), checkpoint_id="1")) == digest(state(1))
        found = blank(state(0))
        with pytest.warns(UserWarning, match="step 1 is loaded, and newer ones are damaged"):
            dcp.load(found, storage_reader=Reader(place, older=True), no_dist=True)
        assert digest(found) == digest(state(1))


def test_a_newest_checkpoint_without_its_commit_is_not_passed_over(tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path, state(number))
    flip(tmp_path / "step-0000000002.json", 40)
    with pytest.raises(CheckpointException, match=r"step 2, the newest, is damaged.*Step 1 is whole"):
        loaded(tmp_path, state(0))
    with pytest.raises(CheckpointException, match=r"has no step 2 that is whole; there are \[1\]"):
        loaded(tmp_path, state(0), checkpoint_id="2")
    assert loaded(tmp_path, state(0), checkpoint_id="1")["n"] == 1


@pytest.mark.soak
def test_a_run_whose_directory_is_lost_is_read_from_the_deeper_tier(tmp_path: Path) -> None:
    place, tiers = tmp_path / "run", [Shared(str(tmp_path / "shared"), every=1)]
    with Writer(place, tiers=tiers) as writer:
        dcp.save(state(1), storage_writer=writer, no_dist=True)
    while keeper_pid(run_of(place)) is not None:
        time.sleep(0.01)
    shutil.rmtree(place)
    with pytest.raises(CheckpointException, match="has no checkpoint"):
        loaded(place, state(0))
    found = blank(state(0))
    dcp.load(found, storage_reader=Reader(place, tiers=tiers), no_dist=True)
    assert digest(found) == digest(state(1))
    with Writer(place, tiers=tiers) as writer:  # and it is the same run that goes on
        dcp.save(state(2), storage_writer=writer, no_dist=True)
    assert everstep.open(place).steps() == [1, 2]


def test_a_save_that_fails_leaves_the_last_one_and_the_next_one_goes_on(tmp_path: Path) -> None:
    bad = {**state(2), "f": lambda: 1}
    writer = Writer(tmp_path, until="sealed", tiers=[SELDOM])
    dcp.save(state(1), storage_writer=writer, no_dist=True)
    for _ in range(5):
        with pytest.raises(CheckpointException, match=r"f is a builtins\.function"):
            dcp.save(bad, storage_writer=writer, no_dist=True)
        assert digest(loaded(tmp_path, state(0))) == digest(state(1))
    with pytest.raises(CheckpointException, match="saving step 6 has failed; save a later one"):
        dcp.save(state(2), storage_writer=writer, checkpoint_id="6", no_dist=True)
    dcp.save(state(2), storage_writer=writer, no_dist=True)
    assert sources(tmp_path)[7] == ("memory",)
    dcp.save({"v": torch.ones(5), **state(3)}, storage_writer=writer, no_dist=True)  # in other memory
    assert sources(tmp_path)[7] in (("disk",), ("memory", "disk"))  # what only the former had was made durable first
    assert loaded(tmp_path, {"v": torch.ones(5), **state(0)})["n"] == 3


def test_state_that_finds_no_room_costs_nothing_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(root: object, needed: int, slots: int) -> Path:
        raise NotEnoughMemory("memory", needed, 0, "Free some.")

    writer = Writer(tmp_path, until="sealed", tiers=[SELDOM])
    dcp.save(state(1), storage_writer=writer, no_dist=True)
    with monkeypatch.context() as patch:
        patch.setattr("everstep.capture.life.choose_place", no_room)
        with pytest.raises(CheckpointException, match="MB in memory"):
            dcp.save({"v": torch.ones(5), **state(2)}, storage_writer=writer, no_dist=True)
    assert "memory" in sources(tmp_path)[1]
    for number in (3, 4):
        dcp.save(state(number), storage_writer=writer, no_dist=True)
    assert sources(tmp_path)[4] == ("memory",) and loaded(tmp_path, state(0))["n"] == 4


def test_a_writer_takes_the_place_of_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "_LOCK_PATIENCE_S", 0.1)
    first = Writer(tmp_path, keep=Keep(last=2))
    dcp.save(state(1), storage_writer=first, no_dist=True)
    second = Writer(tmp_path, keep=Keep(last=2))
    for number in (2, 3):
        dcp.save(state(number), storage_writer=second, no_dist=True)
    with pytest.raises(CheckpointException, match=r"another one of .* has taken its place"):
        dcp.save(state(4), storage_writer=first, no_dist=True)
    assert live(lambda: {"made": str(Writer(tmp_path))}).error.count(RunHeld.__name__)  # in another process
    second.close()
    assert everstep.open(tmp_path).steps() == [2, 3]


def test_newer_checkpoints_are_given_up_only_if_that_is_said(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save(tmp_path, state(number), checkpoint_id=str(10 * number))
    with pytest.raises(BadConfig, match=r"after=15: there is no such step; there are \[10, 20, 30\]"):
        Writer(tmp_path, after=15)
    with Writer(tmp_path, after=20) as writer:
        dcp.save(state(7), storage_writer=writer, checkpoint_id="25", no_dist=True)
    assert everstep.open(tmp_path).steps() == [10, 20, 25]
    assert loaded(tmp_path, state(0))["n"] == 7


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="nothing is ever 'shared' without"):
        Writer(tmp_path, until="shared")
    with pytest.raises(BadConfig, match="nothing is ever 'protected' without several nodes"):
        Writer(tmp_path, until="protected", tiers=[Partner()])
    with pytest.raises(ValueError, match="level must be one of"):
        Writer(tmp_path, until="soon")
    assert not list(tmp_path.iterdir())
    writer = Writer(tmp_path)
    with pytest.raises(Misuse, match=r"AsyncCheckpointerType\.THREAD"):
        pickle.dumps(writer)  # as AsyncCheckpointerType.PROCESS does


def test_saves_that_fail_on_one_rank_cost_the_others_nothing(tmp_path: Path) -> None:
    """What the others have sealed of them is worth nothing, and takes no room from the last that is whole."""

    def app(rank: int) -> object:
        writer = Writer(tmp_path / "run", until="sealed", tiers=[SELDOM])
        for factor in (1, 2):
            dcp.save(rows(factor), storage_writer=writer)
        for _ in range(4):
            with pytest.raises(CheckpointException, match=r"f is a builtins\.function"):
                dcp.save({**rows(9), "f": (lambda: 1) if rank == 0 else 1}, storage_writer=writer)
        found = rows(0)
        dcp.load(found, storage_reader=Reader(tmp_path / "run"))
        if rank == 0:
            assert "memory" in sources(tmp_path / "run")[2]
        dcp.save(rows(3), storage_writer=writer)
        return found["n"], bool(torch.equal(found["w"].full_tensor(), WHOLE * 2))

    assert ranks(app, tmp_path / "job") == ["(2, True)"] * 2
    assert everstep.open(tmp_path / "run").latest() == 7


def test_state_that_grows_waits_on_every_rank_until_what_it_leaves_behind_is_durable(tmp_path: Path) -> None:
    """A rank that turned to other memory at once could not lend the keeper what the others wait for."""

    def app(rank: int) -> object:
        with Writer(tmp_path / "run", until="sealed", tiers=[SELDOM]) as writer:
            dcp.save(rows(1), storage_writer=writer)
            dcp.save({"v": rows(2)["w"], **rows(2)}, storage_writer=writer)
        return "saved"

    assert ranks(app, tmp_path / "job", timeout_s=40) == ["saved"] * 2
    assert everstep.open(tmp_path / "run").steps() == [1, 2]


def test_ranks_that_would_go_on_from_different_steps_all_hear_of_it(tmp_path: Path) -> None:
    def app(rank: int) -> object:
        with Writer(tmp_path / "run") as writer:
            dcp.save(rows(1), storage_writer=writer)
        Writer(tmp_path / "run", after=rank + 1)
        return "made"

    said = ranks(app, tmp_path / "job", timeout_s=40)
    assert ["rank 0 has after=1, and rank 1 after=2: give all ranks the same" in one for one in said] == [True] * 2


def test_extras_that_cannot_be_read_are_struck_out_by_the_rank_whose_they_are() -> None:
    info = ImageInfo(format=image.FORMAT, run="r", rank=3, world=4)
    layout = image.lay_out([], info, 64)
    data = memoryview(bytearray(layout.total_bytes))
    image.put_extras(layout, data, b"\xc1")
    with pytest.raises(Damaged, match="unreadable extras") as caught:
        contents_of(layout, data, step=5, rank=3)
    assert (caught.value.step, caught.value.rank) == (5, 3)


def test_a_reader_forgets_the_step_that_it_could_not_load(tmp_path: Path) -> None:
    save(tmp_path, state(1))
    reader, found = Reader(tmp_path), blank(state(0))
    with pytest.raises(CheckpointException, match="has no step 9"):
        dcp.load(found, storage_reader=reader, checkpoint_id="9", no_dist=True)
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert found["n"] == 1


# -- nodes

WHOLE = torch.arange(48.0).reshape(12, 4)


class Nodes:
    """A rank each, with a directory and memory of its own."""

    def __init__(self, root: Path, count: int) -> None:
        self.root, self.count = root, count
        self.names = [f"dcp-{os.getpid()}-{root.name[-12:].replace('_', '-')}-{number}" for number in range(count)]

    def directory(self, rank: int) -> Path:
        return self.root / self.names[rank]

    def be(self, rank: int) -> None:
        os.environ["EVERSTEP_NODE"] = self.names[rank]

    def start(self, job: str, app: Callable[[int], object]) -> list[str]:
        def on_its_node(rank: int) -> object:
            self.be(rank)
            return app(rank)

        return ranks(on_its_node, self.root / job, self.count)

    def _memory(self, rank: int) -> Path:
        return arena_root(None, {"EVERSTEP_NODE": self.names[rank]})

    def lose(self, rank: int, *, disk: bool = True) -> None:
        """All that a node has, with its keeper."""

        def end() -> dict[str, Any]:
            self.be(rank)
            end_keeper(self.directory(rank))
            return {}

        assert live(end).code == 0
        shutil.rmtree(self._memory(rank), ignore_errors=True)
        if disk:
            shutil.rmtree(self.directory(rank))

    def close(self) -> None:
        for rank in range(self.count):
            self.lose(rank, disk=False)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[[int], Nodes]]:
    made: list[Nodes] = []

    def make(count: int) -> Nodes:
        made.append(Nodes(tmp_path, count))
        return made[-1]

    yield make
    for one in made:
        one.close()


def rows(factor: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return {"w": distribute_tensor(WHOLE * factor, mesh, [Shard(0)]), "n": int(factor)}


def loading(cluster: Nodes, **how: Any) -> Callable[[int], object]:
    def app(rank: int) -> object:
        found = rows(0)
        dcp.load(found, storage_reader=Reader(cluster.directory(rank), **how))
        return found["n"], bool(torch.equal(found["w"].full_tensor(), WHOLE * found["n"]))

    return app


@pytest.mark.parametrize(
    "protection", [Partner(), pytest.param(Parity("xor", group=3), marks=pytest.mark.soak)], ids=["partner", "parity"]
)
def test_a_lost_node_is_made_up_for(protection: Any, tmp_path: Path, nodes: Callable[[int], Nodes]) -> None:
    cluster = nodes(3)
    tiers = [protection, SELDOM]

    def saving(rank: int) -> str:
        writer = Writer(cluster.directory(rank), tiers=tiers, until="protected")
        for factor in (1, 2):
            dcp.save(rows(factor), storage_writer=writer)
        writer._life.end()
        return "saved"

    assert cluster.start("saving", saving) == ["saved"] * 3
    cluster.lose(1)
    assert cluster.start("loading", loading(cluster)) == ["(2, True)"] * 3

    def going_on(rank: int) -> str:
        with Writer(cluster.directory(rank), tiers=tiers) as writer:
            dcp.save(rows(3), storage_writer=writer)
        return "saved"

    assert cluster.start("going on", going_on) == ["saved"] * 3
    assert cluster.start("loading again", loading(cluster)) == ["(3, True)"] * 3
