"""A pickle read as what it would do, without doing any of it.

DCP keeps its table of contents as one. Loading it would import and call whatever it names, so nobody loads it: its
opcodes are listed by the standard library's disassembler, and put together to plain data and to notes of what would
have been made. Nothing is imported, and nothing is called.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from everstep.errors import Damaged

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Named:
    """Something that a pickle would import."""

    module: str
    name: str


@dataclass(slots=True, eq=False)
class Thing:
    """Something that it would make: of which kind, out of what, and what its fields would be."""

    kind: Named
    made_of: tuple[Any, ...]
    fields: Any = field(default_factory=dict)


class _Mark:
    pass


_MARK = _Mark()
_PLAIN: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_TUPLE": tuple, "EMPTY_LIST": list,
    "EMPTY_DICT": dict, "EMPTY_SET": set, "MARK": lambda: _MARK,
}  # fmt: skip
_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
}  # fmt: skip


def read(data: bytes, *, file: str) -> Any:
    """What it stands for. Damaged if it is cut off, or does something that no table of contents needs."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.do(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise Damaged(f"not a table of contents of DCP: {error!r}", file=file) from None
    raise Damaged("not a table of contents of DCP: it has no end", file=file)


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _PLAIN:
            stack.append(_PLAIN[name]())
        elif name in ("PROTO", "FRAME"):
            return
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name == "GLOBAL":
            stack.append(Named(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            last, first = _a(str, stack.pop()), _a(str, stack.pop())
            stack.append(Named(first, last))
        elif name.startswith("TUPLE"):
            count = int(name[5:] or 0)
            stack.append(tuple(reversed([stack.pop() for _ in range(count)])) if count else tuple(self._since_mark()))
        else:
            self._fill(name)

    def _fill(self, name: str) -> None:
        """What changes the thing below it."""
        stack = self.stack
        if name in ("APPENDS", "ADDITEMS", "SETITEMS"):
            items = self._since_mark()
            if name == "SETITEMS":
                _a(dict, stack[-1]).update(zip(map(_key, items[::2]), items[1::2], strict=True))
            elif name == "ADDITEMS":
                _a(set, stack[-1]).update(map(_key, items))
            else:
                _a(list, stack[-1]).extend(items)
        elif name == "APPEND":
            item = stack.pop()
            _a(list, stack[-1]).append(item)
        elif name == "SETITEM":
            value, key = stack.pop(), _key(stack.pop())
            _a(dict, stack[-1])[key] = value
        elif name in ("NEWOBJ", "REDUCE"):
            made_of, kind = stack.pop(), _a(Named, stack.pop())
            stack.append(Thing(kind, tuple(made_of)))
        elif name == "BUILD":
            fields = stack.pop()
            _a(Thing, stack[-1]).fields = fields
        else:
            raise ValueError(f"it would do {name}")

    def _since_mark(self) -> list[Any]:
        items = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]


def _a(kind: type[Kind], value: Any) -> Kind:
    """Not shown as it is: a few bytes of pickle can hold themselves a billion times."""
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} should be")
    return value


def _key(value: Any) -> Any:
    """Not a tuple, whose hash is that of all that it holds: that may take forever, or more stack than there is."""
    if not isinstance(value, str | bytes | int | float | Thing):
        raise ValueError(f"a {type(value).__name__} is no key of a table")
    return value
