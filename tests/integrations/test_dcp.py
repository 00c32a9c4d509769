"""torch.distributed.checkpoint through Everstep: what is loaded is what was saved, every byte of it, or nothing is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import blank, give_memory_back, loaded, ranks, save, state
from lives import Countdown, digest, live
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import everstep
from everstep.errors import RunHeld, Unstorable
from everstep.integrations.adopt import adopt
from everstep.integrations.dcp import Reader, Writer
from everstep.integrations.dcp_table import note_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*CheckpointException")


@pytest.fixture(autouse=True)
def memory_is_given_back(tmp_path: Path) -> Iterator[None]:
    yield
    give_memory_back(tmp_path)


def test_what_is_loaded_is_what_was_saved_and_everstep_reads_it_too(tmp_path: Path) -> None:
    saved = state(3)
    save(tmp_path / "run", saved)
    assert digest(loaded(tmp_path / "run", saved)) == digest(saved)
    past = everstep.open(tmp_path / "run")
    assert [(kept.step, kept.sources) for kept in past.kept()] == [(1, ("disk",))]
    assert [one.problem for one in past.verify()] == [""]
    read = past.load()
    assert torch.equal(read["model.0.weight"], saved["model"]["0.weight"])
    assert torch.equal(read["odd.last"], saved["odd"]["last"]) and read["odd.half"].dtype == torch.bfloat16
    assert read["values"]["step"] == 3 and read["values"]["optimizer.param_groups.0.lr"] == 0.01
    files = {path.name.partition(".")[2] for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert files == {"", "bin", "json", "jsonl", "log", "safetensors"}  # none of DCP's own, nor any pickle
    past.export(tmp_path / "out.pt", format="torch")
    assert digest(torch.load(tmp_path / "out.pt", weights_only=True)["model"]) == digest(saved["model"])
    past.export(tmp_path / "out", format="dcp")
    found = blank(saved)
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert digest(found["model"], found["odd"], found["step"]) == digest(saved["model"], saved["odd"], saved["step"])


def test_each_save_is_a_step_and_none_is_overwritten(tmp_path: Path) -> None:
    writer, first, second = Writer(tmp_path, keep=2), state(1), state(2)
    dcp.save(first, storage_writer=writer, checkpoint_id="7", no_dist=True)
    dcp.async_save(second, storage_writer=writer, no_dist=True).result(timeout=60)
    assert everstep.open(tmp_path).steps() == [7, 8]
    assert loaded(tmp_path, first)["step"] == 2 and loaded(tmp_path, first, checkpoint_id="7")["step"] == 1
    with pytest.raises(CheckpointException, match="step 8 is there already"):
        dcp.save(first, storage_writer=writer, checkpoint_id="8", no_dist=True)
    with pytest.raises(CheckpointException, match=r"step 3 is older than 8, which is there: steps go up.*after="):
        dcp.save(first, storage_writer=writer, checkpoint_id="3", no_dist=True)
    assert loaded(tmp_path, first)["step"] == 2
    dcp.save(state(3), storage_writer=writer, no_dist=True)
    writer.close()
    assert everstep.open(tmp_path).steps() == [8, 9]
    with pytest.raises(CheckpointException, match=r"has no step 7 that is whole; there are \[8 to 9\]"):
        loaded(tmp_path, first, checkpoint_id="7")
    with pytest.raises(CheckpointException, match="this Writer was closed"):
        dcp.save(state(4), storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointException, match="has no checkpoint"):
        loaded(tmp_path / "nowhere", first)
    with pytest.raises(ValueError, match="the number of a step"):
        save(tmp_path, first, checkpoint_id="runs/gpt2")
    assert Writer.validate_checkpoint_id("12") and not Reader.validate_checkpoint_id("12b")


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    saved = state()
    save(tmp_path / "run", saved)
    files = sorted(path for path in (tmp_path / "run").rglob("*") if path.suffix in (".json", ".safetensors"))
    assert len(files) == 5
    for file in files:
        if file.name in ("run.json", "tiers.json"):
            continue  # what they say is in the commit too
        content = file.read_bytes()
        for at in (9, len(content) // 3, len(content) // 2, len(content) - 2000):
            damaged = bytearray(content)
            damaged[at % len(content)] ^= 4
            file.write_bytes(damaged)
            with pytest.raises(CheckpointException, match=r"checksum|digest|unreadable|no checkpoint|not the manifest"):
                loaded(tmp_path / "run", saved)
        file.write_bytes(content[:-1])
        with pytest.raises(
            CheckpointException, match="it ends before byte" if file.suffix == ".safetensors" else "digest|unreadable"
        ):
            loaded(tmp_path / "run", saved)
        file.write_bytes(content)
    assert digest(loaded(tmp_path / "run", saved)) == digest(saved)


def test_a_flipped_bit_in_the_middle_of_a_large_part_is_found(tmp_path: Path) -> None:
    saved = {"w": torch.randn(3_000_000)}  # three chunks, of which the table of contents is in the first and the last
    save(tmp_path, saved)
    (file,) = tmp_path.glob("step-*/*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(6_000_000)
        byte = opened.read(1)
        opened.seek(6_000_000)
        opened.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CheckpointException, match=r"do not match their checksum.*chunk 1"):
        loaded(tmp_path, saved)


def test_what_dcp_knows_of_a_checkpoint_comes_back(tmp_path: Path) -> None:
    saved = {"a": nn.Parameter(torch.ones(2, 3)), "b": {"c": [torch.ones(1), {"d": 4}]}}
    told = dcp.save(saved, storage_writer=Writer(tmp_path), no_dist=True)
    found = Reader(tmp_path).read_metadata()
    assert found.state_dict_metadata == told.state_dict_metadata
    assert found.state_dict_metadata["a"].properties.requires_grad
    assert (
        found.planner_data == told.planner_data == {"a": ("a",), "b.c.0": ("b", "c", 0), "b.c.1.d": ("b", "c", 1, "d")}
    )


def test_a_save_that_is_killed_anywhere_leaves_the_last_one(tmp_path: Path) -> None:
    states = [{"w": (-1) ** n * torch.arange(2000.0), "n": n} for n in range(60)]
    save(tmp_path, states[0])
    newest = 0
    for operation in range(60):

        def life(operation: int = operation, what: dict[str, Any] = states[newest + 1]) -> dict[str, Any]:
            Countdown(operation).install()
            dcp.save(what, storage_writer=Writer(tmp_path, until="sealed"), no_dist=True)
            return {}

        outcome, steps = live(life), everstep.open(tmp_path).steps()
        assert len(steps) in (newest + 1, newest + 2)
        newest = len(steps) - 1
        assert digest(loaded(tmp_path, states[0])) == digest(states[newest])  # what is left of it is in nobody's way
        if not outcome.killed:
            assert operation > 1 and not outcome.error, outcome.error
            return
    raise AssertionError("a save takes more than 60 operations")


# -- what is refused


class Own(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object)


class Noting(DefaultSavePlanner):
    """Has something of its own in the metadata."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data={**metadata.planner_data, "mine": ("more",)})


