"""What became of a run that things were done to: steps lost, how long until the next step, exact or not.

All of it is read from what the run itself has told and noted; only the moments of the acts come from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.archive import open as open_run
from everstep.errors import EverstepError
from everstep.events import AnyEvent, Started, WentOn
from everstep.lab.injector import Made, Played
from everstep.lab.watching import Done
from everstep.timeline import Kind

if TYPE_CHECKING:
    import torch

_UNSEEDED = {"python", "numpy"}  # random states
Compared = tuple[bool | None, str]  # exact or not, and what there is to say; None: not compared
NOT_COMPARED: Compared = (None, "not compared")


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """All ranks from one beginning to the next."""

    began: float  # the first of them,
    pids: dict[int, int]  # by rank
    starts: dict[int, float]
    step: int  # that they went on from
    how: str  # and by which way


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What followed from one act."""

    what: str
    after_s: float  # since the command was started
    step: int | None  # that all ranks had done
    steps_lost: int
    next_step_s: float | None  # until all ranks had finished a step; None: they never did
    went_on: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    command: str  # how it ended
    seconds: float
    steps: int  # that were done in the end
    steps_lost: int  # by all acts together, each way back counted once
    fates: list[Fate]
    not_made: list[str]
    exact: bool | None  # None: not compared
    compared: str
    is_well: bool  # the command ended with 0, and all that was to be done to it was


def judge(played: Played, compared: Compared = NOT_COMPARED) -> Verdict:
    events, steps = played.watched.events(), played.watched.spans(Kind.STEP)
    lives = lives_of(events)
    answers = [_life_after(one, played.made, lives, steps) for one in played.made]
    fates = [_fate(made, life, lives, steps, played) for made, life in zip(played.made, answers, strict=True)]
    lost: dict[float, int] = {}
    for fate, life in zip(fates, answers, strict=True):
        if life is not None:
            lost[life.began] = max(lost.get(life.began, 0), fate.steps_lost)
    not_made = [f"{act}: {why}" for act, why in played.unmade]
    return Verdict(
        command=_ending(played), seconds=played.ended - played.began, steps=max((one.step for one in steps), default=0),
        steps_lost=sum(lost.values()), fates=fates, not_made=not_made, exact=compared[0], compared=compared[1],
        is_well=played.code == 0 and not not_made,
    )  # fmt: skip


def _ending(played: Played) -> str:
    if played.code is None:
        return f"was ended: {played.why_ended}"
    return f"ended with exit code {played.code}" if played.code >= 0 else f"was ended by signal {-played.code}"


def lives_of(events: Sequence[AnyEvent]) -> list[Life]:
    """In the order of time. A life is over when one of its ranks begins again."""
    groups: list[dict[int, Started]] = []
    for event in events:
        if isinstance(event, Started):
            if not groups or event.rank in groups[-1] or event.world != next(iter(groups[-1].values())).world:
                groups.append({})
            groups[-1][event.rank] = event
    ways = [event for event in events if isinstance(event, WentOn)]
    begins = [min(one.time for one in group.values()) for group in groups] + [float("inf")]
    found = []
    for group, began, until in zip(groups, begins, begins[1:], strict=False):
        first = min(group.values(), key=lambda one: one.rank)
        live = next((way for way in ways if began <= way.time < until), None)
        how = f"{live.policy}, without a restart" if live is not None else f"restart, from {first.source}"
        found.append(
            Life(
                began=began, pids={rank: one.pid for rank, one in group.items()}, step=first.step,
                starts={rank: one.time for rank, one in group.items()}, how=f"{how}, at step {first.step}",
            )
        )  # fmt: skip
    return found


def _life_after(made: Made, all_made: Sequence[Made], lives: Sequence[Life], steps: Sequence[Done]) -> Life | None:
    """The life that answers an act. One that ends no process has none of its own if a later act ended the life: one
    that kills, or one that came when training had gone on after this."""
    life = next((one for one in lives if one.began > made.time), None)
    if life is None or made.ends_lives:
        return life
    later = [one for one in all_made if one is not made and made.time <= one.time < life.began]
    next_step_s = _next_step(made, _life_at(made.time, lives), steps)
    stayed = next_step_s is not None and any(made.time + next_step_s < one.time for one in later)
    return None if stayed or any(one.ends_lives for one in later) else life


def _life_at(time: float, lives: Sequence[Life]) -> Life | None:
    return next((one for one in reversed(lives) if one.began <= time), None)


def _fate(made: Made, life: Life | None, lives: Sequence[Life], steps: Sequence[Done], played: Played) -> Fate:
    step = made.reached.step if made.reached is not None else None
    next_step_s = (
        None if life is None and made.ends_lives else _next_step(made, life or _life_at(made.time, lives), steps)
    )
    if life is not None:
        went_on = life.how
    elif made.ends_lives or (next_step_s is None and played.code != 0):
        went_on = "nobody went on"
    else:
        went_on = "training stayed"
    return Fate(
        what=str(made.act) + (f": {made.met}" if made.met else ""), after_s=made.time - played.began, step=step,
        steps_lost=max(0, (step or 0) - life.step) if life is not None else 0, next_step_s=next_step_s,
        went_on=went_on,
    )  # fmt: skip


def _next_step(made: Made, life: Life | None, steps: Sequence[Done]) -> float | None:
    """Until every rank of a life has finished a step in it after an act."""
    if life is None:
        return None
    ends = []
    for rank, pid in life.pids.items():
        since = max(made.time, life.starts[rank])
        end = next((one.end for one in steps if (one.rank, one.pid) == (rank, pid) and one.end > since), None)
        if end is None:
            return None
        ends.append(end)
    return max(ends) - made.time


# -- exact or not


def compare(directory: Path, reference: Path) -> Compared:
    """The newest checkpoints of two runs: every tensor and every value, bit for bit. None: it could not be done.

    But for the random states of Python and NumPy, which differ between any two programs that do not seed them, and for
    whether the end was known when the last step was written, which is a matter of milliseconds.
    """
    try:
        one, other = open_run(directory).load(), open_run(reference).load()
    except (EverstepError, OSError) as error:
        return None, f"not compared: {error}"
    keys = (one.keys() | other.keys()) - {"finished_at"}
    different = sorted(key for key in keys if not _same(one.get(key), other.get(key)))
    tensors = sum(hasattr(value, "untyped_storage") for value in one.values())
    if not different:
        return True, f"exact: {tensors} tensors and all values are those of {reference}, bit for bit"
    return (
        False,
        f"not exact: {len(different)} of {len(one)} entries differ from {reference}: {', '.join(different[:5])}",
    )


def _same(one: Any, other: Any) -> bool:
    if hasattr(one, "untyped_storage") and hasattr(other, "untyped_storage"):
        return one.dtype == other.dtype and one.shape == other.shape and _bits(one) == _bits(other)
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one.keys() - _UNSEEDED if one.keys() >= _UNSEEDED else one.keys()
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in keys)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _bits(tensor: torch.Tensor) -> bytes:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
