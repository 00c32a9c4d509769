"""What is called around optimizer.step(), and what is done about steps around which nothing can be called.

A hook waits for copies and launches some, so a compiler must call it as it is and not take it apart. A CUDA graph that
has the update in it repeats it without any hook: copies could be overtaken, and no step would be seen. That is refused:
when such a graph is recorded, or, if that was before guard(), when parameters change and nobody was seen to step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from everstep.capture.digest import added, digest, number
from everstep.capture.layout import Subjects
from everstep.capture.sharded import local_of
from everstep.errors import Misuse

_ADVICE = (
    "Everstep sees a step by the hooks of its optimizer, and a CUDA graph repeats none of them. Record forward and "
    "backward (torch.cuda.make_graphed_callables, torch.compile) and leave optimizer.step() out of the graph."
)
_MANY_CUTS = 64  # without a step, after one was seen: more than most loops accumulate gradients

Hook = Callable[..., None]


def around_step(optimizer: torch.optim.Optimizer, before: Hook, after: Hook | None = None) -> list[RemovableHandle]:
    """Call `before` and `after` with what torch gives such hooks."""

    def checked(*args: Any) -> None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise Misuse(f"optimizer.step() is being recorded into a CUDA graph. {_ADVICE}")
        before(*args)

    handles = [optimizer.register_step_pre_hook(torch.compiler.disable(checked))]
    if after is not None:
        handles.append(optimizer.register_step_post_hook(torch.compiler.disable(after)))
    return handles


class Unseen:
    """Asked at every cut before which no optimizer was seen to step, as when gradients are accumulated."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        self._cuts, self._looks_at = 0, 1
        self._bits: int | None = None

    def stepped(self) -> None:
        self._cuts, self._looks_at, self._bits = 0, _MANY_CUTS, None

    def look(self) -> None:
        """Compare parameters with what they were at the last look; each look comes after twice as many cuts."""
        self._cuts += 1
        if self._cuts < self._looks_at:
            return
        self._looks_at = 2 * self._cuts
        before, self._bits = self._bits, self._digest()
        if before not in (None, self._bits):
            raise Misuse(f"parameters change, but no optimizer was seen to step, so nothing is kept. {_ADVICE}")

    def _digest(self) -> int:
        groups = [group for optimizer in self._subjects.optimizers for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        return number(added(digest(str(i), local_of(parameter)) for i, parameter in enumerate(parameters)))
