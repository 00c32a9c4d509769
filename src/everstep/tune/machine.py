"""What a machine can do, as numbers that somebody measured or wrote down; and how often to save on it, by every rule.

Offline: nothing has run yet. What nobody gave is assumed, and said to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from everstep.checked import Table
from everstep.tune.classics import (
    checkfreq,
    daly,
    lowdiff,
    pccheck,
    waste_of_checkpoints,
    waste_of_log,
    waste_of_merged_log,
    young,
)
from everstep.tune.levels import LevelCosts, schedule, waste_of_levels
from everstep.tune.models import MTBF_S, REPLAY_SHARE, Costs, Tuning, steps_per_base, steps_per_flush, sticking_out

HOST_S = 0.001  # of the training thread, for each base or record: the budget that capture keeps
FLUSH_S = 0.005  # of a disk, to make a write durable
RING_SLOTS = 200  # records that wait for a flush, at most
_IN_FLIGHT = 2  # PCcheck: checkpoints at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Bytes a second, of a node; of what all nodes share, of all together."""

    link: float = 50e9  # from devices to host memory
    disk: float = 2e9
    network: float = 10e9
    shared: float = 2e9
    objects: float = 1e9
    serialize: float = 1e9  # torch.save in one process
    free_disk: int = 10**12
    replay: float = REPLAY_SHARE  # repeating an update, as a share of a step
    process_failures: float = 0.25  # shares of all failures: nothing but processes is lost,
    node_failures: float = 0.7  # or a node with what it holds; the rest takes all nodes
    assumed: tuple[str, ...] = ()

    def rate(self, source: str, nodes: int) -> float:
        """Of all nodes together."""
        each = {"memory": self.link, "disk": self.disk, "partner": self.network, "parity": self.network}
        return each[source] * nodes if source in each else float(getattr(self, source))


def read_machine(values: Mapping[str, Any], *, file: str) -> Machine:
    """Out of the table of a file; `assumed` says what it leaves out."""
    return machine_of(Table(values, file=file))


