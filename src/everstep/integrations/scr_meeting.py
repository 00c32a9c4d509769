"""All ranks at one call, or all of them told why not.

Every collective call begins with one exchange in which ranks say what they call and what is wrong with it. So whoever
comes with the wrong call brings nobody else to a halt: all ranks raise, nothing has changed, and each can go on.

Phases: `idle` -> `output` -> `idle`, and `idle` -> `restart` -> `idle`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from everstep.errors import Misuse
from everstep.topology import Topology, exchange

Phase = Literal["idle", "output", "restart"]

_WHEN = {"idle": "now", "output": "before complete_output()", "restart": "before complete_restart()"}
_FIRST: dict[tuple[Phase, Phase], str] = {
    ("idle", "output"): "start_output()",
    ("idle", "restart"): "start_restart()",
    ("output", "idle"): "complete_output()",
    ("output", "restart"): "complete_output()",
    ("restart", "idle"): "complete_restart()",
    ("restart", "output"): "complete_restart()",
}


class _Said(msgspec.Struct):
    call: str
    problem: str = ""  # why this call cannot come now
    words: bytes = b""


class Meeting:
    def __init__(self, place: Topology) -> None:
        self._place = place
        self.phase: Phase = "idle"

    def meet(self, call: str, *, phase: Phase, problem: str = "", words: bytes = b"") -> list[bytes]:
        """What all ranks say. Misuse on all of them, before anything has changed, if one cannot call this now."""
        if self.phase != phase:
            problem = f"{call}() cannot come {_WHEN[self.phase]}; call {_FIRST[self.phase, phase]} first"
        mine = msgspec.msgpack.encode(_Said(call, problem, words))
        said = [msgspec.msgpack.decode(one, type=_Said) for one in exchange(mine, self._place)]
        wrong = [f"rank {rank}: {one.problem}" for rank, one in enumerate(said) if one.problem]
        calls = [f"{one.call}()" for one in said]
        if not wrong and len(set(calls)) > 1:
            wrong = [f"all ranks must call the same: {_listed(calls)}"]
        if wrong:
            raise Misuse("; ".join(wrong))
        return [one.words for one in said]

    def meet_with(self, call: str, what: str, mine: object, *, problem: str = "") -> None:
        """The same for a call that all must give the same."""
        given = self.meet(call, phase="idle", problem=problem, words=msgspec.json.encode(mine))
        if len(set(given)) > 1:
            said = _listed([one.decode() for one in given])
            raise Misuse(f"all ranks must give {call}() the same {what}: {said}")

    def troubles(self, problem: str) -> list[str]:
        """What went wrong on any rank."""
        answers = exchange(problem.encode(), self._place)
        return [f"rank {rank}: {answer.decode()}" for rank, answer in enumerate(answers) if answer]


def _listed(said: list[str]) -> str:
    found: dict[str, list[int]] = {}
    for rank, one in enumerate(said):
        found.setdefault(one, []).append(rank)
    return ", ".join(f"rank {', '.join(map(str, ranks))} has {one}" for one, ranks in found.items())
