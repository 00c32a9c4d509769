"""The program's own objects, moved to another group: models under DDP, layers that talk, loaders that divide.

A model is not wrapped anew: it gets the new group and a new reducer, in the way in which DDP makes one when it is
unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from everstep.capture.reductions import make_reducer

_OURS = ("everstep.capture.tap", "everstep.capture.compressor")  # who makes hooks that the next life makes anew


def regroup(models: Iterable[nn.Module], loader: Any) -> None:
    """To the present group."""
    group = dist.group.WORLD
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, nn.parallel.DistributedDataParallel):
            _regroup(module, group)
        elif isinstance(module, nn.SyncBatchNorm):
            module.process_group = group
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(holder, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            _divide_anew(sampler)


def _regroup(ddp: Any, group: Any) -> None:
    ddp.process_group = group
    ddp._comm_hooks = [(hook, state) for hook, state in ddp._comm_hooks if hook.__module__ not in _OURS]
    for parameter in ddp.module.parameters():
        parameter.grad = None  # half of it may be averaged
    make_reducer(ddp, list(range(len(ddp._build_params_for_reducer()[0]))))
    ddp._has_rebuilt_buckets = False


def _divide_anew(sampler: DistributedSampler[Any]) -> None:
    fresh: DistributedSampler[Any] = DistributedSampler(
        sampler.dataset, shuffle=sampler.shuffle, seed=sampler.seed, drop_last=sampler.drop_last
    )
    for name in ("num_replicas", "rank", "num_samples", "total_size"):
        setattr(sampler, name, getattr(fresh, name))