class Forgetful(DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, state_dict_metadata={})


class Halves(DefaultSavePlanner):
    """Two boxes of a tensor on one rank."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        (item,) = plan.items
        assert item.tensor_data is not None
        boxes = [ChunkStorageMetadata(torch.Size([at]), torch.Size([1])) for at in range(2)]
        items = [
            replace(
                item, type=WriteItemType.SHARD, index=MetadataIndex("w", box.offsets),
                tensor_data=replace(item.tensor_data, chunk=box),
            )
            for box in boxes
        ]  # fmt: skip
        return replace(plan, items=items)


@pytest.mark.parametrize(
    ("planner", "named"),
    [(Noting, "the planner's data"), (Forgetful, "w is a"), (Halves, r"w is a .* several boxes of it")],
)
def test_a_planner_whose_metadata_would_not_come_back_is_refused(
    planner: type[DefaultSavePlanner], named: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointException, match=named):
        save(tmp_path, {"w": torch.ones(2)}, planner=planner())
    assert everstep.open(tmp_path).steps() == []


def test_a_directory_that_is_trained_in_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "holder").open("w"), pytest.raises(RunHeld):
        Writer(tmp_path)
    assert not list(tmp_path.glob("run.json"))


def test_a_memory_format_that_is_not_kept_is_named() -> None:
    properties = TensorProperties(memory_format=torch.channels_last)
    size = torch.Size([1, 1, 1, 1])
    chunk = ChunkStorageMetadata(torch.Size([0] * 4), size)
    data = TensorWriteData(chunk, properties, size)
    with pytest.raises(Unstorable, match=r"w is a .*torch\.channels_last"):
        note_of([WriteItem(MetadataIndex("w"), WriteItemType.TENSOR, tensor_data=data)], None)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({"f": {"deep": lambda: 1}}, "f.deep is a builtins.function"),
        ({"path": Path("a")}, "path is a pathlib"),
        ({"sparse": torch.eye(3).to_sparse()}, "sparse is a torch.layout"),
        ({"wide": torch.ones(2, dtype=torch.complex128)}, "wide is a torch.dtype"),
        ({"everstep.extras": torch.ones(2)}, "everstep.extras is a torch.dtype"),
        ({"nowhere": torch.empty(2, device="meta")}, "nowhere is a torch.Tensor.* no data"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_what_cannot_be_stored_is_named_and_nothing_is_committed(
    what: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointException, match=named):
        save(tmp_path, {"w": torch.ones(2), **what})
    assert everstep.open(tmp_path).steps() == []


def test_planners_that_make_bytes_or_keep_their_plans_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"n is a .*Own.* bytes of its own"):
        save(tmp_path, {"w": torch.ones(2), "n": 1}, planner=Own())
    save(tmp_path, {"w": torch.ones(2)}, planner=Own())
    caching = DefaultSavePlanner(enable_plan_caching=True)
    save(tmp_path, {"v": torch.ones(2)}, planner=caching)
    with pytest.raises(CheckpointException, match="keeps its plans"):
        save(tmp_path, {"v": torch.ones(2)}, planner=caching)
    with pytest.raises(ValueError, match="all ranks' or none's"):
        save(tmp_path, {"v": torch.ones(2)}, use_collectives=False)
    assert everstep.open(tmp_path).steps() == [1, 2]


def test_a_base_of_guard_is_not_taken_for_one_of_dcp(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    adopt(tmp_path / "w.pt", tmp_path / "run")
    with pytest.raises(CheckpointException, match=r"not written through torch\.distributed\.checkpoint"):
        loaded(tmp_path / "run", {"w": torch.ones(2)})


# -- two ranks

WHOLE = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)


def sharded(zero: bool = False, other: bool = False) -> dict[str, Any]:
    """Uneven rows, columns, copies, plain tensors and values; `other`: cut otherwise."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.zeros_like(WHOLE) if zero else WHOLE
    cuts = [Shard(1), Replicate(), Shard(0)] if other else [Shard(0), Shard(1), Replicate()]
    found: dict[str, Any] = {
        name: distribute_tensor(whole * factor, mesh, [cut])
        for factor, (name, cut) in enumerate(zip(("rows", "columns", "copies"), cuts, strict=True), 1)
    }
    return {"model": found, "plain": whole * 4, "n": 0 if zero else 9}


