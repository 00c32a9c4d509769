"""Accelerate: a loop over prepared objects, guarded by one call that learns all of them from the Accelerator.

Models, optimizers, schedulers and whatever was registered for checkpointing come back as they were. The count that
gradient accumulation goes by need not: it begins anew after every step. A prepared loader reads a batch ahead, so it
is not its sampler that is set back: as many batches are skipped as were given to the loop. On one device, with DDP
and with FSDP2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from everstep import run as door
from everstep.capture.position import generators_of
from everstep.errors import BadConfig
from everstep.integrations.versions import need

need("accelerate", "everstep.integrations.accelerate", least="1.10", below="2")

from accelerate import Accelerator, DistributedType, skip_first_batches  # noqa: E402

_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)  # each rank has all of the state


def guard(
    accelerator: Accelerator, loader: Any, *, dir: str | Path, extra: Mapping[str, object] | None = None, **options: Any
) -> door.Run:
    """Guard a loop over `loader`, which was prepared like the rest. `extra` and `options`: as for everstep.guard()."""
    if accelerator.distributed_type not in _WHOLE and not accelerator.is_fsdp2:
        raise BadConfig(
            "Everstep keeps the state of one device, of DDP and of FSDP2 (fsdp_version=2) with Accelerate, and this is "
            f"{accelerator.distributed_type}: start it without, or keep to accelerator.save_state()."
        )
    if not accelerator._optimizers or loader not in accelerator._dataloaders:
        raise BadConfig("prepare model, optimizer and loader with accelerator.prepare() first, and give that loader")
    if getattr(loader, "use_stateful_dataloader", False):
        raise BadConfig("use_stateful_dataloader is not needed and does not work with Everstep: leave it out")
    kept = extra if isinstance(extra, dict) else dict(extra or {})
    kept |= {f"accelerate.{number}": one for number, one in enumerate(accelerator._custom_objects)}
    return door.guard(
        accelerator._models, [one.optimizer for one in accelerator._optimizers], _Skipping(loader), dir=dir,
        scheduler=accelerator._schedulers, scaler=accelerator.scaler, extra=kept, **options,
    )  # fmt: skip


class _Skipping:
    """A prepared loader with state_dict and load_state_dict: a pass that goes on skips what was given."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._generators = loader, generators_of(loader)
        self._began: list[Any] = []  # of the generators
        self._given = self._skip = 0

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self._given, "generators": self._began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skip, self._began = state["given"], state["generators"]
        for generator, began in zip(self._generators, self._began, strict=True):
            generator.set_state(began)

    def __iter__(self) -> Iterator[Any]:
        """The first batch of a pass that goes on is read at once, with the random state that the pass began with."""
        skip, self._skip = self._skip, 0
        self._given = skip
        if not skip:
            self._began = [generator.get_state() for generator in self._generators]
            return self._counted(iter(self._loader))
        rest = iter(skip_first_batches(self._loader, skip))
        return self._counted(itertools.chain(list(itertools.islice(rest, 1)), rest))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._given += 1
            yield batch
