"""The checkpoints of torch.distributed in a run's directory: its save, async_save and load, by way of our disk tier.

A checkpoint is a base like any other: a part a rank, every byte under a checksum, and a commit that is written last, so
that a save that breaks off anywhere leaves nothing that loads. `everstep ls`, `verify`, `export` and `everstep.open()`
read it. Nothing on the disk is pickle. All ranks must see the directory; how they talk is DCP's own affair.
"""

from __future__ import annotations

import io
import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from everstep.config import Keep
from everstep.errors import BadConfig, EverstepError, Misuse, NothingToRestore, RunHeld, Unstorable
from everstep.image import Wanted, header_bytes
from everstep.integrations.dcp_table import NOTE, VALUES, Place, described, difference, note_of
from everstep.integrations.parts import NewPart, blank_tree, info_of, wanted
from everstep.keeper import flush
from everstep.recover.assemble import tensor_in
from everstep.store import claim
from everstep.store.disk import DiskTier
from everstep.store.manifest import (
    RUN_RECORD,
    committed_steps,
    read_commit,
    read_data,
    read_part,
    read_single_part,
    run_name,
    step_folder,
)
from everstep.store.places import Places
from everstep.topology import node_name

Result = TypeVar("Result")
CheckpointId = str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class _Order:
    """What the coordinator tells a rank: what it writes is a part of which checkpoint."""

    run: str
    step: int
    generation: str
    rank: int
    world: int


class Writer(StorageWriter):
    """`dcp.save(state_dict, storage_writer=Writer("runs/gpt2"), checkpoint_id=1200)`. Each save is a step of the run.

    checkpoint_id: the step; without it the one after the newest. A step that is there already is never overwritten.
    keep: how many of the newest stay; by default all.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int | None = None) -> None:
        self.directory = Path(directory).absolute()
        self._keep = Keep(last=keep) if keep is not None else None
        self._step: int | None = None
        self._order: _Order | None = None
        self._values: set[str] = set()  # what this rank has that is no tensor

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        self._step = _step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_collectives") is False:
            raise BadConfig("a checkpoint is all ranks' or none's: use_collectives=False cannot be had here")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._values = {item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO}
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The coordinator: which step it is, and who writes what. Values lie in its own part, where it has them."""
        if not all(plan.usable for plan in plans):
            raise BadConfig("a planner that keeps its plans (enable_plan_caching) cannot be used here")
        claim.make(Places(directory=str(self.directory)))
        tier = DiskTier(self.directory)
        with claim.keep_away(self.directory) as is_free:
            if not is_free:
                raise RunHeld(str(self.directory), 0, node_name())
            run = _signed(tier)
        there = committed_steps(tier)
        step = self._step if self._step is not None else max(there, default=0) + 1
        if step in there:
            raise BadConfig(f"step {step} is there already, and is not overwritten; everstep rm removes it")
        self._order = _Order(run, step, uuid.uuid4().hex, 0, len(plans))
        gathered = [item for plan in plans for item in plan.items if self._is_mine(item)]
        kept = [[item for item in plan.items if not self._is_mine(item)] for plan in plans]
        kept[0] = gathered + kept[0]
        orders = [replace(self._order, rank=rank) for rank in range(len(plans))]
        return [
            replace(plan, items=items, storage_data=order)
            for plan, items, order in zip(plans, kept, orders, strict=True)
        ]

    def _is_mine(self, item: WriteItem) -> bool:
        return item.type is WriteItemType.BYTE_IO and item.index.fqn in self._values

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        order: _Order = plan.storage_data
        tensors = [item for item in plan.items if item.tensor_data is not None]
        names = [item.index.fqn for item in tensors]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise Unstorable(twice, planner, "a rank has several boxes of it, and an image one of each tensor")
        tree = blank_tree(order.step) | {
            NOTE: note_of(plan.items, plan.planner_data),
            VALUES: {i.index.fqn: _value(i, planner) for i in plan.items if i.type is WriteItemType.BYTE_IO},
        }
        part = NewPart([_room(item) for item in tensors], info_of(order.run, order.rank, order.world), tree)
        for item in tensors:
            found = planner.resolve_data(item)
            assert isinstance(found, torch.Tensor)
            part.place_of(item.index.fqn).copy_(found.detach())
        written = part.put(DiskTier(self.directory), order.generation)
        sizes = {piece.name: piece.length for piece in written.pieces}
        return _done([WriteResult(item.index, sizes.get(item.index.fqn, 0), None) for item in plan.items])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The coordinator, when all have written: if what would come back is what DCP has, it is committed."""
        order, tier = self._order, DiskTier(self.directory)
        assert order is not None
        self._order = self._step = None
        try:
            parts = [read_single_part(tier, order.step, r, order.run, step_folder) for r in range(order.world)]
        except FileNotFoundError as error:
            raise EverstepError(f"not all parts are in {self.directory}; do all ranks see it? {error}") from None
        odd = difference(described(tier, parts), metadata)
        if odd is not None:
            raise Unstorable(odd, metadata, "it would not come back as it is")
        if not flush.commit(tier, order.step, range(order.world), order.world, order.generation):
            raise EverstepError(f"not all parts of step {order.step} are of this save; is somebody else saving it too?")
        if self._keep is not None:
            flush.retire(tier, self._keep, order.run)
            flush.clean(tier)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_step(checkpoint_id)


class Reader(StorageReader):
    """`dcp.load(state_dict, storage_reader=Reader("runs/gpt2"))`. checkpoint_id: the step; without it the newest.

    Every byte that is used has been checked; damage raises, and nothing of the part that has it is used.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).absolute()
        self._step: int | None = None
        self._chosen = -1
        self._places: dict[MetadataIndex, Place] = {}

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        self._step = _step_of(checkpoint_id)

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        tier = DiskTier(self.directory)
        there = committed_steps(tier)
        if not there or self._step not in (None, *there):
            what = "checkpoint" if self._step is None else f"step {self._step}"
            raise NothingToRestore(f"{self.directory} has no {what}; there are {there}")
        self._chosen, self._step = there[-1] if self._step is None else self._step, None
        commit = read_commit(tier, self._chosen, run_name(tier))
        return described(tier, (read_part(tier, commit, ref.rank) for ref in commit.parts))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._chosen)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        chosen = sorted({plan.storage_data for plan in plans})
        if len(chosen) > 1:
            raise Misuse(f"ranks would load different steps, {chosen}; name one of them: checkpoint_id=...")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        of_part: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            place = self._places[item.storage_index]
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, _as_dcp_has_it(place.value))
            else:
                of_part.setdefault(place.rank, []).append(item)
        tier = DiskTier(self.directory)
        commit = read_commit(tier, self._chosen, run_name(tier))
        for rank, items in of_part.items():
            data = read_data(tier, read_part(tier, commit, rank))
            for item in items:
                self._copy(item, data, planner)
        return _done(None)

    def _copy(self, item: ReadItem, data: memoryview, planner: LoadPlanner) -> None:
        piece = self._places[item.storage_index].piece
        assert piece is not None
        begin = header_bytes(data) + piece.offset
        box = tuple(slice(s, s + e) for s, e in zip(item.storage_offsets, item.lengths, strict=True))
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor_in(data[begin : begin + piece.length], piece)[box])
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_step(checkpoint_id)


