"""The door for people and tools who read: what a run has kept, whether it is sound, and how to get it out.

Needs neither the model nor a GPU, and no torch until load() or export().
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec

from everstep.capture.arena import Arena, Live
from everstep.config import Keep
from everstep.errors import (
    BadConfig,
    Misuse,
    NewerFormat,
    NothingToRestore,
    RunHeld,
)
from everstep.events import WentOn, read_events
from everstep.keeper import flush
from everstep.keeper.client import keeper_pid, levels_of, replica_of
from everstep.keeper.note import read_note
from everstep.recover.audit import (
    Check,
    Finding,
    chains,
    check_chain,
    check_log,
    check_part,
    check_rejections,
    check_rings,
    check_values,
    is_training,
    log_files,
    not_asked,
    sound_plan,
)
from everstep.recover.plan import make_plan, merge, reaches, up_to
from everstep.recover.reach import (
    Kept,
    exposure,
    in_words,
    kept_steps,
    newest_in,
    nodes_of,
    only,
    records_of,
    restorable,
    take_away,
)
from everstep.recover.records import Entry, entries
from everstep.recover.shelf import Shelf
from everstep.recover.survey import Sources
from everstep.recover.times import Times, measure, times
from everstep.store import rewinds
from everstep.store.claim import keep_away
from everstep.store.disk import DiskTier
from everstep.store.log import log_folder, log_name, scan
from everstep.store.manifest import committed_steps, partial_steps, read_commit, read_part, run_name
from everstep.store.places import Places, not_a_run
from everstep.store.tier import Tier
from everstep.topology import process_alive
from everstep.types import Commit, Part, Plan, Source, Survey, Survives

_UNKNOWN = 1 << 62  # how far records lead whose other ranks are on other nodes


def open(dir: str | Path, *, memory: str | None = None) -> Archive:
    """Open a run's directory for reading. `memory`: the path given to Memory(path=...), if one was."""
    return Archive(Path(dir).absolute(), memory)


