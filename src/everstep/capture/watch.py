"""Whether the objects of a program still hold the tensors that they held: asked at every cut."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

_LOOKS = 2048  # at a time: up to a millisecond (bench/scaling.py)


class Watch:
    """Sees, without a line of Python per tensor, whether any of many tensors was replaced or added."""

    def __init__(self) -> None:
        self._holders: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._tensors: list[Tensor] = []
        self._locals: list[Tensor] = []
        self._addresses: list[int] = []
        self._growing: list[Any] = []
        self._sizes: list[int] = []
        self._plain_holders: list[dict[Any, Any]] = []
        self._plain_keys: list[Any] = []
        self._outer_holders: list[dict[Any, Any]] = []
        self._outer_keys: list[Any] = []
        self._inner: list[Any] = []

    def add(self, holder: dict[Any, Any], key: Any, tensor: Tensor, local: Tensor) -> None:
        """`local`: this rank's part of it."""
        self._holders.append(holder)
        self._keys.append(key)
        self._tensors.append(tensor)
        self._locals.append(local)
        self._addresses.append(local.data_ptr())

    def grows(self, container: Any) -> None:
        self._growing.append(container)
        self._sizes.append(len(container))

    def same(self, holder: dict[Any, Any], key: Any) -> None:
        """A dict of tensors that may be replaced as a whole."""
        self._outer_holders.append(holder)
        self._outer_keys.append(key)
        self._inner.append(holder.get(key))

    def plain(self, holder: dict[Any, Any], key: Any) -> None:
        """Something that is no tensor yet."""
        self._plain_holders.append(holder)
        self._plain_keys.append(key)

    def unchanged(self, between: Callable[[], object] | None = None) -> bool:
        """`between`: called every now and then, by whoever lets others have the interpreter meanwhile.

        What is mapped is one long step for the interpreter: nobody could take it away before the end.
        """
        looks = chain(
            map(operator.eq, map(len, self._growing), self._sizes),
            map(operator.is_, map(dict.get, self._outer_holders, self._outer_keys), self._inner),
            map(operator.not_, map(torch.is_tensor, map(dict.get, self._plain_holders, self._plain_keys))),
            map(operator.is_, map(dict.get, self._holders, self._keys), self._tensors),
            map(operator.eq, map(Tensor.data_ptr, self._locals), self._addresses),
        )
        count = len(self._sizes) + len(self._inner) + len(self._plain_keys) + 2 * len(self._tensors)
        for first in range(0, count, _LOOKS):
            if first and between is not None:
                between()
            if not all(islice(looks, _LOOKS)):
                return False
        return True
