"""A table out of a file, read key by key: whatever is wrong is named with file, key, value and what would be right."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import Any, TypeVar

from everstep.cadence import byte_count, bytes_per_s, seconds
from everstep.errors import BadConfig

Value = TypeVar("Value")


class Table:
    """`path`: which table of the file this is. A key without a default must be there."""

    def __init__(self, values: Mapping[str, Any], *, file: str, path: str = "") -> None:
        self._values, self._file, self._path = values, file, path
        self._known: dict[str, None] = {}
        self.defaulted: list[str] = []  # keys that the file leaves to us

    def wrong(self, key: str, allowed: str) -> BadConfig:
        """The error for a value that cannot be."""
        said = f"{self._values[key]!r} must be" if key in self._values else "is missing; it must be"
        return BadConfig(f"{self._file}: {self._path}{key} = {said} {allowed}".replace(" = is", " is"))

    def __contains__(self, key: str) -> bool:
        self._known[key] = None
        return key in self._values

    def done(self) -> None:
        """Nothing else may be there."""
        for key, value in self._values.items():
            if key not in self._known:
                known = ", ".join(self._known)
                raise BadConfig(f"{self._file}: {self._path}{key} = {value!r} is not known here; known are {known}")

    def duration(self, key: str, default: float | None = None, *, least: float = 0.0) -> float:
        """In seconds, from '30s', '5m', '2h', '1d' or a number of seconds."""
        return self._read(
            key, default, lambda value: _at_least(_seconds(value), least),
            f"a duration such as '30s' or '2h', or a number of seconds, from {least:g}",
        )  # fmt: skip

    def size(self, key: str, default: int | None = None) -> int:
        return self._read(key, default, lambda value: byte_count(value, name=key), "a size such as '1.5GB'")

    def rate(self, key: str, default: float | None = None) -> float:
        return self._read(key, default, lambda value: bytes_per_s(value, name=key), "a rate such as '2GB/s'")

    def whole(self, key: str, default: int | None = None, *, least: int = 0, most: float = inf) -> int:
        allowed = f"a whole number from {least}" + ("" if most == inf else f" to {most:g}")
        return self._read(key, default, lambda value: _whole(value, least, most), allowed)

    def number(self, key: str, default: float | None = None, *, least: float = 0.0, most: float = inf) -> float:
        allowed = f"a number from {least:g}" + ("" if most == inf else f" to {most:g}")
        return self._read(key, default, lambda value: _at_least(_number(value), least, most), allowed)

    def word(self, key: str, default: str | None = None, *, among: Collection[str] = ()) -> str:
        allowed = f"one of {', '.join(among)}" if among else "a text"
        return self._read(key, default, lambda value: _word(value, among), allowed)

    def words(self, key: str, default: Sequence[str] | None = None, *, among: Collection[str]) -> tuple[str, ...]:
        found = self._read(key, None if default is None else list(default), _list, f"a list out of {', '.join(among)}")
        if any(one not in among for one in found):
            raise self.wrong(key, f"a list out of {', '.join(among)}")
        return tuple(found)

    def wholes(self, key: str, *, least: int, most: float) -> tuple[int, ...]:
        allowed = f"a list of whole numbers from {least} to {most:g}"
        return self._read(key, None, lambda value: tuple(_whole(one, least, most) for one in _list(value)), allowed)

    def table(self, key: str) -> Table:
        found: Mapping[str, Any] = self._read(key, {}, _mapping, "a table")
        return Table(found, file=self._file, path=f"{self._path}{key}.")

    def tables(self, key: str) -> list[Table]:
        found: list[Any] = self._read(key, [], _list, "a list of tables")
        if not all(isinstance(one, Mapping) for one in found):
            raise self.wrong(key, "a list of tables")
        return [Table(one, file=self._file, path=f"{self._path}{key}[{n}].") for n, one in enumerate(found)]

    def _read(self, key: str, default: Value | None, parse: Callable[[Any], Value], allowed: str) -> Value:
        self._known[key] = None
        if key not in self._values:
            if default is None:
                raise self.wrong(key, allowed)
            self.defaulted.append(key)
            return default
        try:
            return parse(self._values[key])
        except ValueError:
            raise self.wrong(key, allowed) from None


def _seconds(value: object) -> float:
    return seconds(value, name="") if isinstance(value, str) else _number(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(value)
    return float(value)


def _at_least(value: float, least: float, most: float = inf) -> float:
    if not least <= value <= most or value == inf:
        raise ValueError(value)
    return value


def _whole(value: object, least: int, most: float) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(value)
    return value


def _word(value: object, among: Collection[str]) -> str:
    if not isinstance(value, str) or (among and value not in among):
        raise ValueError(value)
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(value)
    return list(value)


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(value)
    return value
