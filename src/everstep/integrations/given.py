"""A tensor in a file of another tool: what it is, and how its elements are got when somebody wants them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Given:
    dtype: torch.dtype
    shape: tuple[int, ...]
    copy_to: Callable[[Tensor], object]
    memory: Hashable = None  # the same for tied tensors, which are one in memory

    @classmethod
    def of(cls, tensor: Tensor) -> Given:
        tensor = tensor.detach()
        memory = None
        if tensor.numel():
            memory = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        return cls(tensor.dtype, tuple(tensor.shape), lambda target: target.copy_(tensor), memory)

    def taken(self) -> Tensor:
        made = torch.empty(self.shape, dtype=self.dtype)
        self.copy_to(made)
        return made
