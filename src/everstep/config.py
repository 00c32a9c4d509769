"""What a user may choose, as small frozen values that check themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from everstep.errors import BadConfig

Mode = Literal["host", "device", "direct", "disk"]
Strategy = Literal["auto", "snapshot", "log", "replica"]
KeeperKind = Literal["process", "inline"]

MAX_SLOTS = 28  # as many seals as fit on an arena's control page
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str, *, name: str) -> float:
    """'30s', '500ms', '2h' as seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)\s*", text)
    if not match or float(match[1]) <= 0:
        raise BadConfig(f"{name} must be a positive duration such as '30s', '5m' or '2h', not {text!r}")
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True, slots=True)
class Every:
    """A cadence: every so many steps, or every so many seconds."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, value: int | str, *, name: str) -> Every:
        if isinstance(value, str):
            return cls(seconds=seconds(value, name=name))
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadConfig(f"{name} must be a number of steps from 1, or a duration such as '30s', not {value!r}")
        return cls(steps=value)

    def due(self, step: int, now: float, last_step: int | None, last_time: float) -> bool:
        """Whether `step` should be taken, given the last one that was."""
        if last_step is None:
            return True
        if self.steps is not None:
            return step // self.steps > last_step // self.steps
        return now - last_time >= (self.seconds or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The host-memory tier: arenas that outlive the process.

    `path`: where arenas lie; a DAX mount makes them persistent. By default shared memory, or a memfd held by the
    keeper where shared memory is too small. `slots`: by default derived from the number of ranks.
    """

    path: str | None = None
    slots: int | None = None

    def __post_init__(self) -> None:
        if self.slots is not None and not 2 <= self.slots <= MAX_SLOTS:
            raise BadConfig(f"Memory(slots=) must be from 2 to {MAX_SLOTS}, not {self.slots}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The disk tier: the run's directory. `every`: how often the newest step is written, in steps or as a duration.

    By default as often as the disk can take with a tenth of its time, and at most every 15 seconds.
    """

    every: int | str | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            Every.parse(self.every, name="Disk(every=)")

    @property
    def cadence(self) -> Every:
        return Every() if self.every is None else Every.parse(self.every, name="Disk(every=)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which checkpoints stay on a disk: the newest `last`, and every one whose step is a multiple of `every`."""

    last: int = 2
    every: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1:
            raise BadConfig(f"Keep(last=) must be at least 1, not {self.last}: the last checkpoint is never deleted")
        if self.every is not None and self.every < 1:
            raise BadConfig(f"Keep(every=) must be at least 1, not {self.every}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that guard() was told, checked."""

    directory: Path
    epochs: int | None = 1
    steps: int | None = None
    capture: Every = field(default_factory=lambda: Every(steps=1))
    overhead_budget: float = 0.03
    strategy: Strategy = "auto"
    mode: Mode = "host"
    memory: Memory = field(default_factory=Memory)
    disk: Disk = field(default_factory=Disk)
    keep: Keep = field(default_factory=Keep)
    strict: bool = True
    keeper: KeeperKind = "process"
    linger_s: float = 60.0

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise BadConfig(f"epochs must be None or at least 1, not {self.epochs}")
        if self.steps is not None and self.steps < 1:
            raise BadConfig(f"steps must be None or at least 1, not {self.steps}")
        if isinstance(self.overhead_budget, bool) or not 0 < self.overhead_budget < 1:
            raise BadConfig(f"overhead_budget must be a share between 0 and 1, not {self.overhead_budget!r}")
        if self.strategy not in get_args(Strategy):
            raise BadConfig(f"strategy must be one of {', '.join(get_args(Strategy))}, not {self.strategy!r}")
        if self.mode not in ("host", "device", "direct", "disk"):
            raise BadConfig(f"mode must be 'host', 'device', 'direct' or 'disk', not {self.mode!r}")
        if self.mode == "direct" and self.memory.path is None:
            raise BadConfig("mode='direct' needs tiers=[Memory(path=...)] with a path on the persistent memory")
        if self.keeper not in ("process", "inline"):
            raise BadConfig(f"keeper must be 'process' or 'inline', not {self.keeper!r}")


def settings(
    directory: str | Path,
    *,
    lose_at_most: int | str,
    tiers: list[Memory | Disk] | None,
    keep: int | Keep,
    mode: Mode,
    **rest: object,
) -> Settings:
    memory, disk = Memory(), Disk()
    for tier in tiers or ():
        if isinstance(tier, Memory):
            memory = tier
        elif isinstance(tier, Disk):
            disk = tier
        else:
            raise BadConfig(f"tiers takes Memory(...) and Disk(...), not {tier!r}")
    if isinstance(keep, bool) or not isinstance(keep, int | Keep):
        raise BadConfig(f"keep must be a number or Keep(...), not {keep!r}")
    return Settings(
        directory=Path(directory).absolute(),
        capture=Every.parse(lose_at_most, name="lose_at_most"),
        memory=memory,
        disk=disk,
        keep=Keep(last=keep) if isinstance(keep, int) else keep,
        mode=mode,
        **rest,  # type: ignore[arg-type]
    )
