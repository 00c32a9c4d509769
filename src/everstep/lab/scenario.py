"""What is to be simulated: a cluster, a training run, what fails, and the strategies that are to live with it.

A scenario is a TOML file; docs/simulate.md lists its keys. Everything wrong in it is named with file, key, value and
what would be right. Those that ship are named by their names alone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

from everstep.checked import Table
from everstep.config import Policy
from everstep.errors import BadConfig
from everstep.lab.injections import Inject, inject_of
from everstep.lab.trace import TIME_UNITS, Visit, read_trace
from everstep.tune.machine import Machine, machine_of

Kind = Literal["process", "node", "rack", "cluster"]  # what a failure takes: the smallest first
Law = Literal["exponential", "weibull", "gamma", "periodic", "trace"]
Per = Literal["job", "rack", "node", "gpu"]
StrategyKind = Literal[
    "torch-save", "dcp", "checkfreq", "in-memory", "scr", "snapshot", "log", "replica", "auto"
]  # fmt: skip
Protect = Literal["partner", "parity", "none"]
Rule = Literal["young", "daly", "checkfreq", "levels"]

_MOST_NODES = 100_000
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    nodes: int
    gpus_per_node: int
    nodes_per_rack: int
    spares: int
    repair_s: float

    def rack(self, seat: int) -> int:
        return seat // self.nodes_per_rack

    @property
    def racks(self) -> int:
        return -(-self.nodes // self.nodes_per_rack)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    step_s: float
    state: int  # bytes, of all ranks together, without what they have twice
    record: int  # bytes, of what all ranks consume in a step
    budget: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    detect_s: float  # until survivors stand still, where keepers watch
    timeout_s: float  # until a dead or hung rank is noticed where nobody does
    restart_s: float  # of all processes, until the first step could begin
    regroup_s: float  # of those who stay


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One cause of failures."""

    kind: Kind
    law: Law
    per: Per = "job"
    mtbf_s: float = 0.0
    shape: float = 1.0
    visits: tuple[Visit, ...] = ()  # of a recorded trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    name: str
    kind: StrategyKind
    every_steps: int | None = None
    every_s: float | None = None
    rule: Rule | None = None
    shared_every_s: float = 900.0  # how often background copies go to the shared file system
    protect: Protect | None = None  # None: as its kind does
    group: int = 8
    disk_every: int | None = None  # steps, as Disk(every=) has it; None: as often as a tenth of the disk's time allows
    on_loss: tuple[Policy, ...] = ("restart",)
    keep: int = 2

    @property
    def protection(self) -> Protect:
        usual: dict[str, Protect] = {"torch-save": "none", "dcp": "none", "checkfreq": "none", "scr": "parity"}
        return usual.get(self.kind, "partner") if self.protect is None else self.protect


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    file: str
    title: str
    duration_s: float
    seeds: int
    cluster: Cluster
    training: Training
    machine: Machine
    recovery: Recovery
    failures: tuple[Source, ...]
    strategies: tuple[Strategy, ...]
    sweep: tuple[int, ...] = ()  # numbers of nodes, if there is more than one to be looked at
    inject: Inject | None = None  # what is to be done to a real run

    def with_nodes(self, nodes: int) -> Scenario:
        return replace(self, cluster=replace(self.cluster, nodes=nodes), sweep=())

    @property
    def mtbf_s(self) -> float:
        """Of the whole job, by what the scenario says of its failures."""
        rate = sum(failures_per_s(one, self) for one in self.failures)
        return 1 / rate if rate > 0 else self.duration_s * 1000


def units(source: Source, cluster: Cluster) -> int:
    """How many of what fails there are."""
    each = {"job": 1, "rack": cluster.racks, "node": cluster.nodes, "gpu": cluster.nodes * cluster.gpus_per_node}
    return each[source.per]


