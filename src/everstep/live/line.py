"""This process's line to its keeper, for as long as it lives: who is lost is heard on it, and who goes on.

A keeper that dies is followed by another, which is told who is here. Nothing is said on the line while all is well.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from everstep.config import Policy
from everstep.errors import KeeperLost
from everstep.keeper.process import start
from everstep.keeper.protocol import Bye, Channel, Charter, Enrol, Free, Lost, Message, Stand, Stuck, View, connect

_AGAIN_S = 0.1  # between two attempts to find a keeper
_GONE_S = 10.0  # without a keeper, after which a spare takes the run for over


class Line:
    def __init__(
        self, run: str, directory: Path, on_loss: tuple[Policy, ...], detect_s: float, lost: Callable[[Lost], None],
        charter: Charter | None = None, unit: int = 1,
    ) -> None:  # fmt: skip
        """`lost`: what is done when somebody is; it is called in a thread of the line.

        `charter`: of the job's council, where it has several nodes. `unit`: how many ranks have the state together.
        """
        self.charter = charter
        self._run, self._directory, self._on_loss, self._detect_s = run, directory, on_loss, detect_s
        self._lost, self._unit = lost, unit
        self._worker = uuid.uuid4().hex
        self._enrolled: Enrol | None = None
        self._standing: Stand | None = None
        self._views: queue.SimpleQueue[View | None] = queue.SimpleQueue()
        self._channel: Channel | None = None
        self._is_over = False

    def enrol(self, *, job: str, view: int, rank: int, world: int) -> None:
        """Be one of these, from now on."""
        self._enrolled = Enrol(
            worker=self._worker,
            job=job, pid=os.getpid(), view=view, rank=rank, world=world, on_loss=self._on_loss,
            detect_s=self._detect_s, unit=self._unit, charter=self.charter,
        )  # fmt: skip
        if self._channel is None:
            self._introduce()
            threading.Thread(target=self._listen, name="everstep-line", daemon=True).start()

    def stand(self, view: int, address: str) -> View | None:
        """Wait for the next view; None if there is nobody left who could call."""
        self._standing = Stand(view=view, address=address)
        self._send(self._standing)
        called = self._views.get()
        while called is not None and called.number <= view:
            called = self._views.get()  # it was called to that one twice
        if called is not None:
            self.charter = called.charter or self.charter
            self.enrol(job=called.job, view=called.number, rank=called.rank, world=called.world)
        self._standing = None
        return called

    def stuck(self, view: int, reason: str) -> None:
        self._send(Stuck(view=view, reason=reason))

    def free(self, view: int) -> None:
        self._send(Free(view=view))

    def close(self, *, final: bool) -> None:
        """In good order. `final`: the loop is over, so nobody is to take this process for lost."""
        self._is_over = True
        self._send(Bye(final=final))
        if self._channel is not None:
            self._channel.close()

    def _send(self, message: Message) -> None:
        try:
            if self._channel is not None:
                self._channel.send(message)
        except KeeperLost:
            return  # the listening thread introduces us to the next keeper

    def _introduce(self) -> bool:
        """Find a keeper. A spare starts one only if the run is on other nodes: else there is no run to join."""
        assert self._enrolled is not None
        began = time.monotonic()
        while not self._is_over:
            channel = connect(self._run)
            is_spare = self._enrolled.rank < 0
            if channel is None and (not is_spare or self.charter is not None):
                start(self._run, self._directory)
                channel = connect(self._run)
            if channel is not None:
                try:
                    channel.send(self._enrolled)
                    if self._standing is not None:
                        channel.send(self._standing)
                    self._channel = channel
                    return True
                except KeeperLost:
                    channel.close()
            if is_spare and time.monotonic() - began > _GONE_S:
                return False
            time.sleep(_AGAIN_S)
        return False

    def _listen(self) -> None:
        while not self._is_over:
            heard = self._channel.receive() if self._channel is not None else None
            if heard is None:
                if not self._is_over and not self._introduce():
                    self._views.put(None)
                    return
                continue
            match heard[0]:
                case Lost():
                    self._lost(heard[0])
                case View():
                    self._views.put(heard[0])
                case Bye():  # the run is over
                    self._views.put(None)
                    return
