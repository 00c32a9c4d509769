"""How DDP adds gradients up: what of it lives in a process, and must be there before the next life's first pass.

With three ranks or more the order in which a ring adds depends on where in its bucket an element lies. DDP begins each
process with makeshift buckets and, after the first pass (the second of a static graph), makes its final ones by the
order in which gradients arrived on rank 0. A life that resumed would go through that again, and round otherwise. So the
final buckets are part of the state, and a resumed life begins with them. Two smaller things are of the same kind:
whether the next forward broadcasts buffers, and which gradients lie in buckets, since DDP divides those and multiplies
others by the reciprocal.

The reducer itself is torch's, made by DDP in the way in which it makes one after unpickling: it is given the parameters
in the recorded order as if they had arrived so, and all that it does afterwards, and when, is its own.
"""

from __future__ import annotations

from hashlib import blake2b
from inspect import signature
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from everstep import topology
from everstep.capture.layout import Subjects, plain_name
from everstep.events import Degraded, Sink
from everstep.topology import Topology

_OF_DDP = (
    "_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper", "_comm_hooks",
    "_has_rebuilt_buckets", "_lazy_init_ran", "_join_config", "_register_builtin_comm_hook",
)  # fmt: skip
_OF_REDUCER = ("_rebuild_buckets", "_push_all_rebuilt_params", "_get_zeros_like_grad_buckets", "_set_static_graph")


class Reductions:
    """Of all models under DDP, wherever they are among a run's modules."""

    def __init__(self, subjects: Subjects) -> None:
        modules = [module for _, model in subjects.named_modules() for module in model.modules()]
        self._models = [_Model(ddp) for ddp in dict.fromkeys(filter(_has_buckets, modules))]
        # a compressor remembers the buckets that it reduces by, and puts whatever DDP gives it into those
        self._regroups = subjects.compressor is not None

    def forget(self) -> None:
        """The models have new reducers, in another group."""
        self._models = [_Model(model.ddp) for model in self._models]

    def settle(self) -> None:
        """At every cut, on all ranks: know the final buckets as soon as there are any."""
        for model in self._models:
            model.settle()

    def are_settled(self) -> bool:
        return all(model.is_settled for model in self._models)

    def tree(self) -> list[dict[str, Any]]:
        return [model.tree() for model in self._models]

    def restore(self, saved: list[dict[str, Any]] | None, place: Topology, emit: Sink) -> None:
        """Let the next pass of every model be as it would have been; all ranks together."""
        known = saved or []
        mine = "other models are under DDP than before" if len(known) != len(self._models) else ""
        for model, state in zip(self._models, known, strict=False):
            model.ddp.require_forward_param_sync = state["broadcasts"]
            mine = mine or model.obstacle(state)
        reason = next(filter(None, (told.decode() for told in topology.exchange(mine.encode(), place))), "")
        if not self._regroups and not reason:
            reason = "; ".join(filter(None, map(_Model.restore, self._models, known)))
        if reason and not self._regroups and any(model.ddp.process_group.size() > 2 for model in self._models):
            emit(Degraded(what="gradients may be added up in another order than before the resume", reason=reason))


