"""The checkpoints of torch.distributed in a run's directory: its save, async_save and load, by way of our tiers.

A checkpoint is a base like any other: a part a rank, in memory that outlives the process, brought to a disk, to
partners and to deeper tiers by the keeper, every byte under a checksum. A save that breaks off anywhere leaves nothing
that loads. `everstep ls`, `verify`, `export` and `everstep.open()` read it. Nothing that is kept is pickle. Ranks talk
through DCP, but for when a Writer is made and when a load begins.
"""

from __future__ import annotations

import io
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import torch
import torch.distributed as dist
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

from everstep import image, topology
from everstep.capture import extras
from everstep.config import Keep, settings
from everstep.errors import BadConfig, EverstepError, Misuse, Unstorable
from everstep.image import ImageLayout, Wanted
from everstep.integrations.dcp_life import DcpLife
from everstep.integrations.dcp_search import Found, find, open_sources
from everstep.integrations.dcp_table import NOTE, VALUES, Contents, Place, described, difference, note_of
from everstep.integrations.parts import blank_tree, wanted
from everstep.recover.assemble import tensor_in
from everstep.store.manifest import uncovered
from everstep.tiers import Tier, choose
from everstep.types import Level, Piece

Result = TypeVar("Result")
CheckpointId = str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class _Order:
    """What rank 0 tells the others: which checkpoint it is, and which is the newest that is whole."""

    step: int
    good: int | None


