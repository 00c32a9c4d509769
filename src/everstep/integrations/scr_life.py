"""What a job that speaks SCR has its keeper do: which dataset goes where, and how long somebody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable

from everstep.config import Settings
from everstep.errors import EverstepError
from everstep.events import Degraded, Sink
from everstep.integrations.scr_files import FileSlots
from everstep.integrations.slots import begin_life
from everstep.keeper.client import Answers
from everstep.recover.survey import Sources
from everstep.store.claim import Claim
from everstep.topology import Topology
from everstep.types import Level

_LOOK_S = 0.005
_PATIENCE_S = 60.0  # for protection: longer than a keeper tries, and than another takes its place
_NONE = -1


class Keeping:
    """The life of a job from its first dataset on."""

    def __init__(
        self, settings: Settings, place: Topology, claim: Claim, emit: Sink, look: Callable[[], Sources], *,
        newest: int | None,
    ) -> None:  # fmt: skip
        """All ranks must come. `newest`: the number of the newest dataset of all lives before."""
        self._settings, self._place, self._emit = settings, place, emit
        self._keeper, life, left = begin_life(settings, place, claim, emit, look, newest=newest)
        self.slots = FileSlots(life, left, lambda: self.settle(flush=True))
        self.asked_to_stop = False
        self._keeper.listen_with(
            Answers(
                lease=self.slots.lease, release=self.slots.release, stop_at=lambda step, why: self._be_asked_to_stop(),
                base_at=lambda step: None,  # nobody records steps here, so nobody runs out of room for them
                halt=lambda why: self._be_asked_to_stop(),
            )
        )  # fmt: skip
        self._newest = self._flush = _NONE

    def _be_asked_to_stop(self) -> None:
        """By a signal to another rank, or by `everstep halt`; whether to exit all ranks decide together."""
        self.asked_to_stop = True

    def want(self, step: int, *, flush: bool) -> None:
        """Have a dataset that is sealed brought where it belongs."""
        self._newest = step
        if flush:  # before the others: where it was heard of these, it was heard of this
            self._flush = step
            self._keeper.persist(step, as_base=True, level=Level.SHARED)
        if self._is_protected:
            self._keeper.persist(step, as_base=True, level=Level.PROTECTED)
        self._keeper.persist(step, as_base=True)

    @property
    def _is_protected(self) -> bool:
        return self._settings.tiers.protection is not None and self._place.has_many_nodes

    def settle(self, *, flush: bool = False) -> None:
        """Wait until the newest dataset is as safe as it is to be. `flush`: and on the prefix, if it goes there.

        Otherwise only until that has its turn: while one is on its way, the next one that is due waits for it.
        """
        keeper, newest, flushed = self._keeper, self._newest, self._flush
        if newest == _NONE:
            return
        if self._is_protected and not self._await(
            lambda: keeper.protected_step >= newest, lambda: keeper.protected_missed >= newest, _PATIENCE_S
        ):
            self._emit(Degraded(what=f"dataset {newest} is not protected", reason=self._why()))
        elif not self._is_protected:
            self._await(lambda: keeper.durable_base >= newest, lambda: bool(keeper.trouble), _PATIENCE_S)
        if flushed != _NONE and not self._await(
            lambda: keeper.shared_step >= flushed or not (flush or self._awaits_its_turn(flushed)),
            lambda: keeper.shared_missed >= flushed or (newest > flushed and keeper.shared_next > flushed),
            None,
        ):
            self._emit(Degraded(what=f"dataset {flushed} is not on the prefix", reason=self._why()))
        if flush:
            self._flush = _NONE

    def _awaits_its_turn(self, flushed: int) -> bool:
        """Whether nodes have not been told yet to bring it; once they are, the next may be written."""
        return self._newest == flushed and self._keeper.shared_next != flushed

    def _await(self, there: Callable[[], bool], failed: Callable[[], bool], patience_s: float | None) -> bool:
        deadline = None if patience_s is None else time.monotonic() + patience_s
        asked = time.monotonic()
        while not there() and not failed():
            if deadline is not None and time.monotonic() > deadline:
                return False
            if time.monotonic() - asked > 1.0:  # a keeper that has just been born has not heard it
                asked = time.monotonic()
                self.want(self._newest, flush=self._flush == self._newest)
            time.sleep(_LOOK_S)
        return there()

    def _why(self) -> str:
        return self._keeper.trouble or "the keeper gave up; its events, beside these, say why. The next one is tried"

    def finish(self, flush: bool) -> bool:
        """The job ends: the newest dataset durable, and on the prefix where they go. Whether it is."""
        if self._newest == _NONE:
            return True
        self.want(self._newest, flush=flush)
        try:
            self._keeper.wait_durable(self._newest, _PATIENCE_S, as_base=True)
        except EverstepError as error:
            self._emit(Degraded(what=f"dataset {self._newest} is not durable", reason=str(error)))
        self.settle(flush=flush)
        is_there = not flush or self._keeper.shared_step >= self._newest
        if is_there:
            self.slots.let_go()
        return is_there

    def status(self) -> dict[str, object]:
        keeper = self._keeper
        return {
            "durable": _known(keeper.durable_base), "protected": _known(keeper.protected_step),
            "flushed": _known(keeper.shared_step),
            "flushing": _known(self._flush) if keeper.shared_step < self._flush else None,
            "flush_failed": _known(keeper.shared_missed), "trouble": keeper.trouble,
        }  # fmt: skip

    def close(self, *, final: bool) -> None:
        self._keeper.close(final=final)


def _known(step: int) -> int | None:
    return step if step >= 0 else None
