"""Everything that is not a state tensor: trees of plain values, and the random state.

A tree is made of None, booleans, numbers, strings, bytes, lists, tuples, sets, dicts with plain keys, the few
containers that torch's own state_dicts use, and small tensors and arrays. It is stored as MessagePack with tags, never
as pickle. What does not fit is refused with the path of its key.
"""

from __future__ import annotations

import math
import random
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from everstep.errors import Damaged, Unstorable

Tree = Any  # a recursive type that mypy cannot say; `encode` checks it

_TENSOR, _ARRAY, _TUPLE, _SET, _MAP, _COUNTER, _DEQUE, _BIGINT, _COMPLEX, _DTYPE, _SCALAR = range(1, 12)
_PLAIN = (bool, int, float, str, bytes)


def encode(tree: Tree, name: str) -> bytes:
    try:
        return msgspec.msgpack.encode(_pack(tree, name))
    except RecursionError:
        raise Unstorable(name, tree, "it is nested too deeply, or holds itself") from None
    except UnicodeEncodeError as error:
        raise Unstorable(name, tree, f"a string in it is no text, {error}") from None


def decode(data: bytes) -> Tree:
    try:
        return msgspec.msgpack.decode(data, ext_hook=_unpack)
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        raise Damaged(f"unreadable extras: {error}") from None


def _ext(tag: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(tag, msgspec.msgpack.encode(value))


def _pack(value: Tree, key: str) -> Any:
    kind = type(value)
    if value is None or kind in _PLAIN:
        if kind is int and not -(2**63) <= value < 2**64:
            return _ext(_BIGINT, str(value))
        return value
    if kind is list:
        return [_pack(item, f"{key}[{i}]") for i, item in enumerate(value)]
    if kind is dict or kind is OrderedDict or kind is defaultdict:
        if all(type(k) is str for k in value):
            return {k: _pack(v, f"{key}.{k}") for k, v in value.items()}
        return _ext(_MAP, _items(value, key))
    if isinstance(value, tuple):
        if kind is not tuple and not (hasattr(kind, "numel") and kind.__module__ == "torch"):
            raise Unstorable(key, value, "a named tuple would come back as a plain one")
        return _ext(_TUPLE, [_pack(item, f"{key}[{i}]") for i, item in enumerate(value)])
    if kind in (set, frozenset):
        return _ext(_SET, [_pack(item, f"{key}{{}}") for item in value])
    if kind is Counter:
        return _ext(_COUNTER, _items(value, key))
    if kind is deque:
        return _ext(_DEQUE, [[_pack(item, f"{key}[{i}]") for i, item in enumerate(value)], value.maxlen])
    if kind is complex:
        return _ext(_COMPLEX, [value.real, value.imag])
    if kind is np.ndarray and value.dtype.kind in "biufc":
        return _ext(_ARRAY, [value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()])
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return _ext(_SCALAR, [value.dtype.str, value.tobytes()])
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.layout is torch.strided:
        if hasattr(value, "device_mesh"):
            raise Unstorable(key, value, "a DTensor is kept as a parameter, a buffer or an optimizer's state only")
        return _ext(_TENSOR, tensor_to_bytes(value))
    if torch is not None and isinstance(value, torch.dtype):
        return _ext(_DTYPE, str(value).removeprefix("torch."))
    raise Unstorable(key, value)


def _items(value: Mapping[Any, Any], key: str) -> list[list[Any]]:
    packed = []
    for k, v in value.items():
        if k is not None and type(k) not in (bool, int, float, str, bytes, tuple):
            raise Unstorable(f"a key of {key}", k)
        packed.append([_pack(k, f"a key of {key}"), _pack(v, f"{key}.{k}")])
    return packed


def tensor_to_bytes(tensor: Any) -> list[Any]:
    """A tensor as [dtype, shape, bytes]."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return [str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().tobytes()]


def _unpack(tag: int, data: memoryview) -> Any:
    value = msgspec.msgpack.decode(data, ext_hook=_unpack)
    match tag:
        case 1:
            return _tensor(*value)
        case 2:
            return np.frombuffer(value[2], dtype=np.dtype(value[0])).reshape(value[1]).copy()
        case 3:
            return tuple(value)
        case 4:
            return set(value)
        case 5:
            return {_key(k): v for k, v in value}
        case 6:
            return Counter({_key(k): v for k, v in value})
        case 7:
            return deque(value[0], maxlen=value[1])
        case 8:
            return int(value)
        case 9:
            return complex(*value)
        case 10:
            return _dtype(value)
        case 11:
            return np.frombuffer(value[1], dtype=np.dtype(value[0]))[0]
    raise ValueError(f"unknown tag {tag}")


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def _dtype(name: str) -> Any:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


def _tensor(dtype: str, shape: list[int], data: bytes) -> Any:
    import torch

    kind = _dtype(dtype)
    if math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f"a tensor of shape {shape} with {len(data)} bytes")
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(kind).reshape(shape)


# -- random state


def random_state() -> dict[str, Any]:
    """Python's, NumPy's, torch's and every CUDA device's generator, without waiting for a device."""
    import torch

    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, struct.pack(f"<{len(internal)}Q", *internal), gauss],
        "numpy": [kind, np.asarray(keys).tobytes(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": [s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    import torch

    version, internal, gauss = state["python"]
    random.setstate((version, struct.unpack(f"<{len(internal) // 8}Q", internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(saved), dtype=torch.uint8), device)
