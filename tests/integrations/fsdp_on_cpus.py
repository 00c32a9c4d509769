"""Accelerate shards models on accelerators only, and leaves its FSDP plugin out of sight on CPUs: here it does not.

Whatever is done with the plugin from there on is Accelerate's own.
"""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def shard_on_cpus() -> None:
    choose = AcceleratorState.__init__

    def and_shard(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        choose(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = and_shard  # type: ignore[method-assign]
