"""Where checkpoints go: the tiers that a user may choose, in Python, in `everstep.toml` or on a command line.

Each is a small frozen value that checks itself. The same words are used in all three places.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from everstep.cadence import Every, bytes_per_s
from everstep.errors import BadConfig

FILE = "everstep.toml"
MAX_SLOTS = 28  # as many seals as fit on an arena's control page
ParityKind = Literal["xor", "rs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The host-memory tier: arenas that outlive the process.

    `path`: where arenas lie; a DAX mount makes them persistent. By default shared memory, or a memfd held by the
    keeper where shared memory is too small. `slots`: by default derived from the number of ranks.
    """

    path: str | None = None
    slots: int | None = None

    def __post_init__(self) -> None:
        _check_path(self)
        if self.slots is not None and not 2 <= _whole(self.slots, "Memory(slots=)") <= MAX_SLOTS:
            raise BadConfig(f"Memory(slots=) must be from 2 to {MAX_SLOTS}, not {self.slots}")


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk tier. `path`: a directory of its own on each node, by default the run's directory, wherever that is.

    `every`: how often the newest step is written, in steps or as a duration. By default as often as the disk can take
    with a tenth of its time, and at most every 15 seconds.
    """

    path: str | None = None
    every: int | str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_path(self)
        _check_every(self)

    @property
    def cadence(self) -> Every:
        return Every() if self.every is None else Every.parse(self.every, name="Disk(every=)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Partner:
    """Copies of what a node holds in the memory of `copies` other nodes, of other failure domains.

    `every`: of how many steps one is copied at most; a slow network takes fewer by itself. `rate`: how fast a node
    sends at most, such as "500MB/s". `encrypt`: nobody on the network can read what nodes tell each other.
    """

    copies: int = 1
    every: int = 1
    rate: str | None = None
    encrypt: bool = False

    def __post_init__(self) -> None:
        if _whole(self.copies, "Partner(copies=)") < 1:
            raise BadConfig(f"Partner(copies=) must be at least 1, not {self.copies}")
        if _whole(self.every, "Partner(every=)") < 1:
            raise BadConfig(f"Partner(every=) must be at least 1, not {self.every}")
        _check_traffic(self)

    @property
    def covers(self) -> int:
        """How many nodes may be lost."""
        return self.copies


@dataclass(frozen=True, slots=True)
class Parity:
    """Parity over groups of about `group` nodes: any `losses` of a group can be rebuilt from the others.

    `kind`: "xor" for one loss, "rs" (Reed-Solomon) for several. `rate`: how fast a node reads from the others at most,
    such as "500MB/s". `encrypt`: nobody on the network can read what nodes tell each other.
    """

    kind: ParityKind = "xor"
    group: int = field(default=8, kw_only=True)
    losses: int | None = field(default=None, kw_only=True)
    every: int = field(default=1, kw_only=True)
    rate: str | None = field(default=None, kw_only=True)
    encrypt: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.kind not in get_args(ParityKind):
            raise BadConfig(f"Parity takes 'xor' or 'rs', not {self.kind!r}")
        losses = self.covers
        if self.kind == "xor" and losses != 1:
            raise BadConfig(f"Parity('xor') covers one loss, not {losses}; use Parity('rs', losses={losses})")
        if losses < 1:
            raise BadConfig(f"Parity(losses=) must be at least 1, not {losses}")
        if _whole(self.group, "Parity(group=)") <= losses:
            raise BadConfig(f"Parity(group={self.group}) must be more than its {losses} losses")
        if _whole(self.every, "Parity(every=)") < 1:
            raise BadConfig(f"Parity(every=) must be at least 1, not {self.every}")
        _check_traffic(self)

    @property
    def covers(self) -> int:
        """How many nodes of a group may be lost."""
        if self.losses is None:
            return 1 if self.kind == "xor" else 2
        return _whole(self.losses, "Parity(losses=)")


@dataclass(frozen=True, slots=True)
class Shared:
    """A file system that all nodes see, as a deeper tier. `every`: how often, in steps or as a duration.

    `keep`: how many checkpoints stay there, or "all"; by default as many as on the disks. `rate`: how fast each node
    writes there at most, such as "500MB/s".
    """

    path: str
    every: int | str = field(default="15m", kw_only=True)
    keep: int | Literal["all"] | None = field(default=None, kw_only=True)
    rate: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise BadConfig(f"Shared takes a path, not {self.path!r}")
        if self.keep not in (None, "all") and _whole(self.keep, "Shared(keep=)") < 1:
            raise BadConfig(f"Shared(keep=) must be at least 1, or 'all', not {self.keep!r}")
        _check_every(self)
        rate_of(self)

    @property
    def cadence(self) -> Every:
        return Every.parse(self.every, name="Shared(every=)")


@dataclass(frozen=True, slots=True)
class Objects:
    """An object store as the deepest tier: s3://, gs:// or az://. `every`: how often, in steps or as a duration.

    `rate`: how fast each node sends at most, such as "500MB/s".
    """

    url: str
    every: int | str = field(default="1h", kw_only=True)
    rate: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or "://" not in self.url:
            raise BadConfig(f"Objects takes a URL such as 's3://bucket/prefix', not {self.url!r}")
        _check_every(self)
        rate_of(self)

    @property
    def cadence(self) -> Every:
        return Every.parse(self.every, name="Objects(every=)")


Protection = Partner | Parity
Tier = Memory | Disk | Partner | Parity | Shared | Objects
Deeper = Shared | Objects
_KINDS: dict[str, type[Tier]] = {kind.__name__: kind for kind in get_args(Tier)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """All that was chosen, at most one of each kind, with defaults for what every run has."""

    memory: Memory = field(default_factory=Memory)
    disk: Disk = field(default_factory=Disk)
    protection: Protection | None = None
    shared: Shared | None = None
    objects: Objects | None = None

    def __str__(self) -> str:
        """As `parse` reads it."""
        chosen = (self.memory, self.disk, self.protection, self.shared, self.objects)
        return ", ".join(repr(tier) for tier in chosen if tier is not None)

    @property
    def encrypt(self) -> bool:
        """Whether nodes encrypt what they tell each other."""
        return self.protection is not None and self.protection.encrypt

    @property
    def deeper(self) -> tuple[Deeper, ...]:
        """From the nearest to the deepest."""
        return tuple(tier for tier in (self.shared, self.objects) if tier is not None)


def choose(tiers: Sequence[Tier] | str | Path | None, environment: Mapping[str, str]) -> Tiers:
    """What guard() was given: tiers, or the file that names them. Of nothing: EVERSTEP_TIERS, else `everstep.toml`."""
    if tiers is None:
        text = environment.get("EVERSTEP_TIERS")
        if text:
            return gather(parse(text, "EVERSTEP_TIERS"), "EVERSTEP_TIERS")
        return gather(read(Path(FILE)), FILE) if Path(FILE).is_file() else Tiers()
    if isinstance(tiers, str | Path):
        return gather(read(Path(tiers)), str(tiers))
    if not isinstance(tiers, Iterable):
        raise BadConfig(f"tiers takes a list such as [Disk(every=100)], or the name of a file, not {tiers!r}")
    return gather(tiers)


def gather(tiers: Sequence[Tier], where: str = "tiers") -> Tiers:
    found: dict[str, Any] = {}
    for tier in tiers:
        if not isinstance(tier, Tier):
            raise BadConfig(f"{where} takes {', '.join(f'{name}(...)' for name in _KINDS)}, not {tier!r}")
        place = "protection" if isinstance(tier, Protection) else tier_name(tier)
        if place in found:
            raise BadConfig(f"{where} has {found[place]!r} and {tier!r}: one of them is enough")
        found[place] = tier
    return Tiers(**found)


def parse(text: str, where: str) -> list[Tier]:
    """Tiers as Python writes them: `Partner(), Shared("/lustre/run7", every=10)`."""
    try:
        calls = ast.parse(f"[{text}]", mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise BadConfig(f"{where}: {text!r} cannot be read: {error}") from None
    found = []
    for call in calls.elts if isinstance(calls, ast.List) else [calls]:
        if isinstance(call, ast.Name):
            found.append(_make(call.id, (), {}, where))
            continue
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise BadConfig(f"{where}: {ast.unparse(call)} is no tier; write for example Partner()")
        values = [_value(value, where) for value in call.args]
        named = {str(word.arg): _value(word.value, where) for word in call.keywords}
        found.append(_make(call.func.id, values, named, where))
    return found


def _value(written: ast.expr, where: str) -> object:
    try:
        return ast.literal_eval(written)
    except ValueError:
        said = ast.unparse(written)
        raise BadConfig(f"{where}: {said} is neither a number nor a text; quote it: '{said}'") from None


def read(path: Path) -> list[Tier]:
    """Tiers as `everstep.toml` has them: a table for each, such as [partner] or [shared]."""
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise BadConfig(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path}: {error}") from None
    found = []
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise BadConfig(f"{path}: {name} must be a table, such as [{name}]")
        found.append(_make(name.capitalize(), (), table, str(path)))
    return found


def _make(name: str, values: Sequence[Any], named: Mapping[str, Any], where: str) -> Tier:
    kind = _KINDS.get(name)
    if kind is None:
        raise BadConfig(f"{where}: there is no tier {name!r}; there are {', '.join(_KINDS)}")
    known = [one.name for one in fields(kind)]
    for key in named:
        if key not in known:
            raise BadConfig(f"{where}: {name} has no {key!r}; it has {', '.join(known)}")
    if len(values) > 1:
        raise BadConfig(f"{where}: {name} takes {', '.join(known)}, each by its name but for the first")
    if kind in (Shared, Objects) and not values and known[0] not in named:
        raise BadConfig(f"{where}: {name} needs its {known[0]!r}")
    try:
        return kind(*values, **named)
    except TypeError as error:
        raise BadConfig(f"{where}: {name}: {error}") from None
    except BadConfig as error:
        raise BadConfig(f"{where}: {error}") from None


def _whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadConfig(f"{name} must be a whole number, not {value!r}")
    return value


def _check_path(tier: Memory | Disk) -> None:
    if tier.path is not None and (not isinstance(tier.path, str) or not tier.path):
        raise BadConfig(f"{type(tier).__name__}(path=) must be a path, not {tier.path!r}")


def _check_traffic(tier: Protection) -> None:
    rate_of(tier)
    if not isinstance(tier.encrypt, bool):
        raise BadConfig(f"{type(tier).__name__}(encrypt=) must be true or false, not {tier.encrypt!r}")


def tier_name(tier: Tier) -> str:
    """As lanes, events and files call it."""
    return type(tier).__name__.lower()


def rate_of(tier: Protection | Deeper) -> float | None:
    """Bytes a second; None: no limit."""
    return None if tier.rate is None else bytes_per_s(tier.rate, name=f"{type(tier).__name__}(rate=)")


def _check_every(tier: Disk | Shared | Objects) -> None:
    if tier.every is not None:
        Every.parse(tier.every, name=f"{type(tier).__name__}(every=)")
