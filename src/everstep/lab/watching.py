"""A real run, seen from outside: who trains as what, how far all of them are, and what they have told.

Of processes only those are believed that came of the command that was started here. Steps are read where the trainers
note them, in the memory that outlives them, so that they are known within milliseconds and after a death too.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.capture.arena import Arena
from everstep.capture.host import arena_root
from everstep.errors import EverstepError
from everstep.events import AnyEvent, KeeperStarted, Started, read_events
from everstep.lab.injections import Place
from everstep.lab.processes import Tree, environment_of
from everstep.store.disk import DiskTier
from everstep.store.manifest import run_name
from everstep.store.places import Places
from everstep.timeline import Kind, read_timeline
from everstep.topology import node_name, process_alive

_REST_S = 0.2  # between two looks at who is there


@dataclass(frozen=True, slots=True)
class Member:
    """A rank, or a keeper."""

    pid: int
    node: str
    environment: dict[str, str]
    directory: Path
    started: float
    step: int = 0  # that it began with
    world: int = 0


@dataclass(frozen=True, slots=True)
class Reached:
    """The newest step that all ranks have done."""

    step: int
    time: float  # when the last of them had


@dataclass(frozen=True, slots=True)
class Done:
    """A step of a rank, or something else that it did in one."""

    kind: int
    rank: int
    pid: int
    step: int
    begin: float
    end: float


class Watched:
    def __init__(self, directories: Sequence[Path], tree: Tree, since: float) -> None:
        self._directories, self._tree, self._since = directories, tree, since
        self.ranks: dict[int, Member] = {}
        self.keepers: dict[str, Member] = {}  # by node
        self._arenas: list[Arena] = []
        self._past: list[AnyEvent] = []  # of directories that were wiped
        self._past_spans: list[Done] = []
        self._looked_at = 0.0

    def look(self, *, now: bool = False) -> None:
        """Who is there; not more often than is worth it, unless `now`."""
        if not now and time.monotonic() - self._looked_at < _REST_S:
            return
        ranks: dict[int, tuple[Path, Started]] = {}
        keepers: dict[str, tuple[Path, KeeperStarted]] = {}
        for directory in self._directories:
            for event in self._told(directory):
                if isinstance(event, Started) and _is_newer(event, ranks.get(event.rank)):
                    ranks[event.rank] = (directory, event)
                elif isinstance(event, KeeperStarted) and _is_newer(event, keepers.get(event.node)):
                    keepers[event.node] = (directory, event)
        self._tree.bury()
        ours = self._tree.pids()
        world = max(ranks.values(), key=lambda one: one[1].time)[1].world if ranks else 0
        self.ranks = {
            rank: _member(said.pid, at, said.time, said.step, said.world)
            for rank, (at, said) in sorted(ranks.items())
            if said.pid in ours and rank < world
        }
        self.keepers = {
            node: _member(said.pid, at, said.time) for node, (at, said) in sorted(keepers.items()) if said.pid in ours
        }
        self._open_arenas()
        self._looked_at = time.monotonic()

    def _told(self, directory: Path) -> list[AnyEvent]:
        return [event for event in read_events(directory) if event.time >= self._since]

    def events(self) -> list[AnyEvent]:
        """Of this command, in the order of time."""
        told = [event for directory in self._directories for event in self._told(directory)]
        return sorted(self._past + told, key=lambda event: event.time)

    def spans(self, kind: Kind) -> list[Done]:
        """All of a kind that ranks have noted, in the order in which they ended. The last quarter of a second of a
        killed process is not among them."""
        now = [done for directory in self._directories for done in self._spans_in(directory)]
        return sorted((one for one in self._past_spans + now if one.kind == kind), key=lambda one: one.end)

    def _spans_in(self, directory: Path) -> Iterator[Done]:
        for track in read_timeline(directory):
            if track.name.startswith("rank "):
                rank = int(track.name.removeprefix("rank "))
                for span in track.spans:
                    if span.end >= self._since:
                        yield Done(span.kind, rank, span.pid, span.step, span.begin, span.end)

    # -- how far all are

    def _open_arenas(self) -> None:
        """Whatever was opened before stays readable: the memory of the dead says how far they were."""
        for arena in [one for one in self._arenas if not _is_still_there(one)]:
            arena.close()
            self._arenas.remove(arena)
        known = {arena.place for arena in self._arenas}
        for folder in {folder for member in self.ranks.values() for folder in self._memory(member)}:
            for place in sorted(folder.glob("rank-*")):
                if str(place) not in known:
                    try:
                        self._arenas.append(Arena.open(place))
                    except (OSError, ValueError):
                        continue  # it is being made

    def reached(self, ranks: dict[int, Member] | None = None) -> Reached | None:
        """By those who train now, or those who did; None if they are not all there."""
        members = self.ranks if ranks is None else ranks
        if not members or len(members) < next(iter(members.values())).world:
            return None
        if ranks is None and not all(process_alive(member.pid) for member in members.values()):
            return None
        each = []
        for rank, member in members.items():
            cuts = [arena.live() for arena in self._arenas if arena.rank == rank]
            made = [Reached(cut.step, cut.cut_time) for cut in cuts if cut.cut_time > member.started]
            each.append(max(made, key=lambda one: one.step, default=Reached(member.step, member.started)))
        least = min(one.step for one in each)
        return Reached(least, max(one.time for one in each if one.step == least))

    # -- what lies where

    def _memory(self, member: Member) -> list[Path]:
        """The folders of the run in the memory of a member's node."""
        try:
            places, run = Places.written(member.directory), run_name(DiskTier(member.directory))
        except (EverstepError, OSError):
            return []  # it has none yet, or none any more
        roots = {arena_root(path, member.environment) for path in (None, places.memory)}
        return sorted(root / run for root in roots if (root / run).is_dir())

    def memory_of(self, node: str) -> list[Path]:
        return sorted({folder for member in self._of(node) for folder in self._memory(member)})

    def disks_of(self, node: str) -> list[Path]:
        """The directories of a node, which are of no other."""
        mine = {member.directory for member in self._of(node)}
        for other in (*self.ranks.values(), *self.keepers.values()):
            if other.node != node and other.directory in mine:
                raise EverstepError(
                    f"{other.directory} is the disk of nodes {node} and {other.node}: not wiped for one"
                )
        chosen = [Path(disk) for directory in mine if (disk := Places.written(directory).disk)]
        return sorted({*mine, *chosen})

    def _of(self, node: str) -> list[Member]:
        return [member for member in (*self.ranks.values(), *self.keepers.values()) if member.node == node]

    def folders(self, node: str, places: Sequence[Place]) -> list[Path]:
        """What a wipe would remove. To be asked while the processes of the node are there."""
        found = self.memory_of(node) if "memory" in places else []
        return found + (self.disks_of(node) if "disk" in places else [])

    def wipe(self, folders: Sequence[Path]) -> None:
        """Remove all that is in them; what they have told is remembered."""
        for folder in folders:
            if folder in self._directories:
                self._past += self._told(folder)
                self._past_spans += self._spans_in(folder)
            for entry in list(folder.iterdir()) if folder.is_dir() else []:
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)


def _is_newer(event: AnyEvent, known: tuple[Path, Started] | tuple[Path, KeeperStarted] | None) -> bool:
    return known is None or event.time >= known[1].time


def _member(pid: int, directory: Path, started: float, step: int = 0, world: int = 0) -> Member:
    environment = environment_of(pid)
    return Member(pid, node_name(environment), environment, directory, started, step, world)


def _is_still_there(arena: Arena) -> bool:
    """Whether what is opened is what lies there now; after a wipe another may have its name."""
    try:
        return os.stat(Path(arena.place, "control")).st_ino == os.fstat(arena.descriptors[0]).st_ino
    except OSError:
        return False
