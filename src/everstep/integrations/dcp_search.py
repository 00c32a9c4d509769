"""Which checkpoint DCP loads, and from where: the nearest good copy of each rank's part, wherever one is.

All ranks see what all of them have and decide the same. What turns out to be damaged is struck out, and the next best
copy is taken, or it is computed from parity. An older checkpoint takes the place of a newer one only if that was asked
for.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import msgspec

from everstep import topology
from everstep.errors import Damaged, EverstepError, NothingToRestore
from everstep.image import ImageLayout
from everstep.integrations.dcp_table import Contents, contents_of
from everstep.recover.assemble import Image
from everstep.recover.carry import Carrier
from everstep.recover.load import Report
from everstep.recover.make_good import rebuild_parts
from everstep.recover.plan import make_plan, merge, up_to, without
from everstep.recover.reach import in_words, passed_over, restorable
from everstep.recover.survey import Sources
from everstep.store import claim
from everstep.store.disk import DiskTier
from everstep.store.manifest import run_name
from everstep.store.places import Places
from everstep.tiers import Tiers
from everstep.topology import Topology
from everstep.types import Holding, ImageInfo, ParityHolding, Plan, Source, Survey

_NEAREST = {source: at for at, source in enumerate(get_args(Source))}


class _Notes:
    """Of an image: what is no tensor."""

    is_partial = True

    def ranges(self, layout: ImageLayout, info: ImageInfo) -> list[tuple[int, int]]:
        return [(layout.extras_offset, layout.total_bytes)]


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Of an image: some tensors."""

    names: Collection[str]
    is_partial: bool = True

    def ranges(self, layout: ImageLayout, info: ImageInfo) -> list[tuple[int, int]]:
        begin = len(layout.header)
        wanted = [piece for piece in layout.pieces if piece.name in self.names]
        return [(begin + piece.offset, begin + piece.offset + piece.length) for piece in wanted]


@dataclass(slots=True)
class Found:
    """A checkpoint that is whole."""

    step: int
    sources: Sources
    contents: list[Contents]
    copies: dict[int, list[Holding]]  # of each rank's part, as this node can read them, the nearest first
    images: dict[int, Image] = field(default_factory=dict)  # what had to travel between nodes, or to be computed

    def image(self, rank: int, names: Collection[str]) -> Image:
        """One rank's part as far as these tensors need it, every byte of that checked."""
        if rank in self.images:
            return self.images[rank]
        reasons = []
        for holding in self.copies[rank]:
            try:
                return self.sources.fetch(holding, copy=True, needs=_Tensors(names))
            except (EverstepError, OSError) as error:
                reasons.append(f"{holding.source}: {error}")
        raise Damaged(
            f"of step {self.step} no copy of rank {rank}'s part is good. Name an older step, or use Reader(..., "
            "older=True).\n  " + "\n  ".join(reasons)
        )


def open_sources(directory: Path, tiers: Tiers | None, place: Topology) -> Sources:
    """What this node can read of the run. All ranks must ask."""
    problem, name, places = "", "", Places(directory=str(directory))
    try:
        places = Places.written(directory) if tiers is None else Places.chosen(directory, tiers)
        name = _name(places)
    except (EverstepError, OSError) as error:
        problem = str(error)
    told = topology.exchange(msgspec.msgpack.encode((name, problem)), place)
    answers = [msgspec.msgpack.decode(one, type=tuple[str, str]) for one in told]
    names = {name for name, _ in answers if name}
    problems = [problem for _, problem in answers if problem]
    if len(names) != 1:
        why = "; ".join(problems) or (f"these are of different runs: {', '.join(sorted(names))}" if names else "")
        raise NothingToRestore(f"{directory} has no checkpoint{': ' if why else ''}{why}")
    is_common = claim.is_common(Path(places.disk or places.directory), place)
    return Sources(places, names.pop(), is_common=is_common)


def _name(places: Places) -> str:
    """Of the run: as its directory says, else a deeper tier."""
    for tier in (DiskTier(Path(places.directory)), *places.deeper_tiers().values()):
        try:
            return run_name(tier)
        except (FileNotFoundError, NotADirectoryError):
            continue
    return ""


