"""Simulated and real, side by side: the same acts on real processes and on a virtual clock.

The real run says how long its steps, its captures and its writes take, and how long a restart took after its first act.
Which step comes back, what that costs in work, loading, and every later restart is foretold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from everstep.errors import BadConfig, EverstepError
from everstep.events import ArenaMade, Fetched, Persisted
from everstep.lab.failures import Failure
from everstep.lab.injections import Injection
from everstep.lab.injector import INTERRUPTED, Injector, Made, Played
from everstep.lab.lifetime import Lifetime
from everstep.lab.outcome import Outcome
from everstep.lab.rhythm import rhythm_of
from everstep.lab.scenario import Kind, Recovery, Scenario, load_inject
from everstep.lab.verdict import judge, life_after, lives_of
from everstep.timeline import Kind as SpanKind
from everstep.tune.machine import HOST_S

WITHIN = 0.2  # of the wasted time


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    scenario: str
    real_lost: int
    simulated_lost: int
    real_wasted_s: float  # by failures: beyond what the same steps take without
    simulated_wasted_s: float
    off: float
    agrees: bool
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of a real run."""

    steps: int
    step_s: float  # with what capturing it costs
    state_bytes: int
    copy_s: float
    disk_bytes_per_s: float | None  # None: nothing was written
    restart_s: float  # after the first act, without loading
    wasted_s: float
    steps_lost: int


def agree(scenarios: Sequence[str], command: Sequence[str], folder: Path) -> Iterator[Agreement]:
    """Each scenario in a directory of its own, under its name. `command`: {dir} in it is that directory.

    KeyboardInterrupt if somebody interrupts; the run that was under way is ended then.
    """
    loaded = [(name, _whole(name)) for name in scenarios]
    for name, scenario in loaded:
        assert scenario.inject is not None
        directory = folder / Path(name).stem
        if directory.exists() and any(directory.iterdir()):
            raise BadConfig(f"{directory} is not empty: each scenario needs a run that begins there")
        directory.mkdir(parents=True, exist_ok=True)
        words = [word.replace("{dir}", str(directory)) for word in command]
        played = Injector(words, scenario.inject, scenario, [directory], to_stderr=True).play()
        if played.why_ended == INTERRUPTED:
            raise KeyboardInterrupt
        if played.code != 0 or played.unmade or not played.made:
            raise EverstepError(f"{name}: the command did not end well, or not all was done to it; see {directory}")
        real = measure(played)
        outcome = simulated(scenario, played.made, real)
        wasted_s = sum(seconds for cause, seconds in outcome.wasted_s.items() if cause != "stall")
        off = wasted_s / real.wasted_s - 1
        agrees = real.steps_lost == outcome.steps_lost and abs(off) <= WITHIN
        yield Agreement(
            scenario=scenario.title, real_lost=real.steps_lost, simulated_lost=outcome.steps_lost,
            real_wasted_s=real.wasted_s, simulated_wasted_s=wasted_s, off=off, agrees=agrees,
            says="" if agrees else "they do not agree",
        )  # fmt: skip


def _whole(name: str) -> Scenario:
    scenario = load_inject(name)[1]
    if scenario is None:
        raise BadConfig(f"{name}: a scenario that is to be simulated needs cluster, training and strategies, too")
    for act in scenario.inject.acts if scenario.inject is not None else ():
        _kind(act)
    if scenario.cluster.nodes != 1:
        raise BadConfig(f"{name}: cluster.nodes = {scenario.cluster.nodes} must be 1: both ways on this machine")
    return scenario


def _kind(act: Injection) -> Kind:
    """What an act is to the simulator."""
    if act.do != "kill" or act.target == "keeper":
        raise BadConfig(f"{act}: only the deaths of ranks and nodes can be simulated")
    return "process" if not act.wipe else "node" if "disk" in act.wipe else "cluster"


def measure(played: Played) -> Measured:
    """What a real run took, by its own timeline and events."""
    events, verdict = played.watched.events(), judge(played, (None, ""))
    lives = lives_of(events)
    steps = [one for one in played.watched.spans(SpanKind.STEP) if one.rank == 0]
    firsts = [min((one for one in steps if one.pid == life.pids[0]), key=lambda one: one.end) for life in lives]
    calm = [
        one.end - one.begin
        for one in steps
        if one not in firsts and not any(one.begin <= made.time <= one.end for made in played.made)
    ]
    step_s, newest = mean(calm), max(one.step for one in steps)
    answer = life_after(played.made[0], played.made, lives)
    next_step_s = verdict.fates[0].next_step_s
    if answer is None or next_step_s is None:
        raise EverstepError("nobody went on after the first act: there is no restart that could be measured")
    until = next((one.began for one in lives if one.began > answer.began), float("inf"))
    before = max(one.began for one in lives if one.began < answer.began)
    loads = [one.seconds for one in events if isinstance(one, Fetched) and before < one.time < until]
    writes = [one for one in events if isinstance(one, Persisted) and one.seconds > 0]
    arenas = {one.rank: one.slot_bytes for one in events if isinstance(one, ArenaMade)}
    copies = [one.end - one.begin for one in played.watched.spans(SpanKind.COPY)]
    begin, end = steps[0].end - step_s, steps[-1].end
    return Measured(
        steps=newest, step_s=step_s, state_bytes=sum(arenas.values()), copy_s=mean(copies) if copies else 0.0,
        disk_bytes_per_s=sum(one.bytes for one in writes) / sum(one.seconds for one in writes) if writes else None,
        restart_s=max(0.0, next_step_s - step_s - max(loads, default=0.0)), steps_lost=verdict.steps_lost,
        wasted_s=end - begin - newest * step_s,
    )  # fmt: skip


def simulated(scenario: Scenario, acts: Sequence[Made], real: Measured) -> Outcome:
    """The same acts at the same steps, until the same step is done."""
    machine, training = scenario.machine, scenario.training
    machine = replace(
        machine, link=real.state_bytes / max(real.copy_s, 1e-6), disk=real.disk_bytes_per_s or machine.disk
    )
    sized = replace(
        scenario, machine=machine, duration_s=1e9,
        training=replace(training, step_s=max(1e-4, real.step_s - HOST_S), state=real.state_bytes),
        recovery=Recovery(detect_s=0.0, timeout_s=0.0, restart_s=real.restart_s, regroup_s=0.0),
    )  # fmt: skip
    strategy = sized.strategies[0]
    rhythm, failures = rhythm_of(sized, strategy, 1), list[Failure]()
    begin, at = 0.0, 0  # of the present life: when, and with which step
    for made in acts:
        assert made.reached is not None
        into_s = max(0.0, made.time - made.reached.time)
        time_s = begin + rhythm.time_s(at, max(at, made.reached.step)) + into_s
        failures.append(Failure(time_s, 0, (0,), _kind(made.act)))
        begin, useful_s = Lifetime(sized, strategy, failures, 0).run().series[-2]
        at = round(useful_s / sized.training.step_s)
    ended = replace(sized, duration_s=begin + rhythm.time_s(at, real.steps) + 1e-6)
    return Lifetime(ended, strategy, failures, 0).run()
