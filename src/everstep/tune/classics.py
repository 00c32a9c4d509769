"""How often, by the rules that others have published, and what each is expected to waste.

Every rule is a closed form with its name; docs/tuning.md derives them. M is the mean time between failures, T the time
of a step; all times are seconds, all sizes bytes.
A waste is a share of the run's time: what is not the progress of training.
"""

from __future__ import annotations

from math import cbrt, ceil, exp, expm1, sqrt

from everstep.tune.models import UNBOUNDED, Tuning, sticking_out

YOUNG = "sqrt(2 C M) / T"
DALY = "(sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C) / T"
CHECKFREQ = "ceil(max((Tc + Ts - To) / T, To / (p T)))"
PCCHECK = "ceil(Tw / (N q T))"
LOWDIFF_BASE = "1 / (cbrt(R W^2 / (4 S^2 M^2)) T)"
LOWDIFF_BATCH = "cbrt(2 S R M / W) / T"


def young(step_s: float, stall_s: float, mtbf_s: float) -> Tuning:
    """Young: the least waste to first order, when a checkpoint stops the loop for `stall_s`."""
    return _tuning("steps per checkpoint (Young)", sqrt(2 * stall_s * mtbf_s) / step_s, YOUNG,
                   {"C": stall_s, "M": mtbf_s, "T": step_s})  # fmt: skip


def daly(step_s: float, stall_s: float, mtbf_s: float) -> Tuning:
    """Daly, higher order: also right where a checkpoint costs more than a few per cent of the time between failures."""
    inputs = {"C": stall_s, "M": mtbf_s, "T": step_s}
    if stall_s >= 2 * mtbf_s:
        return _tuning("steps per checkpoint (Daly)", mtbf_s / step_s, DALY, inputs, bound="C is at least 2 M: M / T")
    x = stall_s / (2 * mtbf_s)
    interval_s = sqrt(2 * stall_s * mtbf_s) * (1 + sqrt(x) / 3 + x / 9) - stall_s
    return _tuning("steps per checkpoint (Daly)", interval_s / step_s, DALY, inputs)


def checkfreq(step_s: float, copy_s: float, write_s: float, budget: float) -> Tuning:
    """CheckFreq's two phases: a snapshot that hides behind computing, then a write behind the steps that follow.

    No checkpoint begins before the last one is written, and what sticks out of the steps stays within the budget.
    """
    stall_s = sticking_out(copy_s, step_s)
    pipeline, overhead = (copy_s + write_s - stall_s) / step_s, stall_s / (budget * step_s)
    bound = "overhead bound" if overhead > pipeline else "one checkpoint in flight"
    return _tuning("steps per checkpoint (CheckFreq)", ceil(max(pipeline, overhead)), CHECKFREQ,
                   {"Tc": copy_s, "Ts": write_s, "To": stall_s, "p": budget, "T": step_s}, bound=bound)  # fmt: skip


def pccheck(step_s: float, write_s: float, in_flight: int, slowdown: float) -> Tuning:
    """PCcheck: with so many checkpoints in flight each has that many intervals to be written in."""
    return _tuning("steps per checkpoint (PCcheck)", ceil(write_s / (in_flight * slowdown * step_s)), PCCHECK,
                   {"Tw": write_s, "N": float(in_flight), "q": slowdown, "T": step_s},
                   bound="checkpoints in flight")  # fmt: skip


def lowdiff(
    step_s: float, size: float, bytes_per_s: float, merged_replay_s: float, mtbf_s: float
) -> tuple[Tuning, Tuning]:
    """LowDiff: steps per base and per batch of differentials, if a batch merges into one that is applied at once."""
    inputs = {"S": size, "W": bytes_per_s, "R": merged_replay_s, "M": mtbf_s, "T": step_s}
    base_s = 1 / cbrt(merged_replay_s * bytes_per_s**2 / (4 * size**2 * mtbf_s**2))
    batch_s = cbrt(2 * size * merged_replay_s * mtbf_s / bytes_per_s)
    return (
        _tuning("steps per base (LowDiff)", base_s / step_s, LOWDIFF_BASE, inputs),
        _tuning("steps per batch (LowDiff)", batch_s / step_s, LOWDIFF_BATCH, inputs),
    )


# -- what they waste


def waste_of_checkpoints(interval_s: float, stall_s: float, mtbf_s: float, *, restart_s: float = 0.0) -> float:
    """Exact for exponential failures, which may also strike while a checkpoint is made or a restart is under way.

    A piece of `interval_s` of work and its checkpoint takes M e^(R/M) (e^((interval + C)/M) - 1) to get through.
    """
    if interval_s + stall_s + restart_s > 500 * mtbf_s:
        return 1.0  # nothing ever gets through
    needed_s = mtbf_s * exp(restart_s / mtbf_s) * expm1((interval_s + stall_s) / mtbf_s)
    return 1 - interval_s / needed_s


def waste_of_merged_log(
    base_s: float, batch_s: float, size: float, bytes_per_s: float, merged_replay_s: float, mtbf_s: float
) -> float:
    """LowDiff's objective: bases are written, half a batch is lost, half of the merged batches since a base applied."""
    return size / bytes_per_s / base_s + (batch_s / 2 + merged_replay_s * base_s / batch_s / 2) / mtbf_s


def waste_of_log(
    base_s: float, batch_s: float, base_stall_s: float, flush_s: float, replay: float, mtbf_s: float
) -> float:
    """Ours: every step is replayed by itself, in `replay` of its time, because Adam's steps do not merge."""
    return base_stall_s / base_s + flush_s / batch_s + (batch_s / 2 + replay * base_s / 2) / mtbf_s


def _tuning(what: str, steps: float, formula: str, inputs: dict[str, float], bound: str = "the formula") -> Tuning:
    value = min(UNBOUNDED, max(1, round(steps)))
    return Tuning(what=what, value=value, formula=formula, inputs=inputs, bound=bound, assumed=())
