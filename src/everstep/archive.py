"""The door for people and tools who read: what a run has kept, whether it is sound, and how to get it out.

Needs neither the model nor a GPU, and no torch until load() or export().
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.capture.arena import Arena, Live
from everstep.config import Keep
from everstep.errors import BadConfig, Damaged, EverstepError, NothingToRestore
from everstep.keeper import flush
from everstep.keeper.client import keeper_pid, replica_of
from everstep.recover.plan import make_plan, without
from everstep.recover.survey import Sources
from everstep.store.disk import DiskTier
from everstep.store.manifest import RUN_RECORD, committed_steps, read_commit, read_part, run_name
from everstep.topology import process_alive
from everstep.types import Commit, Exposure, Holding, Part, Plan, Source, Survey

if TYPE_CHECKING:
    from everstep.recover.assemble import Checkpoint


def open(dir: str | Path, *, memory: str | None = None) -> Archive:
    """Open a run's directory for reading. `memory`: the path given to Memory(path=...), if one was."""
    return Archive(Path(dir).absolute(), memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of checking one part."""

    step: int
    source: Source
    rank: int
    bytes: int
    problem: str  # empty if all is well
    checked: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One restorable step."""

    step: int
    world: int
    bytes: int
    cut_time: float
    sources: tuple[Source, ...]
    replica: str = ""  # the device whose steps a host repeated to make it: not bit for bit


class Archive:
    def __init__(self, directory: Path, memory: str | None) -> None:
        self.directory = directory
        self._memory = memory
        self._tier = DiskTier(directory)
        try:
            self.run = run_name(self._tier)
        except (FileNotFoundError, NotADirectoryError):
            raise NothingToRestore(f"{directory} is not a run's directory: it has no {RUN_RECORD}") from None

    # -- what is there

    def _sources(self) -> Sources:
        return Sources(self.directory, self.run, memory_path=self._memory)

    def survey(self) -> Survey:
        with self._sources() as sources:
            return sources.survey()

    def kept(self) -> list[Kept]:
        """Every step that could be restored now, oldest first."""
        return kept_steps(self.survey())

    def steps(self) -> list[int]:
        return [kept.step for kept in self.kept()]

    def latest(self) -> int:
        steps = self.steps()
        if not steps:
            raise NothingToRestore(f"{self.directory} holds no checkpoint that can be restored")
        return steps[-1]

    def plan(self, lost: Collection[str] = ()) -> Plan:
        """What a restart would do now, or after the loss of "memory", "disk" or a node by its name.

        Reads and checks the bytes of what it chooses, as a restart does; memory that is being trained in is taken at
        its seals.
        """
        with self._sources() as sources:
            survey = sources.survey()
            known = {"memory", "disk", *(h.node for h in survey.holdings)}
            for name in lost:
                if name not in known:
                    raise BadConfig(f"lost takes {', '.join(sorted(known))}, not {name!r}")
            for holding in survey.holdings:
                if holding.source in lost or holding.node in lost:
                    survey = without(survey, holding, f"{holding.source} is taken to be lost")
            nodes = {h.node for h in survey.holdings}
            is_training = any(process_alive(arena.pid) for arena in sources.arenas if arena.kind == "base")
            while True:
                plan = make_plan(survey, nodes)
                looked_at = [(h, _verify(sources, h)) for h in plan.parts if h.source == "disk" or not is_training]
                bad = [(holding, finding.problem) for holding, finding in looked_at if finding.problem]
                if not bad:
                    return plan
                for holding, problem in bad:
                    survey = without(survey, holding, problem)

    def manifest(self, step: int | None = None) -> tuple[Commit, list[Part]]:
        """The records of a step on disk, by default of the newest."""
        committed = committed_steps(self._tier)
        if not committed:
            raise NothingToRestore(f"{self.directory} has no step on disk yet")
        step = committed[-1] if step is None else step
        if step not in committed:
            raise NothingToRestore(f"step {step} is not on disk; there are {committed}")
        commit = read_commit(self._tier, step, self.run)
        return commit, [read_part(self._tier, commit, ref.rank) for ref in commit.parts]

    # -- whether it is sound

    def verify(self, step: int | None = None) -> list[Finding]:
        """Read and check every byte of a step, or of all of them, in memory and on disk."""
        with self._sources() as sources:
            survey = sources.survey()
            wanted = [h for h in survey.holdings if step is None or h.step == step]
            found = [
                Finding(
                    step=r.step, source="memory" if r.source == "memory" else "disk", rank=-1, bytes=0, problem=r.reason
                )
                for r in survey.rejections
                if step is None or r.step == step
            ]
            if not wanted and not found and step is not None:
                raise NothingToRestore(
                    f"there is no step {step}; there are {sorted({h.step for h in survey.holdings})}"
                )
            found += [_verify(sources, holding) for holding in wanted]
            return sorted(found, key=lambda f: (f.step, f.source, f.rank))

    # -- getting it out

    def load(self, step: int | None = None, *, rank: int = 0) -> dict[str, Any]:
        """A checkpoint as whole tensors by name and plain values; private values are those of `rank`."""
        checkpoint = self._checkpoint(step, rank)
        tensors: dict[str, Any] = {name: checkpoint.tensor(name) for name in checkpoint.pieces}
        tensors |= {alias: tensors[name] for alias, name in checkpoint.info.aliases.items()}
        return tensors | checkpoint.extras

    def export(
        self, path: str | Path, step: int | None = None, *, format: str = "safetensors", only: str = "all"
    ) -> int:
        """Write a step for other tools; returns the step.

        format: "safetensors" (one file), "torch" (torch.save, which is pickle) or "dcp" (a directory).
        only: "all", or "model" for the model's own state_dict.
        """
        from everstep.recover.export import write

        checkpoint = self._checkpoint(step, 0)
        write(checkpoint, Path(path), format=format, only=only)
        return checkpoint.step

    def _checkpoint(self, step: int | None, rank: int) -> Checkpoint:
        from everstep.recover.assemble import view

        with self._sources() as sources:
            survey = sources.survey()
            if step is not None:
                survey = Survey(
                    holdings=tuple(h for h in survey.holdings if h.step == step),
                    rejections=tuple(r for r in survey.rejections if r.step == step),
                )
            while True:
                plan = make_plan(survey, {sources.node})
                if plan.step is None:
                    reasons = "".join(f"\n  step {r.step} ({r.source}): {r.reason}" for r in plan.rejections)
                    what = f"step {step}" if step is not None else "any step"
                    raise (Damaged if plan.rejections else NothingToRestore)(f"cannot restore {what}{reasons}")
                if not 0 <= rank < plan.world:
                    raise BadConfig(f"rank must be from 0 to {plan.world - 1}, not {rank}")
                images = {}
                for holding in plan.parts:
                    try:
                        images[holding.rank] = sources.fetch(holding, copy=True)
                    except (EverstepError, OSError) as error:
                        survey = without(survey, holding, str(error))
                        break
                else:
                    return view(images, plan.step, rank)

    # -- right now

    def status(self) -> dict[str, Any]:
        """Whether the run lives, how far it is, and what each kind of loss would cost."""
        with self._sources() as sources:
            survey = sources.survey()
            kept = kept_steps(survey)
            arenas = sources.arenas
            live = _done_by_all(arenas)
            pids = sorted({arena.pid for arena in arenas if arena.kind == "base" and process_alive(arena.pid)})
            return {
                "run": self.run,
                "directory": str(self.directory),
                "alive": bool(pids),
                "trainers": pids,
                "keeper": keeper_pid(self.run),
                "step": max([k.step for k in kept] + ([live.step] if live else []), default=0),
                "sealed_step": _newest(kept, "memory"),
                "durable_step": _newest(kept, "disk"),
                "arena_bytes": sum(arena.slot_bytes * len(arena.slots) for arena in arenas),
                "replica": replica_of(self.run),
                "exposure": exposure(
                    kept, live.step if live else 0, live.cut_time if live else 0.0, time.time() if pids else None
                ),
            }

    # -- letting go

    def remove(self, step: int) -> None:
        """Delete one step from the disk; the last one that can be restored stays."""
        committed = committed_steps(self._tier)
        if step not in committed:
            raise NothingToRestore(f"step {step} is not on disk; there are {committed}")
        if next((s for s in flush.sound_steps(self._tier, self.run) if s != step), None) is None:
            raise BadConfig(
                f"step {step} is the last one on disk that can be restored; delete the directory to be rid of it"
            )
        flush.remove_checkpoint(self._tier, step)

    def clean(self, keep: Keep | None = None) -> dict[str, list[int]]:
        """Remove what crashes left behind, and with `keep` the checkpoints that it lets go."""
        retired = flush.retire(self._tier, keep, self.run, read_all=True) if keep is not None else []
        return {"retired": retired, "orphans": flush.clean(self._tier)}


def _done_by_all(arenas: list[Arena]) -> Live | None:
    """The newest step that every rank has done: one of them may be a step ahead of the others."""
    newest: dict[int, Live] = {}
    for arena in arenas:
        state = arena.live()
        if arena.rank not in newest or state.step > newest[arena.rank].step:
            newest[arena.rank] = state
    return min(newest.values(), key=lambda state: state.step, default=None)


def _verify(sources: Sources, holding: Holding) -> Finding:
    problem = ""
    try:
        sources.fetch(holding, copy=holding.source == "memory")
    except (EverstepError, OSError) as error:
        problem = str(error)
    return Finding(
        step=holding.step, source=holding.source, rank=holding.rank, bytes=holding.bytes, problem=problem,
        checked=holding.checked,
    )  # fmt: skip


def kept_steps(survey: Survey) -> list[Kept]:
    """The steps whose parts are all there."""
    steps: dict[int, Kept] = {}
    for step in sorted({holding.step for holding in survey.holdings}):
        held = tuple(h for h in survey.holdings if h.step == step)
        plan = make_plan(Survey(holdings=held), {h.node for h in held})
        if plan.step is not None:
            full = tuple(
                s for s in ("memory", "disk") if make_plan(_only(held, s), {h.node for h in held}).step is not None
            )
            steps[step] = Kept(
                step=step, world=plan.world, bytes=sum(h.bytes for h in plan.parts),
                cut_time=max(h.cut_time for h in plan.parts), sources=full,  # type: ignore[arg-type]
                replica=next((h.replica for h in plan.parts if h.replica), ""),
            )  # fmt: skip
    return list(steps.values())


def _only(held: tuple[Holding, ...], source: str) -> Survey:
    return Survey(holdings=tuple(h for h in held if h.source == source))


def _newest(kept: list[Kept], source: Source) -> int | None:
    return max((k.step for k in kept if source in k.sources), default=None)


def exposure(kept: list[Kept], step: int, cut_time: float, now: float | None) -> list[Exposure]:
    """What would be gone right now, for each kind of event. `now` is None when nobody trains: then work has stopped."""
    present = max([k.step for k in kept] + [step], default=0)
    until = now if now is not None else max([k.cut_time for k in kept] + [cut_time], default=0.0)
    table = []
    survivors: tuple[Source, ...]
    for event, survivors in (
        ("the process dies", ("memory", "disk")),
        ("the machine reboots", ("disk",)),
        ("this disk is lost", ()),
    ):
        left = [k for k in kept if set(k.sources) & set(survivors)]
        newest = max(left, key=lambda k: k.step, default=None)
        if newest is None:
            table.append(Exposure(event=event, restored_from="nothing", steps=present, seconds=None))
            continue
        source = next(s for s in survivors if s in newest.sources)
        table.append(
            Exposure(
                event=event,
                restored_from=f"{source}, step {newest.step}",
                steps=present - newest.step,
                seconds=max(0.0, until - newest.cut_time),
            )
        )
    return table
