"""`everstep status`: is it alive, how far is it, and what would be lost right now."""

from __future__ import annotations

from everstep.archive import open
from everstep.cli.output import (
    Directory,
    Json,
    MemoryPath,
    counted,
    human_bytes,
    human_seconds,
    print_json,
    print_table,
)


def command(directory: Directory, json: Json = False, memory: MemoryPath = None) -> None:
    """Show whether a run is alive, how far it is, and what each kind of loss would cost right now."""
    status = open(directory, memory=memory).status()
    if json:
        print_json(status)
        return
    trainers = ", ".join(map(str, status["trainers"])) or "none"
    print(f"run {status['run']} in {status['directory']}")
    print(f"trainers: {trainers}; keeper: {status['keeper'] or 'none'}; memory: {human_bytes(status['arena_bytes'])}")
    sealed, durable = _step(status["sealed_step"]), _step(status["durable_step"])
    print(f"step {status['step']}; sealed in memory: {sealed}; durable on disk: {durable}")
    if status["protected_step"] is not None or status["shared_step"] is not None:
        protected, deepest = _step(status["protected_step"]), _step(status["shared_step"])
        print(f"protected by other nodes: {protected}; on the deepest tier: {deepest}")
    for flush in status["flushes"]:
        done = f"{human_bytes(flush.bytes)} of {human_bytes(flush.of_bytes)}"
        print(f"on its way to the {flush.tier} tier: step {flush.step}, {done} of this node")
    if status["trouble"]:
        print(f"trouble: {status['trouble']}; it is tried again")
    if status["silent_nodes"]:
        print(f"not heard of: {', '.join(status['silent_nodes'])}")
    replica = status["replica"]
    if replica is not None:
        drift = f"drift at step {replica.drift_step}: {replica.differing} elements by up to {replica.largest:.3g}"
        print(
            f"replica: step {replica.step}, {replica.behind} behind, {1000 * replica.cpu_s_per_step:.1f} ms of CPU a "
            f"step; {drift if replica.drift_step >= 0 else 'not compared yet'}"
        )
    ring = status["ring"]
    if ring["bytes"]:
        print(f"log: {counted(ring['records'], 'record')} in the ring, {ring['unwritten']} of them not on disk")
    for one in status["went_on"]:
        lossy = f"lossy: {one.buckets} buckets without {one.samples} samples" if one.buckets else "lossy"
        kind = "exact" if one.exact else lossy if one.policy == "forward" else "world changed"
        lost = f" ({one.lost})" if one.lost else ""
        done = f"{one.policy}, {one.world} ranks, {kind}"
        print(f"lived through a loss at step {one.step}, view {one.view}: {done}{lost}")
    rows = [[e.event, e.restored_from, str(e.steps), human_seconds(e.seconds)] for e in status["exposure"]]
    print_table(["if ...", "restored from", "steps lost", "work lost"], rows)


def _step(step: int | None) -> str:
    return "nothing" if step is None else str(step)
