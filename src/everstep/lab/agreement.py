"""Simulated and real, side by side: the same acts on real processes and on a virtual clock.

The machine is measured once, by a run of its own in which one rank is killed: how long its steps, its captures, its
writes and a restart take. Of every other run only the moments of the acts are taken. Which step comes back, and what
all of that costs in time, is foretold from those figures alone, and compared with what it really did cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean

from everstep.errors import BadConfig, EverstepError
from everstep.events import ArenaMade, Fetched, Persisted
from everstep.lab.failures import Failure
from everstep.lab.injections import Inject, Injection
from everstep.lab.injector import Injector, Made, Played
from everstep.lab.lifetime import Lifetime
from everstep.lab.outcome import Outcome
from everstep.lab.rhythm import rhythm_of
from everstep.lab.scenario import Kind, Recovery, Scenario, load_inject
from everstep.lab.verdict import judge, lives_of
from everstep.lab.watching import Done
from everstep.timeline import Kind as SpanKind
from everstep.tune.machine import HOST_S

WITHIN = 0.2  # of the wasted time
_CALIBRATION = "calibration"  # the directory of that run
_KILL = Injection(do="kill", target="rank", who="0", step=10, into_s=0.05)  # by then the step is sealed


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What the machine can do, by a run in which one rank was killed."""

    steps: int  # that the command does
    step_s: float  # with what capturing it costs
    state_bytes: int
    copy_s: float  # into memory
    disk_bytes_per_s: float | None  # None: nothing was written
    restart_s: float  # from a rank's death until the next step begins, without loading


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    scenario: str
    real_lost: int
    simulated_lost: int
    real_wasted_s: float  # by failures: beyond what the same steps take without
    simulated_wasted_s: float

    @property
    def off(self) -> float:
        """The simulated waste, as a share more or less than the real one."""
        return self.simulated_wasted_s / self.real_wasted_s - 1

    @property
    def agrees(self) -> bool:
        return self.real_lost == self.simulated_lost and abs(self.off) <= WITHIN


def planned(names: Sequence[str], folder: Path) -> dict[Path, Scenario]:
    """Each scenario under the directory of its run, which is named like its file. What is wrong is said at once."""
    found: dict[Path, Scenario] = {}
    for name in names:
        directory = folder / Path(name).stem
        if directory in found or directory.name == _CALIBRATION:
            raise BadConfig(f"{name}: another run is to have the directory {directory}; give the file another name")
        found[directory] = _whole(name)
    for directory in (folder / _CALIBRATION, *found):
        if directory.exists() and any(directory.iterdir()):
            raise BadConfig(f"{directory} is not empty: each scenario needs a run that begins there")
    return found


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


# -- really


def calibrate(command: Sequence[str], folder: Path) -> Calibration:
    """By a run of its own. `command`: {dir} in it is that run's directory."""
    return measured(_play(command, folder / _CALIBRATION, Inject(acts=(_KILL,)), None))


def _play(command: Sequence[str], directory: Path, inject: Inject, scenario: Scenario | None) -> Played:
    """KeyboardInterrupt if somebody interrupts; the run is ended then."""
    directory.mkdir(parents=True, exist_ok=True)
    words = [word.replace("{dir}", str(directory)) for word in command]
    played = Injector(words, inject, scenario, [directory], to_stderr=True).play()
    if played.is_interrupted:
        raise KeyboardInterrupt
    if played.code != 0 or played.unmade or not played.made:
        raise EverstepError(f"{directory}: its command did not end well, or not all was done to it that was to be")
    return played