def full(found: dict[str, Any]) -> str:
    tensors = [one.full_tensor() if isinstance(one, DTensor) else one for one in found["model"].values()]
    return digest([*tensors, found["plain"], found["n"]])


def two_save(place: Path) -> Callable[[int], str]:
    def app(rank: int) -> str:
        saved = sharded()
        dcp.save(saved, storage_writer=Writer(place / "run"))
        dcp.save(saved, checkpoint_id=place / "theirs")
        again, other = sharded(zero=True), sharded(zero=True, other=True)
        dcp.load(again, storage_reader=Reader(place / "run"))
        dcp.load(other, storage_reader=Reader(place / "run"))
        future = dcp.async_save(saved, storage_writer=Writer(place / "run"), checkpoint_id="5")
        future.result(timeout=60)
        return json.dumps([full(saved), full(again), full(other)])

    return app


def test_two_ranks_save_shards_and_any_number_loads_them(tmp_path: Path) -> None:
    for said in ranks(two_save(tmp_path), tmp_path / "job"):
        saved, again, other = json.loads(said)
        assert saved == again == other
    for step in ("1", "5"):
        like = {"model": dict.fromkeys(("rows", "columns", "copies"), WHOLE), "plain": WHOLE, "n": 0}
        found = loaded(tmp_path / "run", like, checkpoint_id=step)
        assert torch.equal(found["model"]["columns"], WHOLE * 2) and found["n"] == 9
        assert full(found) == saved
    past = everstep.open(tmp_path / "run")
    assert [(kept.step, kept.world) for kept in past.kept()] == [(1, 2), (5, 2)]
    read = past.load()
    assert torch.equal(read["model.rows"], WHOLE) and torch.equal(read["plain"], WHOLE * 4)
    assert read["values"] == {"n": 9}
    adopt(tmp_path / "theirs", tmp_path / "adopted")  # what torch itself wrote of shards
    read = everstep.open(tmp_path / "adopted").load()
    assert torch.equal(read["model.rows"], WHOLE) and torch.equal(read["model.columns"], WHOLE * 2)


def test_a_rank_that_dies_in_a_save_leaves_nothing_that_loads(tmp_path: Path) -> None:
    def app(rank: int) -> str:
        dcp.save(sharded(), storage_writer=Writer(tmp_path / "run"))
        writer = Writer(tmp_path / "run")
        if rank == 1:
            Countdown(1).install()  # the slot is filled, and not sealed
        dcp.save(sharded(zero=True), storage_writer=writer)
        return "saved"

    said = ranks(app, tmp_path / "job")
    assert said[1] == "killed" and "Error" in said[0]
    past = everstep.open(tmp_path / "run")
    assert past.steps() == [1] and torch.equal(past.load()["model.rows"], WHOLE)


def test_ranks_that_do_not_see_the_same_directory_are_told_so(tmp_path: Path) -> None:
    said = ranks(lambda rank: Writer(tmp_path / f"run-{rank}"), tmp_path / "job")
    assert all("rank 0 saves to" in one and "rank 1 of the same node to" in one for one in said)
    assert not list(tmp_path.glob("run-*/run.json"))
