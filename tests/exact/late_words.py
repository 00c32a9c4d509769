"""Two ranks with short steps, one of which has no room for records; what it says of that comes late, or not at all."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from full_ring import take, written
from harness import Trial
from lives import fork_keeper
from parallel import Crossed, batches, told
from torch import nn

from everstep.capture import gradients, room
from everstep.capture.arena import Arena
from everstep.keeper import client
from everstep.keeper.keeping import Keeping
from everstep.keeper.logbook import Logbook
from everstep.keeper.protocol import BaseAt
from everstep.keeper.session import Session

STEPS = 200
LATE_S = 0.15
room._MAX_SLOTS = 64  # type: ignore[attr-defined]  # enough for the other rank, whose records are written
gradients._PATIENCE_S = 0.0
Keeping.take = take  # type: ignore[method-assign]  # without the pause that makes steps long
tell = Session.tell


def deaf(session: Session, message: Any) -> None:
    """Nobody hears where a base is to be taken."""
    if not isinstance(message, BaseAt):
        tell(session, message)


def slow(session: Session, message: Any) -> None:
    """All hear of it when they are past it."""
    if isinstance(message, BaseAt):
        threading.Timer(LATE_S, tell, (session, message)).start()
    else:
        tell(session, message)


def fit(trial: Trial, telling: Any) -> None:
    """Of the records of rank 0 only the first are written."""

    def write(logbook: Logbook, ring: Arena, **options: Any) -> int:
        is_held = ring.rank == 0 and ring.live().step >= 4
        return 0 if is_held else written(logbook, ring, **options)

    def change() -> None:
        Session.tell = lambda session, message: telling(session, message)  # type: ignore[method-assign]

    Logbook.take = write  # type: ignore[method-assign]
    client.start = lambda run, where: fork_keeper(run, where, change)  # type: ignore[assignment]
    model = trial.parallel(Crossed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = trial.guard(model, optimizer, batches(trial), epochs=None, steps=STEPS)
    for x, y in trial.batches(run):
        nn.functional.mse_loss(model(x), y).backward()
        trial.at("backward")
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.002)


@told
def nobody_hears(trial: Trial) -> None:
    fit(trial, deaf)


@told
def all_hear_too_late(trial: Trial) -> None:
    fit(trial, slow)
