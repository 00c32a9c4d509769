"""How the steps of a life are kept: each by a base, or by a record that leads on from one; and when.

The trainer's end of it all: at every cut it has the step taken, lets the steering decide which way to go on, and turns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from math import ceil
from typing import Any

from everstep.capture import extras as trees
from everstep.capture.arena import Arena
from everstep.capture.compression import Compression
from everstep.capture.gradients import Recorder
from everstep.capture.layout import Subjects
from everstep.capture.life import Life
from everstep.capture.snapshot import Capture
from everstep.capture.steering import Steering
from everstep.errors import EverstepError, Restart
from everstep.keeper.client import Answers, KeeperClient
from everstep.signals import Signals
from everstep.types import Level

_ALL_HEAR = 2  # steps at least until every rank has heard what one of them says,
_HEARD_S = 0.05  # and seconds,
_FAR_HEARD_S = 0.5  # on other nodes; twice as many after it was heard too late,
_LONGEST_HEARD_S = 4.0  # up to so many
_RECENT = 8  # steps of which the shortest counts
_DEEPEST_S = 600.0  # that the end of a run waits for its deepest tier
_LOOK_S = 0.2  # between two looks whether what is waited for can still come
_AGAIN_S = 0.01  # until what was skipped is taken again


class Keeping:
    def __init__(
        self,
        subjects: Subjects,
        life: Life,
        keeper: KeeperClient,
        tree: Callable[[], dict[str, Any]],
        *,
        left: list[Arena],
        rings: list[Arena],
        resumed_from: int | None,
        resumed_base: int | None,
        is_followed: bool,
    ) -> None:
        """`tree`: all that is not a tensor, as of now. `left`, `rings`: what an earlier life has left in memory."""
        self._subjects, self._life, self._keeper, self._tree = subjects, life, keeper, tree
        self._is_restored = resumed_base is not None
        self.capture = Capture(
            subjects, life, left=left, resumed_from=resumed_from, resumed_base=resumed_base, leased=set(keeper.leased)
        )
        self._steering = Steering(
            subjects, self.capture, life, had_log=resumed_base not in (None, resumed_from), is_followed=is_followed
        )
        compressor = subjects.compressor
        self.compression = Compression(subjects, compressor) if compressor is not None else None
        self.last_step: int | None = None  # that was taken in this life,
        self._last_at = 0.0
        self.has_last = False  # the last step of all is in memory
        self._base_steps: set[int] = set()  # at which all ranks take a base, because one of them needs it
        self._asked_for = -1  # the newest such step that this rank has asked for,
        self._needs_base = False  # and whether it still needs one
        self._led_to = -1  # the last step before the newest gap in the records; -1: there was none
        self._heard_s = _FAR_HEARD_S if life.topology.has_many_nodes else _HEARD_S
        self._steps_s = deque[float](maxlen=_RECENT)
        self.recorder = self._begin_log(rings, resumed_from)

    def _begin_log(self, rings: list[Arena], resumed_from: int | None) -> Recorder | None:
        """The rings of an earlier life are gone on with, or held until bases have taken their place."""
        if self._steering.strategy == "log":
            recorder = self._make_recorder(rings, resumed_from)
            if resumed_from is not None:  # the chain goes on with the very next step
                shape = self.capture.prepare(len(trees.encode(self._tree(), "state")))
                self.capture.leave_behind(recorder.prepare(shape))
            return recorder
        for ring in rings:
            ring.unseal_after(resumed_from)
        self.capture.leave_behind(rings)
        return None

    def _make_recorder(self, rings: list[Arena], since: int | None) -> Recorder:
        return Recorder(self._subjects, self._life, left=rings, resumed_from=since, compression=self.compression)

    def listen(self, signals: Signals) -> None:
        """Be ready for what the keeper says."""
        self._keeper.listen_with(
            Answers(
                lease=self.capture.lease,
                release=self.capture.release,
                stop_at=signals.stop_at,
                base_at=self.take_base_at,
                halt=signals.hear_halt,
            )
        )

    # -- at a cut

    def at_cut(self, step: int, step_s: float, *, must: bool, leaves: bool = False) -> None:
        """A step is done. `must`: it is to be taken even if none is due. `leaves`: all ranks do, after it.

        Then records alone are not enough: those of another rank may have a gap, and nobody would be there to end it.
        """
        self._steering.at_cut(step_s, self.recorder)
        self._steps_s.append(step_s)
        if not self._turn(step) and (must or leaves or self._is_due(step)):
            self.take(step, base=self._steering.all_need_base or (leaves and self._life.topology.world > 1))
        if self.compression is not None:
            self.compression.end_step()
        self._life.moments.kept(step)

    def _is_due(self, step: int) -> bool:
        if self.recorder is not None:
            return True  # a chain has no gaps
        settings = self._life.settings
        if not settings.capture.due(step, time.monotonic(), self.last_step, self._last_at):
            return False
        return settings.mode != "disk" or self.last_step is None or self._keeper.durable_step >= self.last_step

    def take(self, step: int, *, base: bool = False) -> None:
        """Keep the present step: by a record if there is one and it leads anywhere, else by a base.

        With several nodes the first of a life is a base: nodes may be new, and have none that records could follow.
        """
        base |= self.last_step is None and self._life.topology.has_many_nodes
        heard = {one for one in list(self._base_steps) if one <= step}
        self._base_steps.difference_update(heard)
        base |= step in heard
        is_late = bool(heard) and not base  # others have taken a base there, and may soon have no other
        if is_late:
            self._heard_s = min(2 * self._heard_s, _LONGEST_HEARD_S)
        self.last_step, self._last_at = step, time.monotonic()
        tree = self._tree()
        if self.recorder is None:
            self.capture.cut(step, trees.encode(tree, "state"))
            return
        self.capture.raise_failure()
        if (self.capture.sealed_step or -1) < self.recorder.whole_since:
            self.capture.wait_sealed()  # records that follow a base are worth nothing before it is sealed
        if self.recorder.cut_step != step:  # the last step is taken once more when a run ends
            is_whole = self._is_whole
            if not self.recorder.cut(step, tree) and is_whole:
                self._led_to = step - 1
        base |= step - self.capture.base_step >= self._steering.steps_per_base
        has_ended = self.capture.base_step < self.recorder.whole_since
        if has_ended and not base and self.recorder.ended_full and self._life.topology.world > 1:
            self._ask_for_base(step)  # one of this rank alone would only take the place of one that all have
        elif base or has_ended:
            self.capture.cut(step, trees.encode(tree, "state"))
            self._prepare(self.recorder)
            self._needs_base = False
            if has_ended and self.recorder.begins:  # a keeper that is there already may have just written one
                self._keeper.persist(step, as_base=True)  # records lead nowhere on the disk before it is there
        if is_late or self.recorder.needs_base(max(self._base_steps, default=self.capture.base_step)):
            self._ask_for_base(step)

    def _ask_for_base(self, step: int) -> None:
        """A rank must not go over to a base alone: neither would lead on from there with the records of the others.

        So it waits, as all do, for the keeper to name the step: a word that does not reach the keeper reaches nobody.
        Inline keepers know of no other rank. What is not heard at all is told when the ranks next decide together.
        """
        if self._life.topology.world == 1:
            self.take_base_at(step + 1)
            return
        self._needs_base = True
        if step > self._asked_for and not self._base_steps and self._life.settings.keeper != "inline":
            self._asked_for = step + max(_ALL_HEAR, ceil(self._heard_s / max(min(self._steps_s, default=1.0), 1e-3)))
            self._keeper.base_at(self._asked_for)

    def take_base_at(self, step: int) -> None:
        """All ranks take a base at this step, if they hear of it in time."""
        self._base_steps.add(step)  # the keeper says so while the training thread looks at it

    def take_again(self, step: int) -> None:
        """What this life begins with, as a base of its own, if it is not safe yet. No step was done: it has no record.

        A node that came back empty protects nobody, and has nothing of what was restored; what was not restored, but is
        there since the life before, is nowhere else.
        """
        is_protected = self._life.topology.has_many_nodes and self._life.settings.tiers.protection is not None
        if is_protected or not self._is_restored:
            self.capture.cut(step, trees.encode(self._tree(), "state"))
        if is_protected:
            self._keeper.persist(step, as_base=True, level=Level.PROTECTED)

    def _prepare(self, recorder: Recorder) -> None:
        """A base was taken: the next steps can be recorded."""
        assert self.capture.shape is not None
        if not recorder.fits(self.capture.shape):
            self.capture.wait_sealed()  # the step before has neither: its base was skipped, being of another shape
        self.capture.leave_behind(recorder.prepare(self.capture.shape))

    def _turn(self, step: int) -> bool:
        """Turn to a log or away from it, if it is time to; on a base, so that nothing is less safe on the way."""
        keeper = self._keeper
        if not self._steering.decide(
            step, self.recorder, keeper.base_write_s, keeper.record_write_s, needs_base=self._needs_base
        ):
            return False
        self.take(step, base=True)
        if self.recorder is not None:
            self.recorder.wait_sealed()  # nobody asks it again what went wrong
            self.capture.leave_behind(self.recorder.close())
            keeper.detach_rings()
            self.recorder = None
        else:
            self.recorder = self._make_recorder([], None)  # which has recorded nothing,
            self.recorder.whole_since = step  # and leads on from this base
            self._prepare(self.recorder)
            keeper.persist(step, as_base=True)  # records lead nowhere on the disk before it is there
        return True

    # -- asking and ending

    @property
    def kept_step(self) -> int | None:
        """The newest step that survives this process."""
        recorded = self.recorder.recorded_step if self.recorder is not None else None
        if recorded is not None and not self._is_whole:
            recorded = min(recorded, self._led_to)
        return max((s for s in (self.capture.sealed_step, recorded) if s is not None), default=None)

    @property
    def is_kept(self) -> bool:
        """Whether the last step that was taken does: not if it was skipped, or lies behind a gap in the records."""
        return self.last_step is None or (self.kept_step or -1) >= self.last_step

    @property
    def _is_whole(self) -> bool:
        """Whether the newest records lead on from a base, and not from a gap that only the next base will close."""
        recorder, sealed = self.recorder, self.capture.sealed_step
        return recorder is None or self._led_to < 0 or (sealed is not None and sealed >= recorder.whole_since)

    def wait_sealed(self) -> None:
        """Until every step that was taken survives this process."""
        try:
            self.capture.wait_sealed()
        finally:  # a base that failed takes no record with it
            if self.recorder is not None:
                self.recorder.wait_sealed()

    def status(self) -> dict[str, object]:
        arena = self.capture.arena()
        return {
            "sealed_step": self.kept_step,
            "durable_step": self._keeper.durable_step if self._keeper.durable_step >= 0 else None,
            "trouble": self._keeper.trouble,
            "arena": arena.place if arena is not None else None,
            "arena_bytes": arena.slot_bytes * len(arena.slots) if arena is not None else 0,
            **self._steering.status(),
            "stall_s": self.capture.stall_s,
        }

    def take_last(self, step: int) -> None:
        """As a base, though one may be skipped: of a state that changed its shape, or while a flush reads a slot."""
        self.take(step, base=True)
        self.wait_sealed()
        while (self.capture.sealed_step or -1) < step:
            time.sleep(_AGAIN_S)
            self.take(step, base=True)
            self.wait_sealed()
        self.has_last = True

    def make_sure(self, step: int) -> None:
        """The present step survives this process, which is about to end."""
        self.wait_sealed()
        if not self.is_kept:
            self.take_last(step)

    def bring_down(self, step: int, why_hopeless: Callable[[], str] | None) -> None:
        """The last base, that of all ranks, as deep as it goes; then its memory is let go.

        `why_hopeless`: says why it will never be there, once that is so.
        """
        keeper, settings = self._keeper, self._life.settings
        while not self.wait_durable(step, None if why_hopeless is None else _LOOK_S, as_base=True):
            reason = why_hopeless() if why_hopeless is not None else ""
            if reason:
                raise Restart(f"{reason}. Step {step}, the last, is not durable yet: a restart of the job ends it")
        if settings.tiers.deeper and not keeper.wait_for(Level.SHARED, step, _DEEPEST_S, as_base=True):
            raise EverstepError(
                f"step {step} is durable, but the deepest tier did not take it within {_DEEPEST_S:.0f} s; see the "
                f"keeper's events. When the tier is back, `everstep scavenge {settings.directory}` brings it there."
            )
        self.capture.let_go()

    def wait_durable(self, step: int, timeout_s: float | None = None, *, as_base: bool = False) -> bool:
        """For the last step of a process. If the keeper complains, whoever reads it is told what is not lost."""
        try:
            return self._keeper.wait_durable(step, timeout_s, as_base=as_base)
        except EverstepError as error:
            if not self.capture.outlives_process:
                raise
            where = f"Step {step} is in memory: started again on this machine, the program goes on from there."
            raise EverstepError(f"{str(error).rstrip('.')}. {where}") from None

    def close(self) -> list[Arena]:
        """Touch the program's objects no more. Returns the rings, which somebody needs until a base is safe."""
        with ExitStack() as others:  # whatever goes wrong with one of them
            others.callback(self.capture.close)
            if self.compression is not None:
                others.callback(self.compression.close)
            return self.recorder.close() if self.recorder is not None else []

    def end_life(self) -> None:
        """Before another life begins in this process: nobody looks into the memory of this one any more."""
        for arena in (*self.close(), *self.capture.held()):
            arena.close()
