"""What is to be done to a real run: the `[inject]` part of a scenario. docs/inject.md lists its keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from everstep.checked import Table
from everstep.errors import BadConfig

Deed = Literal["kill", "stop", "slow", "cut", "wipe", "flip", "fill"]
Target = Literal["rank", "node", "keeper"]
Place = Literal["memory", "disk"]
FileKind = Literal["base", "manifest", "commit", "log", "memory"]

ANY = "any"  # of them: drawn with the seed
_TARGETS: dict[Deed, tuple[Target, ...]] = {
    "kill": ("rank", "node", "keeper"), "stop": ("rank", "node", "keeper"), "slow": ("rank", "node", "keeper"),
    "cut": ("rank", "node", "keeper"),
    "wipe": ("node",), "flip": ("rank", "node"), "fill": ("node",),
}  # fmt: skip
_LASTING: tuple[Deed, ...] = ("stop", "slow", "cut", "fill")


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One act. It is due at a step that all ranks have done, or so long after the command was started."""

    do: Deed
    target: Target
    who: str = ANY  # the number of a rank, or the name of a node
    step: int | None = None
    into_s: float = 0.0  # so long after that step was cut
    after_s: float | None = None
    for_s: float | None = None  # None: for good; connections are ended then
    share: float = 0.5  # of its time, that a slow process may run
    wipe: tuple[Place, ...] = ()
    file: FileKind = "base"
    bits: int = 1
    is_drawn: bool = False

    def __str__(self) -> str:
        said = f"{self.do} {self.target} {self.who}"
        if self.do == "slow":
            said += f" to {self.share:.0%}"
        if self.do == "cut":
            said += " off"
        if self.do == "flip":
            said = f"flip {self.bits} bit{'s' * (self.bits > 1)} of a {self.file} of {self.target} {self.who}"
        if self.do == "fill":
            said = f"fill the disk of node {self.who}"
        if self.for_s is not None:
            said += f" for {self.for_s:g} s"
        if self.wipe:
            said += f"{', wipe its' if self.do == 'kill' else ':'} {' and '.join(self.wipe)}"
        return said


@dataclass(frozen=True, slots=True, kw_only=True)
class Inject:
    acts: tuple[Injection, ...]
    seed: int = 0
    patience_s: float = 600.0  # without a finished step, after which the command is ended
    speed: float | None = None  # seconds of the scenario's failures in one of the run; None: none are drawn


def inject_of(table: Table, *, has_failures: bool) -> Inject:
    """Out of the table of a scenario. `has_failures`: it has some that could be drawn."""
    found = Inject(
        acts=tuple(_act(one) for one in table.tables("acts")), seed=table.whole("seed", 0),
        patience_s=table.duration("patience", 600.0, least=1.0),
        speed=table.number("speed", least=1e-6) if "speed" in table else None,
    )  # fmt: skip
    if found.speed is not None and not has_failures:
        raise table.wrong("speed", "left out: the scenario has no failures that could be drawn")
    if not found.acts and found.speed is None:
        raise table.wrong("acts", "a list of tables, each with a do; or speed, to draw the scenario's failures")
    table.done()
    return found


def _act(table: Table) -> Injection:
    deed = cast(Deed, table.word("do", among=get_args(Deed)))
    target, who = _target(table, _TARGETS[deed])
    step, after_s = _moment(table)
    found = Injection(
        do=deed, target=target, who=who, step=step, after_s=after_s,
        into_s=table.duration("into", 0.0) if step is not None else 0.0,
        for_s=table.duration("for", least=1e-3) if deed in _LASTING and "for" in table else None,
        share=table.number("share", 0.5, least=0.01, most=0.99) if deed == "slow" else 0.5,
        wipe=_places(table, deed, target),
        file=cast(FileKind, table.word("file", "base", among=get_args(FileKind))) if deed == "flip" else "base",
        bits=table.whole("bits", 1, least=1, most=1000) if deed == "flip" else 1,
    )  # fmt: skip
    table.done()
    return found


def _target(table: Table, targets: Sequence[Target]) -> tuple[Target, str]:
    named = [target for target in targets if target in table]
    if len(named) > 1:
        raise table.wrong(named[1], f"left out: {named[0]} says already whom it is about")
    if not named and len(targets) == 3:
        raise table.wrong("rank", "a rank or 'any'; or say node or keeper, with the name of a node or 'any'")
    if not named:
        return "node", ANY
    target = named[0]
    if target != "rank":
        return target, table.word(target)
    try:
        return target, str(table.whole("rank"))
    except BadConfig:
        pass  # it may be a word instead
    try:
        return target, table.word("rank", among=(ANY,))
    except BadConfig:
        raise table.wrong("rank", f"a rank from 0, or {ANY!r}") from None


def _moment(table: Table) -> tuple[int | None, float | None]:
    has_step, has_after = "step" in table, "after" in table
    if has_step == has_after:
        raise table.wrong("step", "a step from 1, or after a duration such as '30s'; one of both, and not both")
    return (table.whole("step", least=1), None) if has_step else (None, table.duration("after"))


def _places(table: Table, deed: Deed, target: Target) -> tuple[Place, ...]:
    if deed != "wipe" and not (deed == "kill" and target == "node"):
        return ()
    usual = ["memory"] if deed == "wipe" else []
    return cast(tuple[Place, ...], table.words("wipe", usual, among=get_args(Place)))
