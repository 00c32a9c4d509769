"""SCR's settings under their own names, and what each of them means here.

The environment comes before a file (SCR_CONF_FILE, or `.scrconf` in SCR_PREFIX), and a file before config(). What is
not known here is named in a warning, and so is every choice that leaves a failure uncovered.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from everstep.cadence import Every
from everstep.config import Keep, Settings
from everstep.errors import BadConfig
from everstep.tiers import Disk, Parity, Partner, Shared, Tiers
from everstep.topology import Topology

_DEFAULTS = {
    "SCR_FLUSH": "10", "SCR_FLUSH_ASYNC": "1", "SCR_COPY_TYPE": "XOR", "SCR_SET_SIZE": "8", "SCR_SET_FAILURES": "2",
    "SCR_CACHE_SIZE": "1", "SCR_CACHE_BASE": "/tmp", "SCR_PREFIX": "", "SCR_PREFIX_SIZE": "0",
    "SCR_CHECKPOINT_INTERVAL": "0", "SCR_CHECKPOINT_SECONDS": "0", "SCR_CHECKPOINT_OVERHEAD": "0",
    "SCR_HALT_SECONDS": "0", "SCR_JOB_NAME": "job", "SCR_CONF_FILE": "",
}  # fmt: skip
_MOOT = {
    "SCR_CRC_ON_COPY": "every byte is checksummed, always",
    "SCR_CRC_ON_FLUSH": "every byte is checksummed, always",
    "SCR_CRC_ON_DELETE": "every byte is checksummed, always",
    "SCR_CACHE_BYPASS": "checkpoints are always cached",
    "SCR_DISTRIBUTE": "caches are always restarted from where that is possible",
    "SCR_FETCH": "the prefix is read where the caches do not suffice, always",
    "SCR_FLUSH_ON_RESTART": "files are always given to a restart in the cache",
    "SCR_HALT_ENABLED": "a library does not end its program; ask should_exit()",
}
_SCHEMES = ("SINGLE", "PARTNER", "XOR", "RS")
_FEWEST_KEPT = 2  # one node may have written the newest before another has, and then the one before it is needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What SCR's settings come to."""

    flush: int
    is_async: bool
    scheme: str
    set_size: int
    set_failures: int
    cache_size: int
    cache_base: Path
    prefix: Path
    prefix_size: int
    interval: int
    seconds: float
    overhead: float  # per cent
    halt_s: float
    job: str
    warnings: tuple[str, ...]

    @property
    def directory(self) -> Path:
        """Where a node caches this job: of its own for every user, prefix and name."""
        key = xxhash.xxh3_64_hexdigest(os.fsencode(self.prefix))[:8]
        return self.cache_base / f"everstep-scr-{os.getuid()}" / f"{self.job}-{key}"

    @property
    def flushed(self) -> Path:
        """Where flushed checkpoints lie, and notes of all datasets."""
        return self.prefix / ".everstep" / self.job

    def settings(self) -> Settings:
        protection = {
            "SINGLE": None,
            "PARTNER": Partner(),
            "XOR": Parity("xor", group=max(2, self.set_size)),
            "RS": Parity("rs", group=max(self.set_failures + 1, self.set_size), losses=self.set_failures),
        }[self.scheme]
        shared = None
        if self.flush:
            shared = Shared(str(self.flushed), every=self.flush, keep=self.prefix_size or "all")
        return Settings(
            directory=self.directory.absolute(), capture=Every(steps=1), strategy="snapshot",
            tiers=Tiers(disk=Disk(every=1), protection=protection, shared=shared),
            keep=Keep(last=max(_FEWEST_KEPT, self.cache_size)),
        )  # fmt: skip

    def uncovered(self, place: Topology) -> list[str]:
        """What these choices do not protect against, a sentence each."""
        found = []
        if self.scheme == "SINGLE" and place.has_many_nodes:
            found.append(
                "SCR_COPY_TYPE=SINGLE protects nothing against the loss of a node: what was not flushed is lost with "
                "it. Use PARTNER, XOR or RS."
            )
        elif self.scheme != "SINGLE" and not place.has_many_nodes:
            found.append(
                f"SCR_COPY_TYPE={self.scheme} protects nothing on one node alone: if it is lost, what was flushed to "
                "SCR_PREFIX is all there is."
            )
        if not self.flush:
            found.append("SCR_FLUSH=0 protects nothing against the loss of all nodes: none goes to SCR_PREFIX.")
        return found