class Archive:
    def __init__(self, directory: Path, memory: str | None) -> None:
        self.directory = directory
        self._places = Places.written(directory)
        if memory is not None:
            self._places = msgspec.structs.replace(self._places, memory=memory)
        self._tier = self._places.disk_tier()
        try:
            self.run = run_name(DiskTier(directory))
        except (FileNotFoundError, NotADirectoryError):
            raise not_a_run(directory) from None

    # -- what is there

    def _sources(self) -> Sources:
        return Sources(self._places, self.run)

    def survey(self) -> Survey:
        with self._sources() as sources:
            return sources.survey()

    def _everywhere(self, sources: Sources) -> Survey:
        """What this node has, and what others do, as far as a keeper here knows them."""
        note, mine = read_note(self.run), sources.survey()
        if note is None or len(note.members) < 2:
            return mine
        from everstep.recover.others import surveys  # needs a package that one node alone does not

        return merge([mine, *surveys(self.run, sources.node, note)])

    def kept(self) -> list[Kept]:
        """Every step that could be restored now, oldest first."""
        with self._sources() as sources:
            return kept_steps(self._everywhere(sources))

    def steps(self) -> list[int]:
        return [kept.step for kept in self.kept()]

    def latest(self) -> int:
        steps = self.steps()
        if not steps:
            raise NothingToRestore(f"{self.directory} holds no checkpoint that can be restored")
        return steps[-1]

    def plan(self, lost: Collection[str] = ()) -> Plan:
        """What a restart would do now, or after the loss of "memory", "disk" or a node by its name.

        Reads and checks the bytes of what it chooses, as a restart does, as far as they are on this node; memory that
        is being trained in is taken at its seals. What other nodes have is asked of their keepers.
        """
        with self._sources() as sources:
            survey = self._everywhere(sources)
            known = {*get_args(Source), *nodes_of(survey)}
            for name in lost:
                if name not in known:
                    raise BadConfig(f"lost takes {', '.join(sorted(known))}, not {name!r}")
            return sound_plan(sources, take_away(survey, lost))

    def times(self, plan: Plan) -> Times:
        """About how long a plan would take, at the rates that were measured on this node; None where none was."""
        return times(plan, measure(read_events(self.directory)))

    def log(self, step: int | None = None) -> tuple[list[Entry], list[str]]:
        """Every record, or those of one step, and why there are no more of them where that is not the end."""
        with self._sources() as sources:
            found = list(entries(sources, step))
        records = sorted((e for e in found if not isinstance(e, str)), key=lambda e: (e.step, e.rank))
        if step is not None and not records:
            raise NothingToRestore(f"there is no record of step {step}")
        return records, [problem for problem in found if isinstance(problem, str)]

    def manifest(self, step: int | None = None) -> tuple[Commit, list[Part]]:
        """The records of a step on disk, by default of the newest."""
        committed = committed_steps(self._tier)
        if not committed:
            raise NothingToRestore(f"{self.directory} has no step on disk yet")
        step = committed[-1] if step is None else step
        if step not in committed:
            raise NothingToRestore(f"step {step} is not on disk; there are {committed}.{self._its_records(step)}")
        commit = read_commit(self._tier, step, self.run)
        parts = [read_part(self._tier, commit, ref.rank) for ref in commit.parts]
        for part in parts:
            _ = part.pieces  # Damaged, if nobody can read them
        return commit, parts

    def _its_records(self, step: int) -> str:
        """How to see a step that has no base of its own."""
        has_records = any(kept.step == step != kept.base for kept in self.kept())
        return f" It is a base and records: everstep show --log --step {step} shows the record." if has_records else ""

    # -- whether it is sound

    def verify(
        self, step: int | None = None, *, replay: bool = False, watch: Callable[[int, int], None] | None = None
    ) -> list[Finding]:
        """Read and check every byte of a step, or of all of them, in memory and on all tiers, with the log.

        So is what other nodes have on their disks and hold for others, where their keepers answer; of one that does
        not, a finding says that it could not be asked.
        replay: also repeat the steps that the log has and compare with what training noted of its state.
        watch: is told how many bytes of how many are done.
        """
        with self._sources() as sources, self._inquiry(sources, step) as (others, found):
            survey = sources.survey()
            checks = self._checks(sources, survey, step) + others
            if replay:
                steady = only(survey, "disk") if is_training(sources) else survey
                for plan in chains(sources, steady, step):
                    checks.append((records_of(plan)[1], partial(check_chain, sources, survey, plan)))
            found += [f for f in check_rejections(sources, survey) if step is None or f.step == step]
            if step is None and not is_training(sources):
                found += check_rings(sources)
            if not checks and not any(one.asked for one in found) and step is not None:
                there = in_words(sorted(restorable(survey)))
                raise NothingToRestore(f"there is no step {step}; there are [{there}]")
            done, total = 0, sum(size for size, _ in checks)
            for size, check in checks:
                found.append(check())
                done += size
                if watch is not None:
                    watch(done, total)
            return sorted(found, key=lambda f: (f.step, f.source, f.rank, f.node))

    @contextmanager
    def _inquiry(self, sources: Sources, step: int | None) -> Iterator[tuple[list[Check], list[Finding]]]:
        """What is to be checked on other nodes, and who of them cannot be asked."""
        note = read_note(self.run)
        if note is not None and len(note.members) > 1:
            from everstep.recover.inquiry import inquiry  # needs a package that one node alone does not

            with inquiry(self.run, sources.node, note, step) as found:
                yield found
            return
        is_alone = note is not None or not partial_steps(self._tier, self.run)
        reason = "no keeper of this node is there that knows them"
        yield [], [] if is_alone else [not_asked("others", reason)]

    def _checks(self, sources: Sources, survey: Survey, step: int | None) -> list[Check]:
        """What there is to read, with its bytes: all, or what a step consists of."""
        holdings, plan = survey.holdings, None
        if step is not None:
            holdings = tuple(h for h in holdings if h.step == step)
            if not holdings and step in restorable(survey):
                plan = make_plan(up_to(msgspec.structs.replace(survey, attempts=(), rewind=None), step), {sources.node})
                holdings = plan.parts
        checks: list[Check] = [(h.bytes, partial(check_part, sources, h)) for h in holdings]
        if step is None or plan is not None:
            wanted = [v for v in survey.values if step in (None, v.step)]
            checks += [(v.bytes, partial(check_values, sources, v)) for v in wanted]
            for shelf in sources.shelves.values():
                checks += _log_checks(shelf, plan)
        return checks

    # -- getting it out

    def load(self, step: int | None = None, *, rank: int = 0) -> dict[str, Any]:
        """A checkpoint as whole tensors by name and plain values; private values are those of `rank`."""
        from everstep.recover.retrieve import retrieve

        with self._sources() as sources:
            checkpoint = retrieve(sources, step, rank)
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
        from everstep.recover.retrieve import retrieve

        with self._sources() as sources:
            checkpoint = retrieve(sources, step, 0)
        write(checkpoint, Path(path), format=format, only=only)
        return checkpoint.step

    def scavenge(self, to: str | None = None, *, watch: Callable[[int, int], None] | None = None) -> tuple[int, str]:
        """After the job is gone for good: write the newest step that all nodes together still have to one place.

        to: a directory; by default the deepest tier of the run, else its own directory. Returns the step, and where.
        """
        from everstep.recover.salvage import salvage

        tier: Tier = [self._tier, *self._places.deeper_tiers().values()][-1]
        if to is not None:
            tier = DiskTier(Path(to).absolute(), name=to, survives=Survives.NODE)
        with self._sources() as sources:
            if pids := _trainers([*sources.arenas, *sources.rings]):
                raise RunHeld(str(self.directory), pids[0], sources.node)
            step = salvage(sources, self._everywhere(sources), read_note(self.run), tier, watch)
        return step, tier.name

    # -- right now

    def trainers(self) -> list[int]:
        """The processes of this node that train the run now."""
        with self._sources() as sources:
            return _trainers([*sources.arenas, *sources.rings])

    def status(self) -> dict[str, Any]:
        """Whether the run lives, how far it is, and what each kind of loss would cost."""
        with self._sources() as sources:
            survey = self._everywhere(sources)
            kept = kept_steps(survey)
            arenas = [*sources.arenas, *sources.rings]
            live = _done_by_all(arenas)
            pids = _trainers(arenas)
            return {
                "run": self.run,
                "directory": str(self.directory),
                "alive": bool(pids),
                "trainers": pids,
                "keeper": keeper_pid(self.run),
                "step": max([k.step for k in kept] + ([live.step] if live else []), default=0),
                "sealed_step": newest_in(survey, "memory"),
                "durable_step": max(restorable(only(survey, "disk")), default=None),
                **self._levels(survey),
                "arena_bytes": sum(arena.slot_bytes * len(arena.slots) for arena in arenas),
                "replica": replica_of(self.run),
                "ring": _ring_state(sources.rings, only(survey, "disk")),
                "went_on": _went_on(self.directory),
                "exposure": exposure(
                    survey,
                    sources.node,
                    live.step if live else 0,
                    live.cut_time if live else 0.0,
                    time.time() if pids else None,
                ),
            }  # fmt: skip

    def _levels(self, survey: Survey) -> dict[str, Any]:
        """Beyond this node: as its keeper says, and without one what the deeper tiers themselves show."""
        told = levels_of(self.run)
        places = {"shared": self._places.shared, "objects": self._places.objects}
        deeper = [max(restorable(only(survey, source)), default=None) for source, place in places.items() if place]
        there = [step for step in deeper if step is not None]
        return {
            "protected_step": told.protected if told is not None and told.protected >= 0 else None,
            "shared_step": min(there) if there and len(there) == len(deeper) else None,
            "flushes": told.flushes if told is not None else (),
            "silent_nodes": told.silent if told is not None else (),
            "trouble": told.trouble if told is not None else "",
        }

    # -- letting go

    def remove(self, step: int) -> list[int]:
        """Delete one base from the disk; returns the steps that only records after it led to, which go with it.

        Refused if the newest step on disk would be among them, or if nothing would be left.
        """
        committed = committed_steps(self._tier)
        with self._sources() as sources:
            survey = only(sources.survey(), "disk")
            before = restorable(survey)
            if step not in committed:
                way = " It is a base and records; remove its base." if step in before else ""
                raise NothingToRestore(f"step {step} is not on disk; there are {committed}.{way}")
            held = tuple(h for h in survey.holdings if h.step != step)
            survey = msgspec.structs.replace(survey, holdings=held)
            left, gone = sound_plan(sources, survey), sorted(before - restorable(survey) - {step})
        if left.step is None:
            raise BadConfig(
                f"step {step} is the last one on disk that can be restored; delete the directory to be rid of it"
            )
        if gone and left.step < max(before):
            raise BadConfig(
                f"steps {in_words(gone)} can only be restored from step {step} and the log, and they are the newest"
            )
        flush.remove_checkpoint(self._tier, step)
        return gone

    def rewind(self, step: int | None) -> list[int]:
        """Have the next life go on from this step; the newer ones, which it will set aside. None: take that back."""
        with keep_away(self.directory) as is_free:
            if not is_free or keeper_pid(self.run) is not None:
                raise Misuse(f"{self.directory} is in use. {rewinds.WHEN}")
            if step is None:
                rewinds.take_back(self._tier)
                return []
            known = {*self.steps(), *partial_steps(self._tier, self.run)}  # of these other nodes have the rest
            return rewinds.ask(self._tier, step, known)

    def clean(self, keep: Keep | None = None) -> dict[str, list[int]]:
        """Remove what crashes left behind, and with `keep` the checkpoints that it lets go.

        Of the log those segments go, by the step after which they begin, that no base leads into; while somebody
        writes it that is left to the keeper.
        """
        retired = flush.retire(self._tier, keep, self.run, read_all=True) if keep is not None else []
        return {"retired": retired, "orphans": flush.clean(self._tier), "segments": self._clean_log()}

    def _clean_log(self) -> list[int]:
        gone = set()
        with self._sources() as sources:
            if is_training(sources) or keeper_pid(self.run) is not None:
                return []
            ways = [(parts[0].step, steps[-1]) for parts, steps in reaches(sources.survey(), {sources.node})]
            ways += [(step, _UNKNOWN) for step in partial_steps(self._tier, self.run)]
            for start, rank in log_files(sources.tier):
                try:
                    end = scan(self._tier, start, rank, self.run).last
                except NewerFormat:
                    continue  # not ours to judge
                if not any(base < end and start < last for base, last in ways):
                    self._tier.delete(log_name(start, rank))
                    gone.add(start)
        for start in gone:
            if not self._tier.names(log_folder(start)):
                self._tier.delete_folder(log_folder(start))
        return sorted(gone)


