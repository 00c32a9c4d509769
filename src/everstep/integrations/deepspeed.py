"""DeepSpeed: an engine with ZeRO 1 or 2, guarded by one call; the loop iterates the run and calls the engine as ever.

The optimizer that works inside the engine has flat parts of all parameters, each rank its own, in full precision. Its
steps are those that count, and its parts come back to the rank that had them. The weights that the module computes
with are written after its step and before the cut, so they belong to it. The engine's counters travel along.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep import run as door
from everstep.errors import BadConfig
from everstep.integrations.versions import need

need("deepspeed", "everstep.integrations.deepspeed", least="0.19", below="0.20")

from deepspeed import DeepSpeedEngine  # noqa: E402
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer  # noqa: E402

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def guard(
    engine: DeepSpeedEngine, loader: Any, *, dir: str | Path, extra: Mapping[str, object] | None = None, **options: Any
) -> door.Run:
    """Guard a loop over `loader` that trains with `engine`. `extra` and `options`: as for everstep.guard()."""
    _check(engine, options)
    kept = extra if isinstance(extra, dict) else dict(extra or {})
    kept["deepspeed"] = _Counters(engine)
    return door.guard(
        engine.module, engine.basic_optimizer, loader, dir=dir, scheduler=engine.lr_scheduler, extra=kept,
        **{**options, "strategy": "snapshot"},
    )  # fmt: skip


def _check(engine: DeepSpeedEngine, options: Mapping[str, Any]) -> None:
    """Whatever would not come back as it was is refused before anything is trained."""
    optimizer = engine.optimizer
    if type(engine) is not DeepSpeedEngine or type(optimizer) is not DeepSpeedZeroOptimizer or optimizer.cpu_offload:
        raise BadConfig(
            f"Everstep keeps ZeRO 1 and 2 without offloading, and this is a {type(engine).__name__} with a "
            f"{type(optimizer).__name__} (stage {engine.zero_optimization_stage()}): keep to engine.save_checkpoint()."
        )
    if engine.fp16_enabled() or optimizer.has_moe_layers:
        raise BadConfig("fp16 and experts have state of their own in DeepSpeed, which Everstep does not keep: use bf16")
    if options.get("strategy", "snapshot") not in ("snapshot", "auto"):
        raise BadConfig("a log would have the steps of DeepSpeed's optimizer and not the weights that it makes of them")


class _Counters:
    """Of the engine, with state_dict and load_state_dict for guard(extra=...)."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self._engine, name) for name in _COUNTERS}

    def load_state_dict(self, state: dict[str, int]) -> None:
        for name, value in state.items():
            setattr(self._engine, name, value)