class _Model:
    """One model under DDP."""

    def __init__(self, ddp: nn.parallel.DistributedDataParallel) -> None:
        self.ddp = ddp
        self._missing = _missing(ddp)
        self._buckets: bytes | None = None  # the final ones: of each how many parameters it has, and their numbers
        self._parameters: list[Tensor] = [] if self._missing else ddp._build_params_for_reducer()[0]
        names = {id(p): plain_name(name) for name, p in ddp.module.named_parameters()}
        self._digest = blake2b("\n".join(names[id(p)] for p in self._parameters).encode(), digest_size=16).digest()

    @property
    def is_settled(self) -> bool:
        return self._buckets is not None

    def settle(self) -> None:
        ddp = self.ddp
        if self._buckets is not None or self._missing or not _rebuilds(ddp):
            return
        if not ddp._has_rebuilt_buckets and not ddp._join_config.enable:
            # what the next forward begins with; a checkpoint of this step must have it
            ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()
        if ddp._has_rebuilt_buckets:
            self._buckets = self._read()

    def tree(self) -> dict[str, Any]:
        in_buckets = self._parameters if self.ddp.gradient_as_bucket_view else []
        return {
            "parameters": self._digest,
            "buckets": self._buckets,
            "has_run": getattr(self.ddp, "_lazy_init_ran", True),
            "broadcasts": self.ddp.require_forward_param_sync,
            "gradients": bytes(p.grad is not None for p in in_buckets),
        }

    def obstacle(self, saved: dict[str, Any]) -> str:
        if self._missing:
            return f"this torch has no {self._missing}"
        if saved["parameters"] != self._digest:
            return "DDP reduces other parameters, or in another order; is the same part of the model frozen?"
        if self.ddp.static_graph and self.ddp._comm_hooks:
            return "in its first pass a static graph would show its hook all buckets as if they were one"
        return ""

    def restore(self, saved: dict[str, Any]) -> str:
        """Make the reducer anew, as it was; a word on why it is not, if so."""
        ddp, buckets = self.ddp, saved["buckets"]
        for parameter, had in zip(self._parameters, saved["gradients"], strict=False):
            if had and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # the new reducer lets it lie in its bucket
        if buckets is not None:
            make_reducer(ddp, [i for bucket in _unpack(buckets) for i in bucket])
            ddp.reducer._push_all_rebuilt_params()
            ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()
            now = self._read()
            self._buckets = buckets if now is None else now
            if sorted(_unpack(self._buckets)) != sorted(_unpack(buckets)):
                return "DDP makes other buckets of the same parameters; was bucket_cap_mb changed?"
        elif any(saved["gradients"]):
            make_reducer(ddp, list(range(len(self._parameters))))
        if buckets is None and saved["has_run"] and _rebuilds(ddp):
            return "the final buckets of DDP were not known when the step was taken"
        return ""

    def _read(self) -> bytes | None:
        """The present buckets, if they can be asked for."""
        numbers = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        try:
            with _Nowhere():  # type: ignore[no-untyped-call]
                buckets = self.ddp.reducer._get_zeros_like_grad_buckets()
        except RuntimeError:
            return None  # a bucket of sparse gradients is nothing before its first pass
        found = [[numbers.get(id(parameter), -1) for parameter in bucket.parameters()] for bucket in buckets]
        if any(-1 in bucket for bucket in found):
            return None  # it reduces what was frozen after it was made, and a new one would not
        return np.array([n for bucket in found for n in (len(bucket), *bucket)], np.int32).tobytes()


class _Nowhere(TorchDispatchMode):
    """The reducer shows its buckets only with tensors of their size: those are not made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        return torch.empty(0)


def _unpack(buckets: bytes) -> list[list[int]]:
    left, found = np.frombuffer(buckets, np.int32).tolist(), []
    while left:
        size = left[0]
        found.append(left[1 : 1 + size])
        left = left[1 + size :]
    return found


def make_reducer(ddp: Any, order: list[int]) -> None:
    """As DDP does when it is unpickled, with the parameters in this order; hooks come along."""
    parameters, sparse = ddp._build_params_for_reducer()
    parameters, sparse = [parameters[i] for i in order], [sparse[i] for i in order]
    names = ddp._build_debug_param_to_name_mapping(parameters)
    built_in = _built_in_hook(ddp)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
        ddp._static_graph_delay_allreduce_enqueued = False
    if ddp.mixed_precision is not None:
        ddp.reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)
    hooks, ddp._comm_hooks = ddp._comm_hooks, []
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    if built_in is not None:
        ddp._register_builtin_comm_hook(built_in)


def has_hook(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Whether somebody else communicates for it."""
    return bool(ddp._comm_hooks) or _built_in_hook(ddp) is not None


def _built_in_hook(ddp: nn.parallel.DistributedDataParallel) -> Any:
    kinds = {str(kind): kind for kind in dist.BuiltinCommHookType.__members__.values()}
    return kinds.get(ddp._get_ddp_logging_data().get("comm_hook", ""))


def _has_buckets(module: nn.Module) -> TypeGuard[nn.parallel.DistributedDataParallel]:
    return (
        isinstance(module, nn.parallel.DistributedDataParallel)
        and hasattr(module, "reducer")  # it has none where all reductions are delayed to one
        and not getattr(module, "_use_python_reducer", False)
    )


def _rebuilds(ddp: nn.parallel.DistributedDataParallel) -> bool:
    return ddp.static_graph or not ddp.find_unused_parameters


def _missing(ddp: nn.parallel.DistributedDataParallel) -> str:
    """What this needs of torch beyond its public names and is not there."""
    missing = [f"DistributedDataParallel.{name}" for name in _OF_DDP if not hasattr(ddp, name)]
    missing += [f"Reducer.{name}" for name in _OF_REDUCER if not hasattr(ddp.reducer, name)]
    if not missing and len(signature(ddp._ddp_init_helper).parameters) != 4:
        missing = ["DistributedDataParallel._ddp_init_helper of four arguments"]
    return missing[0] if missing else ""