def machine_of(table: Table) -> Machine:
    unknown = Machine()
    found = Machine(
        link=table.rate("link", unknown.link),
        disk=table.rate("disk", unknown.disk),
        network=table.rate("network", unknown.network),
        shared=table.rate("shared", unknown.shared),
        objects=table.rate("objects", unknown.objects),
        serialize=table.rate("serialize", unknown.serialize),
        free_disk=table.size("free_disk", unknown.free_disk),
        replay=table.number("replay", unknown.replay, most=10),
        process_failures=table.number("process_failures", unknown.process_failures, most=1),
        node_failures=table.number("node_failures", unknown.node_failures, most=1),
    )
    if found.process_failures + found.node_failures > 1:
        raise table.wrong("node_failures", f"at most {1 - found.process_failures:g}: shares add up to 1")
    table.done()
    return replace(found, assumed=tuple(table.defaulted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    tuning: Tuning
    seconds: float  # the same, in time
    waste: float | None  # the expected share of the run's time, where the rule has one


def advise(
    machine: Machine, *, state: int, step_s: float, mtbf_s: float | None, budget: float, nodes: int = 1
) -> list[Advice]:
    """Every rule on one machine, for a state of so many bytes in all."""
    known_mtbf_s = MTBF_S if mtbf_s is None else mtbf_s
    share = state / nodes
    copy_s, disk_s = share / machine.link, share / machine.disk
    save_s = state / min(machine.serialize, machine.shared)
    assumed = (*machine.assumed, *(("M",) if mtbf_s is None else ()))

    def advice(tuning: Tuning, waste: float | None) -> Advice:
        named = tuple(name for name in tuning.inputs if _BEHIND.get(name, name) in assumed or name in tuning.assumed)
        return Advice(tuning=replace(tuning, assumed=named), seconds=tuning.value * step_s, waste=waste)

    def periodic(tuning: Tuning, stall_s: float, lag_s: float = 0.0) -> Advice:
        """`lag_s`: until a checkpoint counts, which is lost work too."""
        interval_s = tuning.value * step_s
        return advice(tuning, waste_of_checkpoints(interval_s, stall_s, known_mtbf_s, restart_s=lag_s))

    return [
        periodic(young(step_s, save_s, known_mtbf_s), save_s),
        periodic(daly(step_s, save_s, known_mtbf_s), save_s),
        periodic(checkfreq(step_s, copy_s, disk_s, budget), sticking_out(copy_s, step_s), copy_s + disk_s),
        periodic(pccheck(step_s, disk_s, _IN_FLIGHT, 1 + budget), sticking_out(copy_s, step_s), copy_s + disk_s),
        *_merged(machine, share, step_s, known_mtbf_s, advice),
        *_log(machine, int(share), step_s, mtbf_s, budget, advice),
        *_levels(machine, share, state, step_s, known_mtbf_s, advice),
    ]


_BEHIND = {"W": "disk", "R": "replay", "r": "replay", "free_bytes": "free_disk", "L": "node_failures"}


def _merged(machine: Machine, share: float, step_s: float, mtbf_s: float, advice: Any) -> list[Advice]:
    replay_s = max(machine.replay * step_s, 1e-9)
    base, batch = lowdiff(step_s, share, machine.disk, replay_s, mtbf_s)
    waste = waste_of_merged_log(base.value * step_s, batch.value * step_s, share, machine.disk, replay_s, mtbf_s)
    return [advice(base, waste), advice(batch, waste)]


def log_costs(machine: Machine, share: int, step_s: float, mtbf_s: float | None) -> Costs:
    """What a base and a record of a node's share would cost. A gradient is a third of Adam's state."""
    record = share // 3
    return Costs(
        step_s=step_s, base_stall_s=HOST_S + sticking_out(share / machine.link, step_s),
        base_write_s=share / machine.disk, base_bytes=share,
        record_stall_s=HOST_S + sticking_out(record / machine.link, step_s), record_write_s=record / machine.disk,
        record_bytes=record, replay_s=machine.replay * step_s, free_bytes=machine.free_disk, mtbf_s=mtbf_s,
    )  # fmt: skip


def _log(machine: Machine, share: int, step_s: float, mtbf_s: float | None, budget: float, advice: Any) -> list[Advice]:
    costs = log_costs(machine, share, step_s, mtbf_s)
    base = steps_per_base(costs, budget=budget)
    flush = steps_per_flush(step_s, FLUSH_S, slots=RING_SLOTS, lose_steps=None, lose_s=None, mtbf_s=mtbf_s)
    waste = waste_of_log(
        base.value * step_s, flush.value * step_s, costs.base_stall_s, FLUSH_S, machine.replay, base.inputs["M"]
    )
    return [advice(base, waste), advice(flush, waste)]


def level_costs(machine: Machine, share: float, state: int, step_s: float, mtbf_s: float) -> list[LevelCosts]:
    """A node's memory for lost processes, a partner for lost nodes, a shared file system for the loss of all."""
    everything = max(0.0, 1 - machine.process_failures - machine.node_failures)
    return [
        LevelCosts(name="memory", stall_s=HOST_S + sticking_out(share / machine.link, step_s), write_s=0.0,
                   failures_per_s=machine.process_failures / mtbf_s),
        LevelCosts(name="partner", stall_s=HOST_S, write_s=share / machine.network,
                   failures_per_s=machine.node_failures / mtbf_s),
        LevelCosts(name="shared", stall_s=HOST_S, write_s=state / machine.shared, failures_per_s=everything / mtbf_s),
    ]  # fmt: skip


def _levels(machine: Machine, share: float, state: int, step_s: float, mtbf_s: float, advice: Any) -> list[Advice]:
    levels = level_costs(machine, share, state, step_s, mtbf_s)
    tunings = schedule(levels, step_s)
    waste = waste_of_levels(levels, [one.value * step_s for one in tunings])
    return [advice(one, waste) for one in tunings]
