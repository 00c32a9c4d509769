"""This process among those who train together: it hears who is lost, comes to a stop, and meets the others again.

A loss is heard in a thread of its own, which sets the training thread free by cutting the connections of the group: a
collective that would wait for the dead for half an hour ends with an error at once. Whether an error came from that,
and not from the program, is known because the loss was heard: `is_by_loss`.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from msgspec.structs import replace

from everstep import topology
from everstep.capture.layout import Subjects
from everstep.config import Settings
from everstep.errors import BadConfig, Restart
from everstep.events import WentOn
from everstep.keeper.arrival import convene, find_run
from everstep.keeper.protocol import Charter, Lost, View
from everstep.keeper.views import SPARE
from everstep.launch import is_spare
from everstep.live.crew import STANDS_BY, tell_crew
from everstep.live.line import Line
from everstep.live.meeting import Meeting, Visit
from everstep.live.replicas import move, ranks_of_replica
from everstep.live.watch import Watch
from everstep.topology import Formed, Topology

_PATIENCE = 2  # detection times until a loss that was noticed must be heard of,
_PATIENCE_OF_NODES = 4  # and where keepers tell each other, and one may have to follow another
_MEET = timedelta(seconds=30)  # until all who were called must have met
_LOOK_AGAIN_S = 0.02  # for the one with whom they meet
_CUT_AGAIN_S = 0.02
_LOOK_S = 0.2  # between two looks of a spare for a run that it could join
_OF_TORCH = ("gloo", "nccl", "connection", "socket", "broken pipe", "store", "process group", "aborted")


class Presence:
    def __init__(self, settings: Settings, subjects: Subjects) -> None:
        how = topology.formed()
        if how is None:
            raise BadConfig("on_loss needs a process group that can be interrupted: everstep.init_process_group()")
        self._settings, self._how = settings, how
        self._unit = ranks_of_replica(subjects)
        if not is_spare(os.environ):
            move(subjects)  # the connections of groups that the program has made are not known
        self._line: Line | None = None
        self._host = "127.0.0.1"  # where others find this process
        self._changed = threading.Condition()
        self._meeting: Meeting | None = None  # where those of this view have met, if it was here,
        self._visit: Visit | None = None  # and this process there
        self._called: View | None = None
        self._rank = SPARE
        self._stands_by = True  # it has no place
        self.view = 0
        self.lost: Lost | None = None  # how the present view ended, once it has
        self.watch = Watch(settings.detect_s, self._alarm)
        self._times = [0.0, 0.0, 0.0]  # when the loss was heard, this process stood still, and all had met

    def enrol(self, run: str, job: str, place: Topology) -> None:
        """`job`: what all ranks of this start have in common."""
        if self._line is None:
            charter = None
            if place.has_many_nodes:
                charter = convene(run, job, self._settings, place)
                self._host = charter.host
            self._line = self._open(run, charter)
            self._rank, self._stands_by = place.rank, False
            self._line.enrol(job=job, view=self.view, rank=place.rank, world=place.world)
        tell_crew(place.rank)

    def enrol_as_spare(self) -> None:
        """Of the run that has a keeper here, or of one that other nodes have, as soon as there is one."""
        while (found := find_run(self._settings)) is None:
            time.sleep(_LOOK_S)
        run, charter = found
        if charter is not None:
            self._host = charter.host
        self._line = self._open(run, charter)
        self._line.enrol(job="", view=0, rank=SPARE, world=0)

    def _open(self, run: str, charter: Charter | None) -> Line:
        settings = self._settings
        return Line(run, settings.directory, settings.on_loss, settings.detect_s, self._hear, charter, self._unit)

    def next_view(self) -> View:
        """The present view has ended, or there was none: come to a stop, and wait for those who go on."""
        if self._is_fenced:
            tell_crew(SPARE)
            raise Restart("this process was taken for lost, and the others went on without it")
        self.watch.recover()
        called = self._stand(self._line) if self._line is not None else None
        while self._stands_by and called is not None:
            if not called.world:
                self.close(final=False)  # its job is gone, and may come again
                self.enrol_as_spare()
            called = self._stand(self._line) if self._line is not None else None
        if called is None and self._stands_by:
            raise SystemExit(0)  # a spare: the run is over, and no place was free
        if called is None or not called.world:
            why = (called.reason or called.ended) if called is not None else "the keeper is gone"
            raise Restart(f"ranks are lost, and nobody goes on without them: {why or 'as on_loss says'}")
        return called

    @property
    def _is_fenced(self) -> bool:
        """Whether it is this very process that is said to be lost: it must not train on beside the others."""
        return self.lost is not None and self.lost.view == self.view and self._rank in self.lost.ranks

    def _stand(self, line: Line) -> View | None:
        self._how.wires.cut()
        if dist.is_initialized():
            dist.destroy_process_group()  # nothing hangs on it any more
        dist.distributed_c10d._world.group_count = 0  # groups are named by it, and one that was never formed counts too
        self._part()
        meeting = Meeting(self._host)
        self._times[1] = time.monotonic()
        called = line.stand(self.view, meeting.address)
        if not self._times[0]:  # it stood by, and has lost nobody
            self._times[:2] = [time.monotonic()] * 2
        if called is not None and (called.world or not self._stands_by):
            self._stands_by = called.rank == SPARE and called.world > 0  # its replica is not whole any more
            if self._stands_by:
                tell_crew(STANDS_BY)
                self._times = [0.0, 0.0, 0.0]
            if called.charter is not None:
                self._host = called.charter.host
            with self._changed:
                self.view, self._rank, self._called = called.number, called.rank, called
                if self.lost is not None and self.lost.view < self.view:
                    self.lost = None
            if not called.lost:
                self.watch.learn()
        if called is not None and called.address == meeting.address:
            self._meeting = meeting
        else:
            meeting.close()
        return called

    def _part(self) -> None:
        """From those of the view that has ended."""
        if self._visit is not None:
            self._visit.close()
        if self._meeting is not None:
            self._meeting.close()
        self._visit = self._meeting = None

    def meet(self, called: View) -> None:
        """Form the group of a view."""

        def store() -> dist.Store:
            self._visit = self._find(called.address)
            return dist.PrefixStore(f"everstep/view-{called.number}", self._visit)

        with self._changed:
            self._how = Formed(self._how.backend, self._how.limit, self._how.options)
        os.environ |= {"RANK": str(called.rank), "WORLD_SIZE": str(called.world)}
        self._how.form(store, called.rank, called.world)
        self._times[2] = time.monotonic()

    def _find(self, address: str) -> Visit:
        """The one with whom all meet, unless that one is lost."""
        deadline = time.monotonic() + _MEET.total_seconds()
        while self.lost is None:
            try:
                return Visit(address, _MEET)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ConnectionError(f"nobody is to be found at {address}: {error}") from error
                time.sleep(_LOOK_AGAIN_S)
        raise ConnectionError("the view ended before it began")

    def is_by_loss(self, error: BaseException) -> bool:
        """Whether a collective failed because somebody is lost: that is heard of within a moment, or it was not."""
        if isinstance(error, ValueError | Restart) or not self.is_of_group(error):
            return False
        with self._changed:
            # a keeper that has just taken another's place needs that long to miss somebody: be more patient than it is
            has_many_nodes = self._line is not None and self._line.charter is not None
            patience = _PATIENCE_OF_NODES if has_many_nodes else _PATIENCE
            return self._changed.wait_for(lambda: self.lost is not None, patience * self._settings.detect_s)

    @staticmethod
    def is_of_group(error: BaseException) -> bool:
        """Whether it says that a process group does not work, or that there is none."""
        text = f"{type(error).__name__} {error}".lower()
        return isinstance(error, RuntimeError | ConnectionError | ValueError) and any(map(text.__contains__, _OF_TORCH))

    def fall_back(self, reason: str) -> None:
        """Those of this view cannot go on as they were called to: they go back, if that was chosen too."""
        assert self._called is not None
        if "rollback" not in self._settings.on_loss:
            raise Restart(f"ranks are lost, and the step cannot be finished without them: {reason}")
        self._called = replace(self._called, policy="rollback", reason=reason)

    def _hear(self, lost: Lost) -> None:
        with self._changed:
            if lost.view < self.view:
                return
            if self.lost is None:
                self._times[0] = time.monotonic()
            self.lost = lost
            self._changed.notify_all()
            how, is_forming = self._how, self._how.wires.are_being_made
            how.wires.cut()
        if is_forming:
            threading.Thread(target=self._keep_cutting, args=(how,), name="everstep-cut", daemon=True).start()
        self._tell_if_free()

    @staticmethod
    def _keep_cutting(how: Formed) -> None:
        """A group that is being formed dials again, and opens more: until it gives up."""
        while how.wires.are_being_made:
            how.wires.cut()
            time.sleep(_CUT_AGAIN_S)
        how.wires.cut()  # it may have been formed after the last time

    def why_hopeless(self) -> str:
        """Why nobody should wait any longer for what the lost had to do; nothing, if one should."""
        lost = self.lost
        if lost is None or time.monotonic() - self._times[0] <= self._settings.detect_s:
            return ""
        return lost.reason or "a rank is lost"

    def set_free(self) -> None:
        """The program is on its own time, until it enters a step or asks for the next one."""
        self.watch.rest()
        self._tell_if_free()

    def _tell_if_free(self) -> None:
        if self.lost is not None and self.watch.is_free and self._line is not None:
            self._line.free(self.view)

    def _alarm(self, took_s: float, longest_s: float) -> None:
        if self.lost is None and self._line is not None:
            self._line.stuck(self.view, f"in a step for {took_s:.1f} s, where the longest took {longest_s:.1f} s")

    def report(self, place: Topology, *, step: int, left_at: int, **without: int) -> WentOn:
        assert self._called is not None
        heard, stood, met = self._times
        return WentOn(
            view=self.view, rank=place.rank, world=place.world, policy=self._called.policy, step=step, left_at=left_at,
            exact=self._called.policy == "spare", stopped_s=stood - heard, met_s=met - stood,
            restored_s=time.monotonic() - met, lost=self._called.ended, reason=self._called.reason, **without,
        )  # fmt: skip

    def close(self, *, final: bool) -> None:
        if self._line is not None:
            self._line.close(final=final)
