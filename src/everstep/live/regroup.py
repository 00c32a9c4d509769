"""The program's own objects, moved to another group: models under DDP, layers that talk, loaders that divide.

A model is not wrapped anew: it gets the new group and a new reducer, in the way in which DDP makes one when it is
unpickled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from everstep.capture.drawn import divide
from everstep.capture.layout import Subjects
from everstep.capture.position import Feed
from everstep.capture.reductions import has_hook, make_reducer
from everstep.errors import Restart
from everstep.live.replicas import move, weigh_parts

# who makes hooks that the next life makes anew
_TAP = "everstep.capture.tap"
_WEIGHS = (_TAP, "everstep.live.forward")  # who asks for a rank's share of the batch
_OURS = (_TAP, "everstep.capture.compressor", "everstep.live.regroup")


def regroup(subjects: Subjects, loader: Any, *, keeps_gradients: bool) -> None:
    """To the present group. `keeps_gradients`: they are whole, and the next step may go on with them."""
    group = dist.group.WORLD
    move(subjects)
    for module in (module for model in subjects.models for module in model.modules()):
        if isinstance(module, nn.parallel.DistributedDataParallel):
            _regroup(module, group, keeps_gradients)
        elif isinstance(module, nn.SyncBatchNorm):
            module.process_group = group
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(holder, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            divide(sampler, dist.get_world_size(), dist.get_rank())


def _regroup(ddp: Any, group: Any, keeps_gradients: bool) -> None:
    ddp.process_group = group
    ddp._comm_hooks = [(hook, state) for hook, state in ddp._comm_hooks if hook.__module__ not in _OURS]
    for parameter in () if keeps_gradients else ddp.module.parameters():
        parameter.grad = None  # half of it may be averaged
    make_reducer(ddp, list(range(len(ddp._build_params_for_reducer()[0]))))
    ddp._has_rebuilt_buckets = False


def weigh(subjects: Subjects, feed: Feed | None) -> None:
    """Let gradients be averaged by how much of the global batch each rank has, where ranks have unequal parts."""
    subjects.share = None
    weigh_parts(subjects, None if feed is None or feed.is_even else feed.share)
    for module in (module for model in subjects.models for module in model.modules()):
        if not isinstance(module, nn.parallel.DistributedDataParallel) or feed is None:
            continue
        if feed.is_even:
            continue
        subjects.share = feed.share
        if any(hook.__module__ in _WEIGHS for hook, _ in module._comm_hooks):
            continue
        if has_hook(module):
            raise Restart("batches cannot be divided unequally under a communication hook; use batch='shrink'")
        module.register_comm_hook(module.process_group, _weighing(feed.share))


def _weighing(share: float) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    def hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced = dist.all_reduce(bucket.buffer().mul_(share), group=group, async_op=True).get_future()
        answer: torch.futures.Future[torch.Tensor] = reduced.then(lambda done: done.value()[0])
        return answer

    hook.__annotations__ = {"bucket": dist.GradBucket}  # DDP compares it, and not as a string
    return hook
