"""Programs for Accelerate, apart from the tests that use them: only who runs those has to load it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from fsdp_on_cpus import shard_on_cpus
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from everstep.integrations.accelerate import guard


class Counter:
    """Registered for checkpointing: comes back without being named again."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def tensors() -> TensorDataset:
    x = torch.randn(60, 8, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x[:, :3].argmax(dim=1))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from tensors()


def train_sharded() -> None:
    shard_on_cpus()
    train(plugin=FullyShardedDataParallelPlugin(2, auto_wrap_policy="size_based_wrap", min_num_params=100))


def train(kind: str = "plain", accumulate: int = 1, plugin: Any = None, **config: Any) -> None:
    set_seed(4)
    generator = torch.Generator().manual_seed(9)
    loader = {
        "plain": lambda: DataLoader(tensors(), 4, shuffle=True),
        "drawn": lambda: DataLoader(tensors(), 4, shuffle=True, generator=generator),
        "stream": lambda: DataLoader(Stream(), 4),
        "workers": lambda: DataLoader(tensors(), 4, shuffle=True, num_workers=1),
    }[kind]()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulate, dataloader_config=DataLoaderConfiguration(**config),
        fsdp_plugin=plugin,
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    counter, losses = Counter(), []
    accelerator.register_for_checkpointing(counter)
    run = guard(accelerator, loader, dir=sys.argv[2], extra={"losses": losses}, epochs=4 * accumulate)
    for x, y in run:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        counter.seen += 1
        losses.append(loss.item())


def guard_wrongly(distributed: str | None = None, *, prepared: bool = True, **config: Any) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    model, loader = nn.Linear(8, 3), DataLoader(tensors(), 4)
    if prepared:
        model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    if distributed is not None:
        accelerator.state.distributed_type = distributed
        accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=1)
    guard(accelerator, loader, dir=sys.argv[2])