def failures_per_s(source: Source, scenario: Scenario) -> float:
    if source.law == "trace":
        return sum(visit.lost_s < scenario.duration_s for visit in source.visits) / scenario.duration_s
    return units(source, scenario.cluster) / source.mtbf_s


def shipped() -> dict[str, str]:
    """The scenarios that come with the package: name and title."""
    folder = resources.files("everstep.lab") / "scenarios"
    found = sorted((one.name.removesuffix(".toml"), one) for one in folder.iterdir() if one.name.endswith(".toml"))
    return {name: str(tomllib.loads(one.read_text()).get("title", "")) for name, one in found}


def load_scenario(source: str | Path) -> Scenario:
    """Out of a file, or one of those that are shipped, by its name."""
    return _read(source, scenario_of)


def load_inject(source: str | Path) -> tuple[Inject, Scenario | None]:
    """What a scenario does to a real run. A file with a title and nothing else is enough for it."""
    return _read(source, _inject_alone)


def _inject_alone(values: Mapping[str, Any], *, file: str, folder: Path) -> tuple[Inject, Scenario | None]:
    if values.keys() <= {"title", "inject"}:
        return inject_of(Table(values, file=file).table("inject"), has_failures=False), None
    scenario = scenario_of(values, file=file, folder=folder)
    if scenario.inject is None:
        raise BadConfig(f"{file}: inject is missing; it must be a table that says what is to be done to a real run")
    return scenario.inject, scenario


def _read(source: str | Path, parse: Callable[..., Found]) -> Found:
    path = Path(source)
    if path.suffix != ".toml" and not path.exists():
        known = shipped()
        if str(source) not in known:
            raise BadConfig(f"{source} is neither a .toml file nor a scenario that ships: {', '.join(known)}")
        with resources.as_file(resources.files("everstep.lab") / "scenarios" / f"{source}.toml") as found:
            return parse(_toml(found.read_text(), str(source)), file=str(source), folder=found.parent)
    try:
        text = path.read_text()
    except OSError as error:
        raise BadConfig(f"{path} cannot be read: {error.strerror}") from None
    return parse(_toml(text, str(path)), file=str(path), folder=path.parent)