class Writer(StorageWriter):
    """`dcp.save(state_dict, storage_writer=Writer("runs/gpt2"), checkpoint_id=1200)`. Each save is a step of the run.

    All ranks make one together, and keep it for all their saves; close it, or leave its `with`, when they are done.
    checkpoint_id: the step; without it the one after the newest. Steps go up, and none is ever overwritten.
    tiers: as for guard(). keep: how many of the newest stay, or Keep(last=, every=); by default all.
    until: the level at which a save returns: "sealed" (in memory that outlives the process), "durable", "protected" or
    "shared". The keeper brings it further, as tiers say.
    after: the step that the program went on from, if it is not the newest: newer ones are given up.
    process_group, no_dist: as they are given to dcp.save.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        tiers: Sequence[Tier] | str | Path | None = None,
        keep: int | Keep | None = None,
        until: str = "durable",
        after: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> None:
        chosen = settings(
            Path(directory), lose_at_most=1, tiers=tiers, keep=Keep(every=1) if keep is None else keep, mode="host",
            on_loss=(), strategy="snapshot",
        )  # fmt: skip
        self.directory = chosen.directory
        place = topology.alone() if no_dist else topology.here(group=process_group)
        self._life = DcpLife(chosen, place, Level.named(until), after)
        self._end = weakref.finalize(self, self._life.end)
        self._step: int | None = None  # of the next save, if it was given one,
        self._wanted: int | None = None  # and of the present one
        self._begun: int | None = None  # rank 0: the step that was saved last, be it in vain,
        self._filled: tuple[_Order, int] | None = None  # and its part, which is sealed last of all
        self._values: set[str] = set()  # what this rank has that is no tensor

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise Misuse("a Writer is its process's: use async_save with AsyncCheckpointerType.THREAD, not PROCESS")

    def close(self) -> None:
        """Have the newest checkpoint brought as deep as it goes, and give back the memory."""
        self._life.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._life.end()

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        self._step = _step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_collectives") is False:
            raise BadConfig("a checkpoint is all ranks' or none's: use_collectives=False cannot be had here")
        rank = self._life.place.rank
        if kwargs.get("rank", rank) != rank or is_coordinator != (rank == 0):
            raise Misuse("give Writer the same process_group and no_dist as dcp.save")
        self._wanted, self._step = self._step, None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._values = {item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO}
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Rank 0: which step it is, and who writes what. Values lie in its own part, where it has them."""
        if not all(plan.usable for plan in plans):
            raise BadConfig("a planner that keeps its plans (enable_plan_caching) cannot be used here")
        if len(plans) != self._life.place.world:
            raise Misuse("give Writer the same process_group and no_dist as dcp.save")
        order = _Order(self._next(), self._life.good)
        self._begun, self._filled = order.step, None
        gathered = [item for plan in plans for item in plan.items if self._is_mine(item)]
        kept = [[item for item in plan.items if not self._is_mine(item)] for plan in plans]
        kept[0] = gathered + kept[0]
        return [replace(plan, items=items, storage_data=order) for plan, items in zip(plans, kept, strict=True)]

    def _next(self) -> int:
        there, begun = self._life.there, self._begun
        newest = max([*there, *(() if begun is None else (begun,))], default=0)
        step = newest + 1 if self._wanted is None else self._wanted
        if step in there:
            raise BadConfig(f"step {step} is there already, and is not overwritten")
        if step == begun:
            raise BadConfig(f"saving step {step} has failed; save a later one, or that one with a new Writer")
        if newest > 0 and step < newest:
            raise BadConfig(
                f"step {step} is older than {newest}, which is there: steps go up. To go on from an older one make a "
                "Writer with after= its step, which gives up what is newer."
            )
        return step

    def _is_mine(self, item: WriteItem) -> bool:
        return item.type is WriteItemType.BYTE_IO and item.index.fqn in self._values

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        order: _Order = plan.storage_data
        tensors = [item for item in plan.items if item.tensor_data is not None]
        names = [item.index.fqn for item in tensors]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise Unstorable(twice, planner, "a rank has several boxes of it, and an image one of each tensor")
        note = note_of(plan.items, plan.planner_data)
        values = {i.index.fqn: _value(i, planner) for i in plan.items if i.type is WriteItemType.BYTE_IO}
        tree = blank_tree(order.step) | {NOTE: msgspec.to_builtins(note), VALUES: values}
        told = extras.encode(tree, "state")
        layout = self._life.lay_out([_room(item) for item in tensors], len(told))
        slot, view = self._life.open_slot(layout, order.good)
        image.put_extras(layout, view, told)
        places = {piece.name: tensor_in(_bytes_of(view, layout, piece), piece) for piece in layout.pieces}
        for item in tensors:
            found = planner.resolve_data(item)
            assert isinstance(found, torch.Tensor)
            if found.is_meta:
                raise Unstorable(item.index.fqn, found, "it is on the meta device and has no data")
            places[item.index.fqn].copy_(found.detach())
        rank = self._life.place.rank
        if rank == 0:
            self._filled = order, slot
        else:
            self._life.seal(slot, order.step)
        sizes = {piece.name: piece.length for piece in layout.pieces}
        written = [WriteResult(item.index, sizes.get(item.index.fqn, 0), None) for item in plan.items]
        contents = Contents(rank, layout.pieces, note, dict.fromkeys(values))
        return _done([*written, WriteResult(MetadataIndex(NOTE), 0, contents)])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0, when all have filled theirs: if what would come back is what DCP has, it exists."""
        assert self._filled is not None
        (order, slot), self._filled = self._filled, None
        parts = [one[-1].storage_data for one in results]
        odd = difference(described(parts), metadata)
        if odd is not None:
            raise Unstorable(odd, metadata, "it would not come back as it is")
        missing = uncovered(part.pieces for part in parts)
        if missing is not None:
            raise EverstepError(f"what the ranks saved is not a whole checkpoint: {missing}")
        self._life.seal(slot, order.step)
        self._life.finish(order.step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_step(checkpoint_id)


class Reader(StorageReader):
    """`dcp.load(state_dict, storage_reader=Reader("runs/gpt2"))`. checkpoint_id: the step; without it the newest.

    Every byte that is used has been checked. What is damaged is read from the next best place; if no place has it,
    that raises, and only with older=True is the next older checkpoint loaded instead, with a warning.
    tiers: where else to look, if the directory itself is lost. process_group, no_dist: as they are given to dcp.load.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        tiers: Sequence[Tier] | str | Path | None = None,
        older: bool = False,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> None:
        self.directory = Path(directory).absolute()
        self._tiers = None if tiers is None else choose(tiers, os.environ)
        self._older, self._group, self._no_dist = older, process_group, no_dist
        self._step: int | None = None
        self._found: Found | None = None
        self._places: dict[MetadataIndex, Place] = {}

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        self._step = _step_of(checkpoint_id)

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """All ranks come here first, so here they find out together what there is.

        Were it `**kwargs`, DCP would take every error for a missing table, and ask each rank for one of its own.
        """
        place = topology.alone() if self._no_dist else topology.here(group=self._group)
        step, self._step = self._step, None
        self._let_go()
        sources = open_sources(self.directory, self._tiers, place)
        try:
            self._found = find(sources, place, step, older=self._older)
        except BaseException:
            sources.close()
            raise
        return described(self._found.contents)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        found = self._found
        assert found is not None
        of_part: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, _as_dcp_has_it(self._places[item.storage_index].value))
            else:
                of_part.setdefault(self._places[item.storage_index].rank, []).append(item)
        try:
            for rank, items in of_part.items():
                layout, _, data = found.image(rank, {item.storage_index.fqn for item in items})
                for item in items:
                    self._copy(item, layout, data, planner)
        finally:
            self._let_go()
        return _done(None)

    def _let_go(self) -> None:
        """Of what was found; also by a load that broke off before it read anything."""
        if self._found is not None:
            self._found.sources.close()
        self._found = None

    def _copy(self, item: ReadItem, layout: ImageLayout, data: memoryview, planner: LoadPlanner) -> None:
        piece = self._places[item.storage_index].piece
        assert piece is not None
        box = tuple(slice(s, s + e) for s, e in zip(item.storage_offsets, item.lengths, strict=True))
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor_in(_bytes_of(data, layout, piece), piece)[box])
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


def _bytes_of(data: memoryview, layout: ImageLayout, piece: Piece) -> memoryview:
    begin = len(layout.header) + piece.offset
    return data[begin : begin + piece.length]


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