def measured(played: Played) -> Calibration:
    """By the run's own timeline and events."""
    events = played.watched.events()
    steps, step_s = _steps(played)
    next_step_s = judge(played).fates[0].next_step_s
    if next_step_s is None:
        raise EverstepError("nobody went on after a rank was killed: there is no restart that could be measured")
    loads = [one.seconds for one in events if isinstance(one, Fetched) and one.time > played.made[0].time]
    writes = [one for one in events if isinstance(one, Persisted) and one.seconds > 0]
    arenas = {one.rank: one.slot_bytes for one in events if isinstance(one, ArenaMade)}
    copies = [one.end - one.begin for one in played.watched.spans(SpanKind.COPY)]
    return Calibration(
        steps=max(one.step for one in steps), step_s=step_s, state_bytes=sum(arenas.values()),
        copy_s=mean(copies) if copies else 0.0,
        disk_bytes_per_s=sum(one.bytes for one in writes) / sum(one.seconds for one in writes) if writes else None,
        restart_s=max(0.0, next_step_s - step_s - max(loads, default=0.0)),
    )  # fmt: skip


def _steps(played: Played) -> tuple[list[Done], float]:
    """Those of rank 0, and how long one takes that nothing was done in, and that no life began with."""
    steps = [one for one in played.watched.spans(SpanKind.STEP) if one.rank == 0]
    marks = [made.time for made in played.made]
    marks += [life.starts[0] for life in lives_of(played.watched.events()) if 0 in life.starts]
    calm = [
        one.end - one.begin
        for before, one in pairwise(steps)
        if not any(before.end < mark <= one.end for mark in marks)
    ]
    if not calm:
        raise EverstepError("no two steps followed each other undisturbed: nobody knows how long one takes")
    return steps, mean(calm)


def wasted_s(played: Played) -> float:
    """Beyond what the same steps took that nothing was done in."""
    steps, step_s = _steps(played)
    return steps[-1].end - (steps[0].end - step_s) - max(one.step for one in steps) * step_s


# -- and foretold


def agree(scenarios: Mapping[Path, Scenario], command: Sequence[str], calibration: Calibration) -> Iterator[Agreement]:
    """Each scenario in its directory, one after the other."""
    for directory, scenario in scenarios.items():
        assert scenario.inject is not None
        played = _play(command, directory, scenario.inject, scenario)
        outcome = foretold(scenario, played.made, calibration)
        yield Agreement(
            scenario=scenario.title, real_lost=judge(played).steps_lost, simulated_lost=outcome.steps_lost,
            real_wasted_s=wasted_s(played),
            simulated_wasted_s=sum(seconds for cause, seconds in outcome.wasted_s.items() if cause != "stall"),
        )  # fmt: skip


def foretold(scenario: Scenario, acts: Sequence[Made], calibration: Calibration) -> Outcome:
    """The same acts at the same moments of the same steps, until the command has done all of its own."""
    machine, training = scenario.machine, scenario.training
    machine = replace(
        machine, link=calibration.state_bytes / max(calibration.copy_s, 1e-6),
        disk=calibration.disk_bytes_per_s or machine.disk,
    )  # fmt: skip
    sized = replace(
        scenario, machine=machine, duration_s=1e9,
        training=replace(training, step_s=max(1e-4, calibration.step_s - HOST_S), state=calibration.state_bytes),
        recovery=Recovery(detect_s=0.0, timeout_s=0.0, restart_s=calibration.restart_s, regroup_s=0.0),
    )  # fmt: skip
    strategy = sized.strategies[0]
    rhythm, failures = rhythm_of(sized, strategy, 1), list[Failure]()
    begin, at = 0.0, 0  # of the present life: when, and with which step
    for made in acts:
        assert made.reached is not None
        into_s = min(max(0.0, made.time - made.reached.time), 0.99 * sized.training.step_s)  # the step was not done
        time_s = begin + rhythm.time_s(at, max(at, made.reached.step)) + into_s
        failures.append(Failure(time_s, 0, (0,), _kind(made.act)))
        begin, useful_s = Lifetime(sized, strategy, failures, 0).run().series[-2]
        at = round(useful_s / sized.training.step_s)
    ended = replace(sized, duration_s=begin + rhythm.time_s(at, calibration.steps) + 1e-6)
    return Lifetime(ended, strategy, failures, 0).run()