def find(sources: Sources, place: Topology, step: int | None, *, older: bool) -> Found:
    """A step, or the newest. All ranks must ask. `older`: one that is damaged everywhere may be passed over."""
    mine = msgspec.msgpack.encode((sources.node, sources.survey()))
    answers = [msgspec.msgpack.decode(a, type=tuple[str, Survey]) for a in topology.exchange(mine, place)]
    nodes = {node for node, _ in answers}
    everything = merge([survey for _, survey in answers])
    there = restorable(everything)
    survey = msgspec.structs.replace(up_to(everything, step), attempts=(), records=(), values=())
    carrier = Carrier(sources, place)
    while True:
        plan = make_plan(survey, nodes)
        damaged = passed_over(plan)
        told = "".join(
            f"\n  step {r.step} ({r.source}): {r.reason}" for r in survey.rejections if step in (None, r.step)
        )
        if plan.step is None or step not in (None, plan.step):
            what = "checkpoint" if step is None else f"step {step}"
            kind = Damaged if any(r.step == step or step is None for r in survey.rejections) else NothingToRestore
            left = in_words(sorted(there - {r.step for r in survey.rejections if r.certain}))
            raise kind(f"{sources.tier.root} has no {what} that is whole; there are [{left}]{told}")
        if damaged and step is None and not older:
            raise Damaged(
                f"step {max(damaged)}, the newest, is damaged, and no other copy of it is good. Step {plan.step} is "
                f"whole: load it with checkpoint_id={plan.step!r}, or use Reader(..., older=True).{told}"
            )
        found, report = _fetch(carrier, sources, plan, place, verify=place.has_many_nodes or older)
        reports = [
            msgspec.msgpack.decode(one, type=Report) for one in topology.exchange(msgspec.msgpack.encode(report), place)
        ]
        bad: list[tuple[Holding | ParityHolding, str]] = []
        for one in reports:
            bad += [*one.bad, *one.bad_parities]
        if found is not None and not bad:
            if damaged and step is None and place.rank == 0:
                warnings.warn(f"step {plan.step} is loaded, and newer ones are damaged:{told}", stacklevel=2)
            found.copies = _copies(survey, plan, sources.node)
            return found
        for damage, reason in bad:
            survey = without(survey, damage, reason)


def _copies(survey: Survey, plan: Plan, node: str) -> dict[int, list[Holding]]:
    found: dict[int, list[Holding]] = {part.rank: [] for part in plan.parts}
    key = (plan.parts[0].step, plan.parts[0].generation, plan.world)
    for one in sorted(survey.holdings, key=lambda h: _NEAREST[h.source]):
        if (one.step, one.generation, one.world) == key and (one.everywhere or one.node == node):
            found[one.rank].append(one)
    return found


def _fetch(
    carrier: Carrier, sources: Sources, plan: Plan, place: Topology, *, verify: bool
) -> tuple[Found | None, Report]:
    """The notes of all parts, and what other nodes must send. `verify`: each rank reads some of the other parts whole.

    So whatever has a copy that only another node could send is found to be bad while there is time for that.
    """
    assert plan.step is not None
    images: dict[int, Image] = {}
    contents: dict[int, Contents] = {}
    bad: list[tuple[Holding, str]] = []
    for at, holding in enumerate(part for part in plan.parts if part.source != "parity"):
        try:
            if plan.parities or (place.has_many_nodes and not holding.everywhere):
                images[holding.rank] = carrier.image(holding)
                continue
            if verify and at % place.world == place.rank:
                sources.fetch(holding)
            contents[holding.rank] = _peek(sources, holding)
        except (EverstepError, OSError) as error:
            bad.append((holding, str(error)))
    bad_parities: list[tuple[ParityHolding, str]] = []
    if plan.parities and carrier.is_agreed(not bad):
        bad_parities = rebuild_parts(carrier, plan, images)
    try:
        contents |= {rank: contents_of(found[0], found[2], plan.step, rank) for rank, found in images.items()}
    except Damaged as error:
        bad += [(part, str(error)) for part in plan.parts if part.rank == error.rank]
    if bad or bad_parities or len(contents) < plan.world:
        return None, Report(bad, [], bad_parities)
    return Found(plan.step, sources, [contents[rank] for rank in range(plan.world)], {}, images), Report([])


def _peek(sources: Sources, holding: Holding) -> Contents:
    """What a part holds, without reading its tensors; looked at twice, because memory may be overwritten meanwhile."""
    layout, _, data = sources.fetch(holding, needs=_Notes())
    found = contents_of(layout, data, holding.step, holding.rank)
    if holding.source == "memory":
        sources.fetch(holding, needs=_Notes())
    return found