def _toml(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadConfig(f"{file} is not TOML: {error}") from None


def scenario_of(values: Mapping[str, Any], *, file: str = "scenario", folder: Path = Path()) -> Scenario:
    """Out of a table, as a TOML file has it."""
    top = Table(values, file=file)
    cluster, training = _cluster(top.table("cluster")), _training(top.table("training"))
    machine = machine_of(top.table("machine"))
    duration_s = top.duration("duration", least=1.0)
    failures = tuple(_source(one, cluster, folder) for one in top.tables("failures"))
    strategies = tuple(_strategy(one, cluster) for one in top.tables("strategies"))
    if not strategies:
        raise BadConfig(f"{file}: strategies is missing; it must be a list of tables, each with a kind")
    names = [one.name for one in strategies]
    if len(set(names)) < len(names):
        raise BadConfig(f"{file}: strategies = {names} must have a different name each")
    sweep_table = top.table("sweep")
    sweep = _sweep(sweep_table) if "sweep" in top else ()
    found = Scenario(
        file=file, title=top.word("title", file), duration_s=duration_s, seeds=top.whole("seeds", 3, least=1),
        cluster=cluster, training=training, machine=machine, recovery=_recovery(top.table("recovery")),
        failures=failures, strategies=strategies, sweep=sweep,
        inject=inject_of(top.table("inject"), has_failures=bool(failures)) if "inject" in top else None,
    )  # fmt: skip
    top.done()
    return found


def _cluster(table: Table) -> Cluster:
    nodes = table.whole("nodes", least=1, most=_MOST_NODES)
    found = Cluster(
        nodes=nodes, gpus_per_node=table.whole("gpus_per_node", 8, least=1),
        nodes_per_rack=table.whole("nodes_per_rack", 1, least=1), spares=table.whole("spares", 0),
        repair_s=table.duration("repair", 3600.0),
    )  # fmt: skip
    table.done()
    return found


def _training(table: Table) -> Training:
    state = table.size("state")
    found = Training(
        step_s=table.duration("step", least=1e-6), state=state, record=table.size("record", max(1, state // 3)),
        budget=table.number("overhead_budget", 0.03, least=1e-6, most=0.999),
    )  # fmt: skip
    table.done()
    return found


def _recovery(table: Table) -> Recovery:
    found = Recovery(
        detect_s=table.duration("detect", 0.5), timeout_s=table.duration("timeout", 60.0),
        restart_s=table.duration("restart", 120.0), regroup_s=table.duration("regroup", 2.0),
    )  # fmt: skip
    table.done()
    return found


def _source(table: Table, cluster: Cluster, folder: Path) -> Source:
    kind = cast(Kind, table.word("kind", "node", among=get_args(Kind)))
    law = cast(Law, table.word("law", "exponential", among=get_args(Law)))
    if law == "trace":
        unit_s = TIME_UNITS[table.word("unit", "s", among=TIME_UNITS)]
        visits, most = read_trace(folder / table.word("file"), unit_s=unit_s, nodes=cluster.nodes)
        if most < cluster.nodes:
            raise table.wrong("file", f"a trace with {cluster.nodes} nodes at once (cluster.nodes); it has {most}")
        found = Source(kind="node", law=law, visits=visits)
    else:
        found = Source(
            kind=kind, law=law, per=cast(Per, table.word("per", "job", among=get_args(Per))),
            mtbf_s=table.duration("mtbf", least=1e-3),
            shape=table.number("shape", 1.0, least=0.1, most=10) if law in ("weibull", "gamma") else 1.0,
        )  # fmt: skip
    table.done()
    return found


def _strategy(table: Table, cluster: Cluster) -> Strategy:
    kind = cast(StrategyKind, table.word("kind", among=get_args(StrategyKind)))
    found = Strategy(
        name=table.word("name", kind), kind=kind, **_cadence(table), keep=table.whole("keep", 2, least=1),
        shared_every_s=table.duration("shared_every", 900.0, least=1e-3),
        protect=cast(Any, table.word("protect", among=get_args(Protect)) if "protect" in table else None),
        group=table.whole("group", 8, least=2),
        disk_every=table.whole("disk_every", least=1) if "disk_every" in table else None,
        on_loss=cast(tuple[Policy, ...], table.words("on_loss", ["restart"], among=get_args(Policy))),
    )  # fmt: skip
    if found.protect in ("partner", "parity") and cluster.racks < 2:
        raise table.wrong("protect", f"'none': all {cluster.nodes} nodes are in one rack, and nobody else could help")
    if "group" in table and found.group > cluster.racks:
        raise table.wrong("group", f"a whole number from 2 to {cluster.racks}: no two members may share a rack")
    table.done()
    return found


def _cadence(table: Table) -> dict[str, Any]:
    """`every`: a number of steps, a duration, or the name of a rule."""
    if "every" not in table:
        return {}
    for read, name in ((lambda: table.whole("every", least=1), "every_steps"),
                       (lambda: table.word("every", among=get_args(Rule)), "rule"),
                       (lambda: table.duration("every", least=1e-3), "every_s")):  # fmt: skip
        try:
            return {name: read()}
        except BadConfig:
            continue
    allowed = f"steps from 1, a duration such as '30m', or one of {', '.join(get_args(Rule))}"
    raise table.wrong("every", allowed)


def _sweep(table: Table) -> tuple[int, ...]:
    if "nodes" not in table:
        raise table.wrong("nodes", "a list of numbers of nodes")
    found = table.wholes("nodes", least=1, most=_MOST_NODES)
    table.done()
    return found


@cache
def seat_name(seat: int) -> str:
    return f"node{seat:05d}"
