"""One small model, laid out over ranks in every way that torch knows, and its state as whole tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    """Biases, tied weights, dimensions that no number of ranks divides, two dtypes, a buffer, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 6)
        self.brain = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.randn(5, 2), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        x = self.table(x)
        x = x + self.second(torch.tanh(self.first(x)))
        x = x + self.brain(x.bfloat16()).float()
        return self.head(x * self.scale.repeat(2))


class Pair(nn.Module):
    """Two layers, for meshes that cut both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 12), nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(nn.functional.one_hot(x, 7).float())))


class Counts(nn.Linear):
    """With a buffer, which becomes a DTensor where the layer is taken apart."""

    def __init__(self, *size: int) -> None:
        super().__init__(*size)
        self.register_buffer("seen", torch.zeros(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return super().forward(x)


class Counting(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.first = Counts(7, 12)


class Dormant(Pair):
    """With a layer that has no gradient in the first step, and so no state in a base of it."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.passes = nn.Linear(7, 7), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        x = super().forward(x)
        return x + self.late(x) if self.passes > 1 else x


class Wide(Pair):
    """Large enough for many chunks: 28 MB with an AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 160_000), nn.Linear(160_000, 7)


class Unknown(torch.optim.SGD):
    """One of which nobody says that it updates every element by itself."""


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "fused": (torch.optim.AdamW, {"fused": True}),  # gives rows other bits than the whole
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {}),  # looks at rows and columns; torch's own takes no DTensors
    "Unknown": (Unknown, {}),
}

PLAN = {"first": ColwiseParallel(), "second": RowwiseParallel()}


def fsdp(model: nn.Module, mesh: Any) -> nn.Module:
    for name in ("brain", "first"):
        if hasattr(model, name):
            fully_shard(getattr(model, name), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def laid_out(kind: str, model: nn.Module, how: str = "AdamW") -> tuple[nn.Module, torch.optim.Optimizer]:
    """`kind`: over the ranks of the present world; `how` it is trained."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    make, options = OPTIMIZERS[how]
    if kind in ("ddp", "zero"):
        model = DistributedDataParallel(model)
    elif kind == "alone":
        pass  # each rank trains a model of its own
    elif kind == "fsdp":
        model = fsdp(model, init_device_mesh("cpu", (world,)))
    elif kind == "hsdp":
        model = fsdp(model, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    elif kind == "tp":
        parallelize_module(model, init_device_mesh("cpu", (world,)), PLAN)
    elif kind == "fsdp_tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        model = fsdp(parallelize_module(model, mesh["tp"], PLAN), mesh["dp"])
    else:
        assert kind == "single", kind
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "zero":
        return model, ZeroRedundancyOptimizer(trained, make, lr=0.05, **options)
    return model, make(trained, lr=0.05, **options)


def batch(kind: str, step: int, rank: int) -> Tensor:
    """Ranks that have parts of one computation see the same."""
    source = {"tp": 0, "single": 0, "alone": 0, "fsdp_tp": rank // 2}.get(kind, rank)
    return torch.randint(0, 7, (4, 3), generator=torch.Generator().manual_seed(100 * step + source))


def backward(model: nn.Module, tokens: Tensor) -> None:
    out = model(tokens)
    nn.functional.cross_entropy(out.reshape(-1, 7), (tokens.reshape(-1) + 1) % 7).backward()


def whole(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """All ranks together: every tensor as one, by Everstep's names."""
    names = {id(p): "model." + name.removeprefix("module.") for name, p in model.named_parameters()}
    found = {names[id(p)]: p for p in model.parameters()}
    found |= {"model." + name.removeprefix("module."): buffer for name, buffer in model.named_buffers()}
    is_zero = isinstance(optimizer, ZeroRedundancyOptimizer)
    for parameter, state in (optimizer.optim if is_zero else optimizer).state.items():
        found |= {f"optimizer.state.{names[id(parameter)]}.{key}": value for key, value in state.items()}
    tensors = {name: _full(value.detach()) for name, value in found.items()}
    if is_zero:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, tensors)
        for one in gathered:
            tensors |= one
    return tensors


def _full(value: Tensor) -> Tensor:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()