def _is_step(checkpoint_id: object) -> bool:
    return str(checkpoint_id).isascii() and str(checkpoint_id).isdigit() and int(str(checkpoint_id)) < 10**10


def _step_of(checkpoint_id: CheckpointId) -> int | None:
    if checkpoint_id is None:
        return None
    if not _is_step(checkpoint_id):
        raise BadConfig(f"checkpoint_id is the number of a step here, and not {checkpoint_id!r}")
    return int(str(checkpoint_id))


def _signed(tier: DiskTier) -> str:
    """The run's name, which is given to it by its first save."""
    try:
        run = run_name(tier)
    except FileNotFoundError:
        run = uuid.uuid4().hex
    if RUN_RECORD not in tier.names():
        claim.sign(tier, run, lambda event: None)
    return run


def _room(item: WriteItem) -> Wanted:
    assert item.tensor_data is not None
    data = item.tensor_data
    return wanted(item.index.fqn, data.properties.dtype, data.size, data.chunk.offsets, data.chunk.sizes)


def _value(item: WriteItem, planner: SavePlanner) -> Any:
    """What is no tensor, before the planner makes a pickle of it."""
    ours = DefaultSavePlanner
    if isinstance(planner, ours) and all(
        getattr(type(planner), name) is getattr(ours, name) for name in ("resolve_data", "transform_object")
    ):
        return planner.lookup_object(item.index)
    raise Unstorable(item.index.fqn, planner, "this planner makes bytes of its own of it, which may be pickle")


def _as_dcp_has_it(value: Any) -> io.BytesIO:
    """Planners take values as torch.save has them: made here, in memory, of what was read as plain data."""
    made = io.BytesIO()
    torch.save(value, made)
    made.seek(0)
    return made


def _done(result: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(result)
    return future
