"""How often: every so many steps, or every so many seconds; and how fast: so many bytes a second."""

from __future__ import annotations

import re
from dataclasses import dataclass

from everstep.errors import BadConfig

_SIZES = {"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: object, *, name: str) -> float:
    """'30s', '500ms', '2h' as seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)\s*", text) if isinstance(text, str) else None
    if not match or float(match[1]) <= 0:
        raise BadConfig(f"{name} must be a positive duration such as '30s', '5m' or '2h', not {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def bytes_per_s(text: object, *, name: str) -> float:
    """'500MB/s', '1.5 GB/s' as bytes a second; the units are decimal."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(B|kB|KB|MB|GB|TB)/s\s*", text) if isinstance(text, str) else None
    if not match or float(match[1]) <= 0:
        raise BadConfig(f"{name} must be a rate such as '500MB/s', '800KB/s' or '1.5GB/s', not {text!r}")
    return float(match[1]) * _SIZES[match[2]]


def byte_count(text: object, *, name: str) -> int:
    """'1.5GB', '900 MB' as bytes; the units are decimal."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(B|kB|KB|MB|GB|TB)\s*", text) if isinstance(text, str) else None
    if not match or float(match[1]) <= 0:
        raise BadConfig(f"{name} must be a size such as '500MB', '1.5GB' or '2TB', not {text!r}")
    return round(float(match[1]) * _SIZES[match[2]])


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