def choose(told: Mapping[str, str], environment: Mapping[str, str]) -> Choices:
    """`told`: what config() was given."""
    own = {name: value for name, value in environment.items() if name.startswith("SCR_")}
    found = {**_DEFAULTS, **told, **own}
    prefix = _real(found["SCR_PREFIX"] or os.getcwd())
    given = Path(found["SCR_CONF_FILE"]) if found["SCR_CONF_FILE"] else prefix / ".scrconf"
    if found["SCR_CONF_FILE"] or given.is_file():
        found = {**_DEFAULTS, **told, **read(given), **own}
        prefix = _real(found["SCR_PREFIX"] or prefix)
    scheme = found["SCR_COPY_TYPE"].upper()
    if scheme not in _SCHEMES:
        raise BadConfig(f"SCR_COPY_TYPE must be one of {', '.join(_SCHEMES)}, not {found['SCR_COPY_TYPE']!r}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", found["SCR_JOB_NAME"]):
        raise BadConfig(f"SCR_JOB_NAME must be of letters, digits, '.', '_' and '-', not {found['SCR_JOB_NAME']!r}")
    return Choices(
        flush=_whole(found, "SCR_FLUSH"), is_async=_whole(found, "SCR_FLUSH_ASYNC") > 0, scheme=scheme,
        set_size=_whole(found, "SCR_SET_SIZE"), set_failures=_whole(found, "SCR_SET_FAILURES", least=1),
        cache_size=_whole(found, "SCR_CACHE_SIZE"), cache_base=Path(found["SCR_CACHE_BASE"]).absolute(), prefix=prefix,
        prefix_size=_whole(found, "SCR_PREFIX_SIZE"), interval=_whole(found, "SCR_CHECKPOINT_INTERVAL"),
        seconds=_number(found, "SCR_CHECKPOINT_SECONDS"), overhead=_number(found, "SCR_CHECKPOINT_OVERHEAD"),
        halt_s=_number(found, "SCR_HALT_SECONDS"), job=found["SCR_JOB_NAME"],
        warnings=tuple(_warning(name) for name in sorted(found.keys() - _DEFAULTS.keys())),
    )  # fmt: skip


def _real(path: str | Path) -> Path:
    """However it was reached: where a program stands is told without links, too."""
    return Path(os.path.realpath(path))


def read(path: Path) -> dict[str, str]:
    """A file of settings: NAME=value a line, and # before what is for people."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path} cannot be read: {error}") from None
    return dict(setting for line in lines if (setting := assignment(line.split("#")[0])) is not None)


def assignment(text: str) -> tuple[str, str] | None:
    """NAME=value as a pair; None for a blank."""
    name, equals, value = text.strip().partition("=")
    if not name:
        return None
    if not equals:
        raise BadConfig(f"a setting is NAME=value, not {text.strip()!r}")
    return name.strip(), value.strip()


def _warning(name: str) -> str:
    if name in _MOOT:
        return f"{name} does nothing: {_MOOT[name]}."
    return f"{name} is not known to Everstep and does nothing; see docs/from-scr.md for what is."


def _whole(found: Mapping[str, str], name: str, *, least: int = 0) -> int:
    if not re.fullmatch(r"\d{1,9}", found[name]) or int(found[name]) < least:
        raise BadConfig(f"{name} must be a whole number from {least}, not {found[name]!r}")
    return int(found[name])


def _number(found: Mapping[str, str], name: str) -> float:
    if not re.fullmatch(r"\d{1,12}(\.\d*)?", found[name]):
        raise BadConfig(f"{name} must be a number from 0, not {found[name]!r}")
    return float(found[name])
