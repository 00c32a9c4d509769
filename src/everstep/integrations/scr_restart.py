"""What a restart needs of a checkpoint: each rank its own files, and no others."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.errors import Damaged, EverstepError
from everstep.integrations.scr_files import unpack
from everstep.recover.assemble import Image
from everstep.recover.carry import Carrier
from everstep.recover.load import Fetch, Report
from everstep.recover.make_good import rebuild_parts
from everstep.topology import Topology
from everstep.types import Holding, ParityHolding, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint that every rank holds its part of, verified."""

    step: int
    name: str
    flags: int
    files: dict[str, memoryview]
    has_moved: bool  # some of it does not lie where its rank is: the caches are to be filled again


def fetcher(place: Topology) -> Fetch[Candidate]:
    """For `search`: the images of the old ranks that fall to this one."""

    def fetch(carrier: Carrier, plan: Plan, rank: int) -> tuple[Candidate | None, Report]:
        images: dict[int, Image] = {}
        bad: list[tuple[Holding, str]] = []
        for holding in (part for part in plan.parts if part.source != "parity"):
            try:
                if plan.parities:
                    images[holding.rank] = carrier.image(holding)  # what is lost is computed from all the others
                elif (found := carrier.image_for(holding.rank % place.world, holding)) is not None:
                    images[holding.rank] = found
            except (EverstepError, OSError) as error:
                bad.append((holding, str(error)))
        bad_parities: list[tuple[ParityHolding, str]] = []
        if plan.parities and carrier.is_agreed(not bad):
            bad_parities = rebuild_parts(carrier, plan, images)
        if bad or bad_parities or plan.step is None:
            return None, Report(bad, [], bad_parities)
        try:
            return _candidate(plan, images, place), Report([])
        except Damaged as error:
            return None, Report([(part, str(error)) for part in plan.parts if part.rank == error.rank])

    return fetch


def _candidate(plan: Plan, images: dict[int, Image], place: Topology) -> Candidate:
    assert plan.step is not None
    name, flags, files = "", 0, dict[str, memoryview]()
    for old in (one for one in sorted(images) if one % place.world == place.rank):
        layout, _, data = images[old]
        dataset = unpack(layout, data, plan.step, old)
        name, flags = dataset.name, dataset.flags
        files |= dataset.files
    has_moved = plan.world != place.world or any(
        part.source not in ("memory", "disk")
        or not (part.everywhere or place.nodes[part.rank % place.world] == part.node)
        for part in plan.parts
    )
    return Candidate(step=plan.step, name=name, flags=flags, files=files, has_moved=has_moved)