def _log_checks(shelf: Shelf, plan: Plan | None) -> list[Check]:
    """The files of the log on one tier: all, or those that a plan may need."""
    try:
        files = log_files(shelf.tier)
        if plan is not None:
            is_used = any(one.source == shelf.source for one in plan.records)
            files = [(start, rank) for start, rank in files if is_used and _is_between(plan, start, rank, files)]
        limit = plan.step if plan is not None else None
        return [
            (shelf.tier.size(log_name(start, rank)), partial(check_log, shelf, start, rank, limit))
            for start, rank in files
        ]
    except OSError:
        return []  # it cannot be listed, which the survey says


def _is_between(plan: Plan, start: int, rank: int, files: list[tuple[int, int]]) -> bool:
    """Whether a file of the log may have records that a plan needs: its own end is where its rank's next one begins."""
    base, step = plan.base or 0, plan.step or 0
    return start < step and not any(start < other <= base for other, whose in files if whose == rank)


def _went_on(directory: Path) -> list[WentOn]:
    """How losses were lived through, as one rank tells it: the first that has a word of it here."""
    events = [event for event in read_events(directory) if isinstance(event, WentOn)]
    first = min((event.rank for event in events), default=0)
    return [event for event in events if event.rank == first]


def _trainers(arenas: list[Arena]) -> list[int]:
    return sorted({arena.pid for arena in arenas if arena.kind != "replica" and process_alive(arena.pid)})


def _ring_state(rings: list[Arena], on_disk: Survey) -> dict[str, int]:
    """What is in the rings, and how much of it is not on a disk: some may never be, where a base made it needless."""
    found = [(ring.rank, seal.step) for ring in rings if ring.kind == "log" for seal in ring.seals().values()]
    written = [(one.rank, range(one.first, one.last + 1)) for one in on_disk.records]
    return {
        "records": len(found),
        "unwritten": sum(not any(rank == by and step in steps for by, steps in written) for rank, step in found),
        "bytes": sum(ring.slot_bytes * len(ring.slots) for ring in rings),
    }


def _done_by_all(arenas: list[Arena]) -> Live | None:
    """The newest step that every rank has done: one of them may be a step ahead of the others."""
    newest: dict[int, Live] = {}
    for arena in arenas:
        state = arena.live()
        if arena.rank not in newest or state.step > newest[arena.rank].step:
            newest[arena.rank] = state
    return min(newest.values(), key=lambda state: state.step, default=None)
