"""One job that speaks SCR, seen from one rank: what all ranks do together in each call.

The keeper is met when the job has left its past behind: after a restart, or when the first dataset is written.
"""

from __future__ import annotations

import atexit
import os
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from everstep import topology
from everstep.errors import BadConfig, Damaged, EverstepError, Misuse, NothingToRestore
from everstep.events import Degraded, EventLog, Finished, Rejected, Started
from everstep.integrations.scr_files import Content, write_files
from everstep.integrations.scr_index import Index, forget
from everstep.integrations.scr_life import Keeping
from everstep.integrations.scr_meeting import Meeting
from everstep.integrations.scr_outbox import Outbox
from everstep.integrations.scr_pace import Pace, is_near_end
from everstep.integrations.scr_restart import Candidate, fetcher
from everstep.integrations.scr_settings import Choices
from everstep.recover.load import clear_attempt, note_attempt, search
from everstep.recover.survey import Sources
from everstep.store import claim
from everstep.store.places import Places

FLAG_CHECKPOINT = 1
FLAG_OUTPUT = 2


class Job:
    def __init__(self, choose: Callable[[], Choices]) -> None:
        """All ranks must make one. `choose`: what was set, which may be wrong on one of them."""
        self._place = topology.here(mpi=True)
        self._meeting = Meeting(self._place)
        self._choices = self._agreed(choose)
        self._settings = self._choices.settings()
        self._places = Places.chosen(self._settings.directory, self._settings.tiers)
        self._make_places()
        self._emit = EventLog.of_rank(self._settings.directory, self._place.rank)
        self._claim = claim.take(self._places, self._place, self._emit)
        for sentence in (*self._choices.warnings, *self._choices.uncovered(self._place)):
            self._warn(sentence)
        self._index = Index(self._settings.directory, self._choices.flushed, self._place, self._emit)
        self._index.read()
        self._known = self._survey()
        self._number = max(self._known | self._index.names.keys(), default=0)
        self._pace = Pace(self._choices, time.monotonic())
        self._outbox = Outbox(self._settings.directory / ".outbox", self._choices.prefix, self._emit)
        staging = self._settings.directory / ".files"
        self._staging = staging / f"rank-{self._place.rank:05d}"
        if self._place.rank == 0 or (self._place.is_leader and not self._claim.disk_is_common):
            self._outbox.bring_leftovers()
            shutil.rmtree(staging, ignore_errors=True)  # nobody is in a dataset before all have begun
        self._routed: dict[str, Path] = {}
        self._published: dict[str, list[Path]] = {}  # by the name of an output of this life
        self._name, self._flags, self._began = "", 0, 0.0
        self._limit: int | None = None  # no checkpoint after this one is offered
        self._sources: Sources | None = None
        self._candidate: Candidate | None = None
        self._keeping: Keeping | None = None
        atexit.register(self._at_exit)

    def _agreed(self, choose: Callable[[], Choices]) -> Choices:
        chosen, problem = None, ""
        try:
            chosen = choose()
        except BadConfig as error:
            problem = str(error)
        problems = self._meeting.troubles(problem)
        if problems:
            raise BadConfig("; ".join(problems))
        assert chosen is not None
        return chosen

    def _make_places(self) -> None:
        problem = ""
        try:
            claim.make(self._places)
        except (EverstepError, OSError) as error:
            problem = str(error)
        problems = self._meeting.troubles(problem)
        if problems:
            raise EverstepError(f"set SCR_CACHE_BASE and SCR_PREFIX to what can be written to: {'; '.join(problems)}")

    def _survey(self) -> set[int]:
        """The numbers of all datasets that anybody has: none of them is used again."""
        with self._open() as sources:
            survey = sources.survey()
        mine = {one.step for one in survey.holdings} | {one.record.step for one in survey.parities}
        mine |= {one.step for one in survey.rejections}
        told = topology.exchange(msgspec.msgpack.encode(sorted(mine)), self._place)
        return {step for answer in told for step in msgspec.msgpack.decode(answer, type=list[int])}

    def _open(self) -> Sources:
        return Sources(self._places, self._claim.run, is_common=self._claim.disk_is_common)

    def _warn(self, sentence: str, *, all: bool = False) -> None:
        """`all`: it is something that a program may want to act on, on every rank."""
        if all or self._place.rank == 0:
            self._emit(Degraded(what="as it was set", reason=sentence))
            warnings.warn(sentence, RuntimeWarning, stacklevel=4)

    # -- when

    def need_checkpoint(self) -> bool:
        now = time.monotonic()
        mine = self._pace.needs_one(now) or self._must_leave()
        return self._meeting.meet("need_checkpoint", phase="idle", words=b"1" if mine else b"0")[0] == b"1"

    def should_exit(self) -> bool:
        return self._meeting.meet("should_exit", phase="idle", words=b"1" if self._must_leave() else b"0")[0] == b"1"

    def _must_leave(self) -> bool:
        asked = self._keeping is not None and self._keeping.asked_to_stop
        return asked or is_near_end(self._choices, os.environ, time.time())

    # -- writing

    def start_output(self, name: str | None, flags: int) -> None:
        problem = "" if flags in (1, 2, 3) else f"flags must be FLAG_CHECKPOINT, FLAG_OUTPUT or both, not {flags!r}"
        self._meeting.meet_with("start_output", "name and flags", [name, str(flags)], problem=problem)
        keeping = self._keep()
        keeping.settle()
        shutil.rmtree(self._staging, ignore_errors=True)
        self._name = name or f"scr.dataset.{self._number + 1}"
        self._flags, self._routed, self._began, self._meeting.phase = flags, {}, time.monotonic(), "output"

    def route_file(self, name: str) -> str:
        if self._meeting.phase == "idle":
            raise Misuse("route_file() comes between start_output() and complete_output(), or in a restart")
        key = self._key(name)
        if self._meeting.phase == "restart":
            return str(self._find_file(key, name))
        if self._flags & FLAG_OUTPUT and os.path.isabs(key):
            raise Misuse(f"{name} lies outside SCR_PREFIX ({self._choices.prefix}), where an output cannot be brought")
        if key not in self._routed:
            folder = self._staging / "output" / str(len(self._routed))
            folder.mkdir(parents=True)
            self._routed[key] = folder / os.path.basename(key)
        return str(self._routed[key])

    def _key(self, name: str) -> str:
        """What a file is called, seen from the prefix; the whole path, if it lies elsewhere."""
        folder, file = os.path.split(name)
        if file in ("", ".", ".."):
            raise Misuse(f"route_file() takes the path of a file, not {name!r}")
        return os.path.join(os.path.realpath(folder), file).removeprefix(f"{self._choices.prefix}{os.sep}")

    def _find_file(self, key: str, name: str) -> Path:
        if key in self._routed:
            return self._routed[key]
        alike = [path for known, path in self._routed.items() if os.path.basename(known) == os.path.basename(name)]
        if os.path.basename(name) == name and len(alike) == 1:
            return alike[0]
        raise NothingToRestore(f"{name} is not a file that rank {self._place.rank} wrote for {self._name}")

    def complete_output(self, valid: bool) -> bool:
        step, slot, problem = self._number + 1, -1, "" if valid else "it is not valid"
        if self._meeting.phase == "output" and valid:
            try:
                files = [Content.of(key, path) for key, path in self._routed.items()]
                if self._flags & FLAG_CHECKPOINT:
                    slot = self._keep().slots.fill(step, self._name, self._flags, files)
            except (EverstepError, OSError) as error:
                problem = str(error)
        words = self._meeting.meet("complete_output", phase="output", words=problem.encode())
        self._meeting.phase = "idle"
        problems = [f"rank {rank}: {one.decode()}" for rank, one in enumerate(words) if one]
        if problems:
            shutil.rmtree(self._staging, ignore_errors=True)
            self._emit(Rejected(step=step, source="memory", reason=f"{self._name}: " + "; ".join(problems)))
            return False
        if self._flags & FLAG_CHECKPOINT:
            self._seal(slot, step)
        if self._flags & FLAG_OUTPUT:
            self._published[self._name] = [self._choices.prefix / key for key in self._routed]
            self._outbox.post(self._name, self._routed)
            if not self._choices.is_async:
                self._outbox.wait()
        shutil.rmtree(self._staging, ignore_errors=True)
        return True

    def _seal(self, slot: int, step: int) -> None:
        keeping, name, flags = self._keep(), self._name, self._flags
        keeping.slots.seal(slot, step)
        self._number = step
        self._index.note(step, name, flags)
        if self._place.rank == 0:
            self._outbox.run(lambda: self._index.note_on_prefix(step, name, flags))
        keeping.want(step, flush=self._choices.flush > 0 and step % self._choices.flush == 0)
        self._pace.wrote(self._began, time.monotonic())
        if not self._choices.is_async:
            keeping.settle(flush=True)

    def _keep(self) -> Keeping:
        """The keeper, met when there is something to keep. All ranks must come here together."""
        if self._keeping is None:
            self._let_go_candidate()
            if self._limit is not None:
                for step in sorted(step for step in self._known if step > self._limit):
                    self._index.drop(step)  # the job goes on from an older one: these led elsewhere
            self._keeping = Keeping(
                self._settings, self._place, self._claim, self._emit, self._open, newest=self._number or None
            )
        return self._keeping

    # -- restarting

    def have_restart(self) -> str | None:
        self._meeting.meet("have_restart", phase="idle")
        if self._keeping is not None:
            return None  # the past was left behind
        if self._candidate is None:
            self._sources = self._sources or self._open()
            try:
                self._candidate = search(
                    self._sources, self._place, self._emit, fetcher(self._place), limit=self._limit,
                    passed_over=self._index.dropped,
                )  # fmt: skip
            except Damaged as error:
                self._warn(f"no checkpoint can be restored, and the job starts over if it goes on: {error}", all=True)
            if self._candidate is None:
                self._let_go_candidate()
                return None
            told = msgspec.msgpack.encode((self._candidate.name, self._candidate.flags))
            name, flags = msgspec.msgpack.decode(topology.exchange(told, self._place)[0], type=tuple[str, int])
            self._candidate = replace(self._candidate, name=name, flags=flags)
        return self._candidate.name

    def start_restart(self) -> str:
        problem = "" if self._candidate else "start_restart() comes after have_restart() has named a checkpoint"
        self._meeting.meet("start_restart", phase="idle", problem=problem)
        assert self._candidate is not None
        failed = ""
        try:
            shutil.rmtree(self._staging, ignore_errors=True)
            self._routed = write_files(self._candidate.files, self._staging / "restart")
        except OSError as error:
            failed = str(error)
        problems = self._meeting.troubles(failed)
        if problems:
            raise EverstepError(
                f"{self._candidate.name} cannot be put into the cache; make room: {'; '.join(problems)}"
            )
        self._name, self._meeting.phase = self._candidate.name, "restart"
        return self._name

    def complete_restart(self, valid: bool) -> bool:
        words = self._meeting.meet("complete_restart", phase="restart", words=b"" if valid else b"1")
        candidate, sources = self._candidate, self._sources
        assert candidate is not None and sources is not None
        shutil.rmtree(self._staging, ignore_errors=True)
        self._meeting.phase, self._routed = "idle", {}
        failed = [rank for rank, word in enumerate(words) if word]
        if failed:
            if self._place.rank == 0:
                note_attempt(sources, candidate.step, self._emit, error=f"ranks {failed} could not read it")
            self._limit = candidate.step - 1
            self._let_go_candidate()
            return False
        if self._place.is_leader:
            clear_attempt(sources, self._emit)
        self._limit = candidate.step
        self._go_on_from(candidate)
        return True

    def _go_on_from(self, candidate: Candidate) -> None:
        """Meet the keeper; where some of the checkpoint was lost or lies elsewhere, fill the caches again.

        Under a number of its own: what is left of the old one stays as it is until this one is as safe.
        """
        files = [Content(key, len(data), data) for key, data in candidate.files.items()]
        keeping = self._keep()
        self._emit(
            Started(
                rank=self._place.rank, world=self._place.world, pid=os.getpid(), step=candidate.step,
                source=candidate.name,
            )
        )  # fmt: skip
        if not candidate.has_moved:
            return
        step, slot, problem = self._number + 1, -1, ""
        try:
            slot = keeping.slots.fill(step, candidate.name, candidate.flags, files)
        except (EverstepError, OSError) as error:
            problem = str(error)
        problems = self._meeting.troubles(problem)
        if problems:
            self._emit(Degraded(what=f"{candidate.name} is not in all caches again", reason="; ".join(problems)))
            return
        keeping.slots.seal(slot, step)
        self._number = step
        self._index.note(step, candidate.name, candidate.flags)
        keeping.want(step, flush=False)

    def _let_go_candidate(self) -> None:
        self._candidate = None
        if self._sources is not None:
            self._sources.close()
            self._sources = None

    # -- datasets by name

    def current(self, name: str) -> None:
        self._limit = self._named("current", name)[-1]
        self._let_go_candidate()

    def drop(self, name: str) -> None:
        for step in self._named("drop", name):
            self._index.drop(step)
        self._let_go_candidate()

    def delete(self, name: str) -> None:
        steps = self._named("delete", name, known=name in self._published)
        published = self._published.pop(name, [])
        self._let_go_candidate()
        for step in steps:
            self._index.drop(step)
        self._outbox.wait()
        for path in published:
            path.unlink(missing_ok=True)
        problem = ""
        if self._place.is_leader:
            try:
                with self._open() as sources:
                    forget(sources, steps, on_prefix=self._place.rank == 0)
            except (EverstepError, OSError) as error:
                problem = str(error)
        problems = self._meeting.troubles(problem)
        if problems:
            raise EverstepError(f"{name} is not offered any more, but some of it is still there: {'; '.join(problems)}")

    def _named(self, call: str, name: str, *, known: bool = False) -> list[int]:
        """The numbers of the datasets of a name, the same on all ranks."""
        self._meeting.meet_with(call, "name", name)
        steps = self._index.steps_named(name)
        if not steps and not known:
            there = sorted(set(self._index.names.values())) or ["none"]
            raise NothingToRestore(f"there is no dataset {name!r}; there are {', '.join(there[-5:])}")
        return steps

    # -- ending

    def status(self) -> dict[str, object]:
        """Where this rank stands, as plain data."""
        found: dict[str, object] = {
            "rank": self._place.rank, "world": self._place.world, "directory": str(self._settings.directory),
            "phase": self._meeting.phase, "dataset": self._index.names.get(self._number), "number": self._number,
            "outputs_failed": list(self._outbox.failed),
        }  # fmt: skip
        return found | (self._keeping.status() if self._keeping is not None else {})

    def finalize(self) -> bool:
        self._meeting.meet("finalize", phase="idle")
        is_flushed, is_whole = True, self._outbox.wait()
        try:
            if self._keeping is not None:
                is_flushed = self._keeping.finish(self._choices.flush > 0)
        finally:
            problems = self._meeting.troubles("" if is_whole and is_flushed else "not all of it is on SCR_PREFIX")
            self._close(final=not problems and self._choices.flush > 0)
        if problems:
            self._warn("some datasets could not be flushed and lie in the caches: " + "; ".join(problems))
        self._emit(Finished(rank=self._place.rank, step=self._number))
        return not problems

    def _close(self, *, final: bool) -> None:
        atexit.unregister(self._at_exit)
        self._let_go_candidate()
        self._outbox.close()
        if self._keeping is not None:
            self._keeping.close(final=final)
        shutil.rmtree(self._staging, ignore_errors=True)
        self._claim.give_back()

    def _at_exit(self) -> None:
        """The interpreter ends and nobody finalized: the keeper takes care of what is sealed."""
        if self._keeping is not None:
            self._keeping.close(final=False)
