"""One step for whoever reads: the newest that is sound, or the one that is asked for; by repeating, if need be."""

from __future__ import annotations

import warnings

import msgspec

from everstep.errors import (
    BadConfig,
    Damaged,
    Diverged,
    EverstepError,
    NothingToRestore,
    PassedOver,
    ReplayedElsewhere,
)
from everstep.recover.assemble import Checkpoint, Image, whole_views
from everstep.recover.chain import BadRecord, Chain, fetch_chain
from everstep.recover.plan import make_plan, reaches, up_to, without
from everstep.recover.reach import in_a_line, in_words, passed_over
from everstep.recover.rebuild import Base, NeedsProgram, rebuild
from everstep.recover.survey import Sources
from everstep.types import Holding, Plan, Records, Survey


def retrieve(sources: Sources, step: int | None, rank: int) -> Checkpoint:
    """Private values are those of `rank`. What turns out to be damaged is passed over, for the next best.

    Unless a step is asked for, a warning names each newer one that was.
    """
    everything = survey = sources.survey()
    if step is not None:  # it is asked for, whoever failed to read it before
        survey = msgspec.structs.replace(up_to(survey, step), attempts=(), rewind=None)
    while True:
        plan = make_plan(survey, {sources.node})
        if plan.step is None or step not in (None, plan.step):
            raise _unreachable(step, plan, survey)
        if not 0 <= rank < plan.world:
            raise BadConfig(f"rank must be from 0 to {plan.world - 1}, not {rank}")
        found = _fetch(sources, plan, rank)
        if isinstance(found, tuple):
            base, chain = found
            for newer, reason in passed_over(plan, survey.attempts).items() if step is None else ():
                warnings.warn(in_a_line(newer, reason, sources.directory), PassedOver, stacklevel=3)
            return base(rank) if chain is None else _repeated(base, chain, rank, everything)
        for what, reason in found:
            survey = without(survey, what, reason)


def _fetch(sources: Sources, plan: Plan, rank: int) -> tuple[Base, Chain | None] | list[tuple[Holding | Records, str]]:
    """What a plan leads to, or what of it is no good."""
    assert plan.base is not None
    images: dict[int, Image] = {}
    for holding in plan.parts:
        try:
            images[holding.rank] = sources.fetch(holding, copy=True)
        except (EverstepError, OSError) as error:
            return [(holding, str(error))]
    try:
        base = whole_views(images, plan.base)
        base(rank)  # whatever is wrong with it shows here
        return base, fetch_chain(sources, plan, rank, copy=True)
    except BadRecord as error:
        return [(error.what, error.reason)]
    except Damaged as error:
        return [(holding, str(error)) for holding in plan.parts]


def _unreachable(step: int | None, plan: Plan, survey: Survey) -> EverstepError:
    """Why a step cannot be had, and which ones near it can."""
    reasons = [r for r in plan.rejections if step is None or r.step == step]
    if step is not None and survey.records:  # whatever broke the chain before it
        reasons = [r for r in plan.rejections if (plan.step or -1) < r.step <= step]
    what = f"step {step}" if step is not None else "any step"
    text = f"cannot restore {what}"
    if plan.step is not None:
        text += f"; the newest before it that can be is {plan.step}"
    text += "".join(f"\n  step {r.step} ({r.source}): {r.reason}" for r in reasons)
    return (Damaged if any(r.certain for r in reasons) else NothingToRestore)(text)


def _repeated(base: Base, chain: Chain, rank: int, survey: Survey) -> Checkpoint:
    """A step between bases, by repeating what led to it."""
    step = chain.last.step
    bases = sorted({parts[0].step for parts, _ in reaches(survey, {h.node for h in survey.holdings})})
    nearest = min(bases, key=lambda one: abs(one - step))
    try:
        rebuilt = rebuild(base, chain, rank)
    except NeedsProgram as error:
        raise NeedsProgram(f"{error} There are bases of steps {in_words(bases)}.") from None
    except Diverged as error:
        raise Diverged(error.step, error.proven, f"{error.advice} Step {nearest} is a base, and exact.") from None
    if rebuilt.foreign:
        proven = "no digest proves it" if rebuilt.proven is None else f"digests prove it up to step {rebuilt.proven}"
        warnings.warn(
            f"step {step} was trained on {rebuilt.foreign} and repeated on the host from step {rebuilt.base}, which "
            f"may round otherwise: {proven}. Step {nearest} is a base, and exact.",
            ReplayedElsewhere,
            stacklevel=4,
        )
    return rebuilt.checkpoint
