"""The door a training loop walks in by.

`guard()` checks everything, restores the past if there is one, and returns a `Run`. Iterating the run yields batches;
each time the loop asks for the next batch after an optimizer has stepped, a cut is made and the state is captured.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from everstep import notebook, topology
from everstep.cadence import seconds
from everstep.capture import extras as trees
from everstep.capture.compressor import Compressor
from everstep.capture.life import Life
from everstep.capture.moments import Moments
from everstep.capture.position import Feed
from everstep.capture.reserve import Reserve
from everstep.capture.steering import followed
from everstep.config import Batch, Keep, KeeperKind, Mode, Policy, Settings, Strategy, check_kinds, settings
from everstep.errors import BadConfig, Damaged, EverstepError, Restart, RunOver
from everstep.events import Closed, Degraded, EventLog, Finished, Halted, Started, Stopping, say
from everstep.keeper.arrival import arrive, check, check_level
from everstep.keeper.client import KeeperClient
from everstep.keeper.keeping import Keeping
from everstep.launch import is_spare
from everstep.live.forward import Forward
from everstep.live.loop import Carried, LiveStep, live_steps, stand_by
from everstep.live.presence import Presence
from everstep.live.regroup import regroup, weigh
from everstep.recover.resume import resume
from everstep.recover.state import State, as_list, stateful_list
from everstep.recover.survey import Sources
from everstep.signals import Signals
from everstep.store import claim, rewinds
from everstep.store.places import Places
from everstep.tiers import Tier
from everstep.timeline import Timeline, timeline_of_rank
from everstep.types import Level


def guard(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loader: object = None,
    *,
    dir: str | Path,
    scheduler: object = None,
    scaler: object = None,
    extra: Mapping[str, object] | None = None,
    epochs: int | None = 1,
    steps: int | None = None,
    lose_at_most: int | str = 1,
    overhead_budget: float = 0.03,
    mtbf: str | None = None,
    strategy: Strategy = "auto",
    compress: Compressor | None = None,
    tiers: Sequence[Tier] | str | Path | None = None,
    keep: int | Keep = 2,
    strict: bool = True,
    mode: Mode = "host",
    keeper: KeeperKind = "process",
    linger: str = "60s",
    on_loss: Policy | Sequence[Policy] = (),
    batch: Batch = "redistribute",
    detect_timeout: str = "10s",
) -> Run:
    """Guard a training loop; resumes by itself if the directory has a past.

    model, optimizer, scheduler: one or a list. loader: what the run iterates, or None for loops that call run.done().
    extra: names of anything with state_dict/load_state_dict, or plain trees of numbers, strings, bytes and tensors; on
    resume plain values are put back under their names. lose_at_most: steps, or a duration such as "30s".
    overhead_budget: the share of the training time that this may cost. mtbf: between two failures, such as "6h", if
    known; else what the run has seen. strategy: "snapshot" (a base each time), "log" (a base now and then, and what the
    optimizers consumed in every step), or "auto": what is measured to cost less. mode: where captures land: "host"
    memory, spare "device" memory first, "direct" into Memory(path=...), or "disk" (as often as the disk takes them).
    keep: how many checkpoints stay on disk, or Keep(last=, every=). linger: how long the keeper holds memory for a
    restart. on_loss: what run.live() does when a rank is lost, the first that can be done: "spare" (another takes its
    place), "forward" (the others finish the step without it: lossy), "rollback" (they do it again), "restart". batch:
    with fewer ranks "redistribute" (the global batch stays) or "shrink". detect_timeout: until a hung rank is lost.
    """
    chosen = settings(
        dir, lose_at_most=lose_at_most, overhead_budget=overhead_budget, strategy=strategy, tiers=tiers, keep=keep,
        mode=mode, strict=strict, epochs=epochs, steps=steps, keeper=keeper, linger_s=seconds(linger, name="linger"),
        on_loss=on_loss, batch=batch, detect_s=seconds(detect_timeout, name="detect_timeout"), mtbf=mtbf,
    )  # fmt: skip
    check_kinds(loader, scheduler, scaler=(scaler, torch.amp.GradScaler), compress=(compress, Compressor))
    state = State(
        models=as_list(model, nn.Module, "model"), optimizers=as_list(optimizer, torch.optim.Optimizer, "optimizer"),
        schedulers=stateful_list(scheduler, "scheduler"), scaler=scaler, extra=extra, compressor=compress,
    )  # fmt: skip
    return Run(state, loader, chosen)


class Run:
    """A guarded training run. Iterate it for batches, or call done() after each step."""

    def __init__(self, state: State, loader: Any, chosen: Settings) -> None:
        self.settings, self.step = chosen, 0
        self.resumed_from: int | None = None
        self._resumed_base: int | None = None
        self._left_at = 0  # the step at which a life was ended by a loss
        self._state, self._loader, self._step_s = state, loader, 0.0
        self._finished = self._had_finished = False  # now, or in an earlier life
        self._closed = self._is_between = self.is_iterated = False  # between: a life was ended, and none has begun
        self._random: dict[str, Any] | None = None
        self._places = Places.chosen(chosen.directory, chosen.tiers)
        claim.make(self._places)
        if notebook.make_way(chosen.directory):
            state.forget_gradients()
        self._presence = Presence(chosen, state.subjects) if chosen.on_loss else None
        self._forward = Forward.chosen(chosen, state.subjects, self._presence, state.reductions.are_settled)
        with ExitStack() as self._life:  # a refusal lets go of what was begun: whoever hears it may call again
            if is_spare(os.environ):
                self._signals = Signals(lambda: self._step_s, stands_by=True)
                stand_by(self, self._presence, self._forward)
            else:
                self._begin()
                state.tell_loose_ends(self._emit)
                self._signals = Signals(lambda: self._step_s)
                self._listen()
            self._life = self._life.pop_all()
        atexit.register(self._at_exit)
        notebook.begun(self, chosen.directory)

    # -- beginning

    def _begin(self, carried: Carried | None = None) -> None:
        """Begin a life: all ranks of a job, or of a view, together. `carried`: with the state as it is."""
        chosen, state = self.settings, self._state
        place = self._place = topology.here()
        check(chosen, place)
        seats = chosen.batch if self._presence is not None else "shrink"
        self._feed = Feed.of(self._loader, place, seats) if self._loader is not None else None
        self._emit = EventLog.of_rank(chosen.directory, place.rank, speaks=place.is_leader)
        self._claim = claim.take(self._places, place, self._emit)
        self._life.callback(self._claim.give_back)
        timeline = self._timeline = Timeline(timeline_of_rank(chosen.directory, place.rank))
        self._life.callback(timeline.close)
        reserve = self._life.enter_context(Reserve(chosen, place))
        source = self._restore(reserve) if carried is None else self._carry(carried)
        replica = followed(state.subjects, self._emit) if chosen.strategy == "replica" else ""
        self._keeper = KeeperClient(chosen.keeper, self._claim.run, chosen.directory, self._emit, timeline.mark)
        self._life.callback(self._keeper.close, final=False)
        generation = self._generation = arrive(
            self._keeper, chosen, place, self._claim, self._emit, resumed_from=self.resumed_from, replica=replica,
        )  # fmt: skip
        left, rings = self._sources().left_to(place, is_followed=bool(replica))
        self._moments = Moments(timeline.mark, step=self.step, optimizers=len(state.subjects.optimizers))
        life = Life(
            run=self._claim.run, generation=generation, topology=place, settings=chosen, emit=self._emit,
            attach=self._keeper.attach, moments=self._moments, failures=self._emit.failures(), reserve=reserve,
        )  # fmt: skip
        self._keeping = Keeping(
            state.subjects, life, self._keeper, self._tree, left=left, rings=rings, resumed_from=self.resumed_from,
            resumed_base=self._resumed_base, is_followed=bool(replica),
        )  # fmt: skip
        self._life.callback(self._keeping.end_life)
        rewinds.forget(self._places.disk_tier(), self._emit)
        self._capture = self._keeping.capture
        reserve.end_pinning()  # the program may record a CUDA graph from now on
        self._emit(Started(rank=place.rank, world=place.world, pid=os.getpid(), step=self.step, source=source))

    def _listen(self) -> None:
        """Be ready for what the keeper says."""
        tell = None if self._place.world == 1 else self._keeper.stop_at
        self._signals.join(tell, leaves_alone=self._presence is not None)
        self._keeping.listen(self._signals)
        if self.resumed_from is not None and not self._finished:
            self._keeping.take_again(self.step)
        if self._presence is not None:
            self._presence.enrol(self._claim.run, self._generation, self._place)
            weigh(self._state.subjects, self._feed)

    def _sources(self) -> Sources:
        return Sources(self._places, self._claim.run, is_common=self._claim.disk_is_common)

    def _restore(self, reserve: Reserve) -> str:
        with self._sources() as sources:
            resumed = resume(
                sources, self._state, self._feed, self._place, strict=self.settings.strict, emit=self._emit,
                mark=self._timeline.mark, reserve=reserve,
            )  # fmt: skip
        if resumed is None:
            return "nothing"
        latest = resumed.latest
        self.step = self.resumed_from = latest.step
        self._finished = self._had_finished = self._is_finished(latest.extras["finished_at"])
        if self._place.rank == 0 and not self._is_between:
            resumed.tell(self.settings.directory, is_over=self._finished)
        self._random = latest.extras["random"] if latest.own else None
        if self._random is not None:
            trees.set_random_state(self._random)
        self._resumed_base = resumed.base
        return resumed.source

    def _carry(self, carried: Carried) -> str:
        self._state.reductions.restore(carried.reductions, self._place, self._emit)
        assert self._feed is not None
        self._feed.restore(carried.position)
        self.resumed_from, self._resumed_base = self.step, None
        return "those who were left"

    def _is_finished(self, limits: list[int | None] | None) -> bool:
        """Whether the run had come to its end, unless it may now go further. If one rank had, all have."""
        mine = limits == [self.settings.epochs, self.settings.steps]
        return b"1" in topology.exchange(b"1" if mine else b"0", self._place)

    # -- the loop

    @property
    def epoch(self) -> int:
        return self._feed.epoch if self._feed is not None else 0

    def __iter__(self) -> Iterator[Any]:
        feed = self._feed
        if feed is None:
            raise BadConfig("this run was made without a loader; call run.done() after each step instead of iterating")
        if self._closed:
            raise RunOver(self.step)
        self.set_random()
        self.is_iterated = True
        while not self._closed and not self._is_over(feed):
            try:
                batch = feed.next_batch()
            except StopIteration:
                feed.end_pass()
                continue
            self._moments.given()
            yield batch
            self._cut()
        self.finish()

    def _is_over(self, feed: Feed) -> bool:
        limits = [(self.step, self.settings.steps), (feed.epoch, self.settings.epochs)]
        return self._finished or any(limit is not None and done >= limit for done, limit in limits)

    def set_random(self) -> None:
        """For loops that call done(): the random state as it was saved, whatever has moved it since guard()."""
        if self._random is not None:
            trees.set_random_state(self._random)
            self._random = None

    def done(self) -> bool:
        """Mark the cut by hand, for loops that do not iterate the run. True once `steps` steps are done."""
        if self._closed:
            raise RunOver(self.step)
        self._cut()
        return self.settings.steps is not None and self.step >= self.settings.steps

    def _cut(self) -> None:
        if self._closed or not self._capture.take_step():
            return
        self.step += 1
        self._state.reductions.settle()
        if self._forward is not None and self._forward.is_under_way:
            return  # the next life begins by keeping what there is
        self._step_s = self._moments.cut(self.step)
        is_last = self._signals.is_last(self.step)
        self._keeping.at_cut(self.step, self._step_s, must=self.step == self.settings.steps, leaves=is_last)
        if is_last:
            self._leave()

    def _tree(self) -> dict[str, Any]:
        return {
            **self._state.tree(),
            "step": self.step,
            "finished_at": [self.settings.epochs, self.settings.steps] if self._finished else None,
            "position": self._feed.position() if self._feed is not None else None,
            "random": trees.random_state(),
        }

    def finish(self) -> None:
        """The training is over: make its last state durable, and let the memory go. Called by itself when iterated."""
        if self._closed:
            return
        self._finished = True
        if self._presence is not None:  # whoever is lost before all have their last step in memory is missed by all
            if self._forward is None or not self._forward.is_under_way:  # else another life begins before the end
                self._take_last()
            topology.exchange(b"", self._place)
            self._presence.set_free()  # nobody waits for it any more
        self.close()

    def live(self) -> Iterator[LiveStep]:
        """The steps of the loop, each to be entered: `with step as batch`. A lost rank is answered as on_loss says."""
        if self._presence is None or self._feed is None:
            raise BadConfig("run.live() needs guard(..., loader, on_loss=[...])")
        return live_steps(self, self._presence, self._forward)

    def end_life(self) -> None:
        """For the loop of run.live(): let go of what belongs to the present life; whatever is sealed stays."""
        self._left_at, self._is_between = self.step, True
        self._life.close()
        if self._signals.is_asked:
            raise SystemExit(128 + signal.SIGTERM)

    def carried(self) -> Carried:
        """For the loop of run.live(): what the next life goes on with, if the state stays as it is."""
        assert self._feed is not None
        return Carried(self._feed.position(), self._state.reductions.tree(), self._feed.batch_samples)

    def begin_again(self, carried: Carried | None = None) -> None:
        """For the loop of run.live(): begin a life in the present group; `carried`: with the state as it is."""
        regroup(self._state.subjects, self._loader, keeps_gradients=carried is not None)
        self._state.reductions.forget()
        try:
            self._begin(carried)
        except Damaged as error:
            raise Restart(f"those who are left have no whole checkpoint among them: {error}") from error
        self._had_finished = self._is_between = False  # what is restored may be in memory only: they end it
        self._listen()
        if self.resumed_from is None:
            raise Restart("nothing was sealed yet that those who are left could go on from")

    def tell_went_on(self, presence: Presence, **without: int) -> None:
        self._emit(presence.report(self._place, step=self.step, left_at=self._left_at, **without))

    # -- asking

    def wait(self, level: str = "durable", timeout: float | None = None) -> bool:
        """Wait until the last cut has reached a level. False if it has not, or not in time."""
        wanted = Level.named(level)
        is_taken = self._closed or self.step in (self._keeping.last_step, self.resumed_from)
        if self.step and not self._capture.stepped and not is_taken:
            self._keeping.take(self.step)
        self._keeping.wait_sealed()
        captured, is_kept = self._keeping.kept_step, self._keeping.is_kept
        if wanted is Level.SEALED or captured is None:
            return is_kept
        check_level(wanted, self.settings, self._place)
        return self._keeper.wait_for(wanted, captured, 0.0 if self._closed else timeout) and is_kept

    def cancel(self, level: str = "shared") -> None:
        """Stop what is on its way to deeper tiers, on all nodes; a newer step goes when it is due or waited for."""
        if Level.named(level) is not Level.SHARED:
            raise BadConfig(f"only what is on its way to 'shared' can be cancelled, not {level!r}")
        check_level(Level.SHARED, self.settings, self._place)
        self._keeper.cancel()

    def should_exit(self) -> bool:
        """Whether the step under way, or just made, is the last of all ranks; the run leaves after it."""
        return self._signals.will_leave(self.step + self._capture.stepped)

    def status(self) -> dict[str, object]:
        """Where the run stands, as plain data."""
        return {
            "run": self._claim.run, "directory": str(self.settings.directory),
            "rank": self._place.rank, "world": self._place.world,
            "step": self.step, "epoch": self.epoch, "resumed_from": self.resumed_from,
            **self._keeper.levels(), **self._keeping.status(), "replica": self._keeper.replica_status(self.step),
        }  # fmt: skip

    # -- ending

    def close(self) -> None:
        """Make the last step durable and end. Called by itself when the loop ends."""
        if self._closed or (self._is_between and self.give_up()):
            return
        self._closed = True
        self._capture.tell_uncut()
        is_final = self._finished
        try:
            if self._take_last():
                self._keeping.bring_down(self.step, self._presence.why_hopeless if self._presence else None)
        except Restart:
            is_final = False  # those who are started again end it
            raise
        finally:
            self._release(final=is_final)
        self._emit((Finished if self._finished else Closed)(rank=self._place.rank, step=self.step))
        self._signals.pass_on()

    def _take_last(self) -> bool:
        """Have the last step in memory, as a base. Whether there is one that is not on the disk yet."""
        self.step += (stepped := self._capture.take_step())
        ended = self._finished and not self._had_finished and self.step > 0
        is_new = self._keeping.last_step is not None or stepped or ended
        if is_new and not self._keeping.has_last:
            self._keeping.take_last(self.step)
        return is_new

    def _release(self, *, final: bool) -> None:
        self._closed = True
        atexit.unregister(self._at_exit)
        self._life.pop_all()
        with ExitStack() as others:  # the last one first; whatever goes wrong with one, the others let go, too
            others.callback(self._timeline.close)
            if self._presence is not None:
                others.callback(self._presence.close, final=final)
            others.callback(self._keeper.afterwards, self._claim.give_back)
            others.callback(self._signals.give_back)
            try:
                rings = self._keeping.close()
            finally:
                self._keeper.close(final=final)
            for ring in rings if final and self._keeper.durable_base >= self.step else ():
                ring.remove()  # the last base is on the disk: nobody needs records

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close() if kind is None else self.give_up()

    def give_up(self) -> bool:
        """The loop broke in the middle of a step: what is sealed stands. Whether there was anything to give up."""
        if was_open := not self._closed:
            self._release(final=False)
        return was_open

    def _at_exit(self) -> None:
        """The interpreter ends and nobody closed the run: the keeper takes care of what is sealed."""
        if not self._closed and not self._signals.is_forked:
            self._closed = True
            self._capture.tell_uncut()
            try:
                self._keeping.wait_sealed()
            finally:
                self._keeper.close(final=False)
                if not hasattr(sys, "last_value"):  # the loop was left, and the program ended well
                    self._emit(Closed(rank=self._place.rank, step=self.step))

    def _leave(self) -> None:
        number = self._signals.leave()
        if number is None:  # nobody is in a hurry: as deep as it goes
            self._emit(Halted(rank=self._place.rank, step=self.step, why=self._signals.halt))
            self.close()
            say(f"halted {self._signals.halt}: step {self.step} is kept")
            raise SystemExit(0)
        self._emit(Stopping(rank=self._place.rank, signal=signal.Signals(number).name, step=self.step))
        self._keeper.cancel()  # older steps make way for this one, which the keeper brings deeper when we are gone
        try:
            self._keeping.make_sure(self.step)
            self._keeping.wait_durable(self.step)
        except EverstepError as error:  # whoever sent the signal wants us gone; memory has the step
            self._emit(Degraded(what="left before the last step was durable", reason=str(error)))
        finally:
            self._release(final=False)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
