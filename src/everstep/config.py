"""What a user may choose, as small frozen values that check themselves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, get_args

from everstep.cadence import Every, seconds
from everstep.errors import BadConfig
from everstep.tiers import Tier, Tiers, choose

Mode = Literal["host", "device", "direct", "disk"]
Strategy = Literal["auto", "snapshot", "log", "replica"]
KeeperKind = Literal["process", "inline"]
Policy = Literal["spare", "forward", "rollback", "restart"]
Batch = Literal["redistribute", "shrink"]

_TAKES = {
    "scaler": ("a torch.amp.GradScaler", "leave it out if there is none"),
    "compress": ("TopK(...), Int8(), Bf16() or PowerSGD(...)", "make one, such as everstep.compress.TopK(0.01)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which checkpoints stay on a disk: the newest `last`, and the first one at or after each multiple of `every`.

    So `every=1000` keeps the first that is written from step 1000 on, the first from 2000 on, and so forth, whenever
    they are written; `every=1` keeps all.
    """

    last: int = 2
    every: int | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.last):
            raise BadConfig(f"Keep(last=) takes a number from 1, not {self.last!r}: the last one is never deleted")
        if self.every is not None and not _is_count(self.every):
            raise BadConfig(f"Keep(every=) takes a number of steps from 1, or None, not {self.every!r}")


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
    tiers: Tiers = field(default_factory=Tiers)
    keep: Keep = field(default_factory=Keep)
    strict: bool = True
    keeper: KeeperKind = "process"
    linger_s: float = 60.0
    on_loss: tuple[Policy, ...] = ()
    batch: Batch = "redistribute"
    detect_s: float = 10.0
    mtbf_s: float | None = None

    def __post_init__(self) -> None:
        for name, count in (("epochs", self.epochs), ("steps", self.steps)):
            if count is not None and not _is_count(count):
                raise BadConfig(f"{name} must be None or a whole number from 1, not {count!r}")
        if not _is_share(self.overhead_budget):
            raise BadConfig(f"overhead_budget must be a share between 0 and 1, not {self.overhead_budget!r}")
        if self.strategy not in get_args(Strategy):
            raise BadConfig(f"strategy must be one of {', '.join(get_args(Strategy))}, not {self.strategy!r}")
        if self.mode not in ("host", "device", "direct", "disk"):
            raise BadConfig(f"mode must be 'host', 'device', 'direct' or 'disk', not {self.mode!r}")
        if self.mode == "direct" and self.tiers.memory.path is None:
            raise BadConfig("mode='direct' needs tiers=[Memory(path=...)] with a path on the persistent memory")
        if self.keeper not in ("process", "inline"):
            raise BadConfig(f"keeper must be 'process' or 'inline', not {self.keeper!r}")
        for policy in self.on_loss:
            if policy not in get_args(Policy):
                raise BadConfig(f"on_loss takes {', '.join(get_args(Policy))}, not {policy!r}")
        if self.batch not in get_args(Batch):
            raise BadConfig(f"batch must be one of {', '.join(get_args(Batch))}, not {self.batch!r}")
        if self.on_loss and self.keeper == "inline":
            raise BadConfig("on_loss needs keeper='process': a thread of a lost rank can tell nobody")
        if self.detect_s <= 0:
            raise BadConfig(f"detect_timeout must be more than nothing, not {self.detect_s} s")
        if self.mtbf_s is not None and self.mtbf_s <= 0:
            raise BadConfig(f"mtbf must be more than nothing, not {self.mtbf_s} s")


def settings(
    directory: str | Path,
    *,
    lose_at_most: int | str,
    tiers: Sequence[Tier] | str | Path | None,
    keep: int | Keep,
    mode: Mode,
    on_loss: Policy | Sequence[Policy],
    mtbf: str | None = None,
    **rest: object,
) -> Settings:
    if not isinstance(directory, str | Path):
        raise BadConfig(f"dir must be a path such as 'runs/gpt2', not {directory!r}")
    if isinstance(keep, bool) or not isinstance(keep, int | Keep):
        raise BadConfig(f"keep must be a number or Keep(...), not {keep!r}")
    if not isinstance(on_loss, Iterable):
        raise BadConfig(f"on_loss takes {', '.join(get_args(Policy))}, one or a list, not {on_loss!r}")
    return Settings(
        directory=Path(directory).absolute(),
        capture=Every.parse(lose_at_most, name="lose_at_most"),
        tiers=choose(tiers, os.environ),
        keep=Keep(last=keep) if isinstance(keep, int) else keep,
        mode=mode,
        on_loss=(on_loss,) if isinstance(on_loss, str) else tuple(on_loss),
        mtbf_s=None if mtbf is None else seconds(mtbf, name="mtbf"),
        **rest,  # type: ignore[arg-type]
    )


def check_kinds(loader: object, scheduler: object, **given: tuple[object, type]) -> None:
    """Arguments of guard() that may be left out; others than the first two with their types: nothing here loads torch.

    The loader is not asked for an iterator: some can give one only once.
    """
    for name, value in (("loader", loader), *(("scheduler", one) for one in _each(scheduler))):
        if isinstance(value, type):
            raise BadConfig(f"{name} takes an object, not the class {value.__name__}; make one: {value.__name__}(...)")
    if loader is not None and not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise BadConfig(f"loader must be something to iterate, or None for loops that call run.done(), not {loader!r}")
    for name, (value, kind) in given.items():
        if value is not None and not isinstance(value, kind):
            wanted, way = _TAKES[name]
            raise BadConfig(f"{name} takes {wanted}, not {value!r}; {way}")


def _each(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else [value]


def _is_count(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


def _is_share(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and 0 < float(value) < 1
