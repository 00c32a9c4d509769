"""What Lightning's loops know, beside model and optimizers: counters, callbacks, metrics and the sums of an epoch.

Lightning's own checkpoints leave out what was logged in the part of an epoch that is over, and its loops treat the
epoch in which they were restarted otherwise than others (a plateau scheduler is not stepped at its end). Here they
are put where they were, and then told to forget that there was a restart.
"""

from __future__ import annotations

import builtins
from typing import Any

import torch

_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_LOGGING = ("_first_loop_iter", "_current_fx")  # whether sums begin anew with the next value
_LOGGED_AS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
              "metric_attribute")  # fmt: skip
_SUMS = ("value", "cumulated_batch_size", "_forward_cache", "has_reset", "_update_count")


class Loops:
    """With state_dict and load_state_dict, for guard(extra=...)."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        from lightning.pytorch.trainer import call

        trainer, module = self._trainer, self._trainer.lightning_module
        return {
            "fit": trainer.fit_loop.state_dict(),
            "reloaded": trainer.fit_loop._last_train_dl_reload_epoch,
            "should_stop": trainer.should_stop,
            "callbacks": call._call_callbacks_state_dict(trainer),
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
            "shown": {name: getattr(trainer._logger_connector, name) for name in _SHOWN},
            "logging": {name: getattr(trainer._logger_connector, name) for name in _LOGGING},
            "logged": [_logged(one) for one in trainer.fit_loop.epoch_loop._results.values() if one.is_tensor],
            "metrics": {name: _metric_state(metric) for name, metric in _metrics(module)},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        from lightning.pytorch.trainer import call

        trainer, self._saved = self._trainer, saved
        trainer.fit_loop.load_state_dict(saved["fit"])
        trainer.should_stop = saved["should_stop"]
        call._call_callbacks_load_state_dict(trainer, {"callbacks": saved["callbacks"]})
        if trainer.datamodule is not None and saved["datamodule"]:
            trainer.datamodule.load_state_dict(saved["datamodule"])

    def go_on(self) -> None:
        """When the epoch loop has found its place again, put back what is beside it, and let nobody see a restart."""
        fit = self._trainer.fit_loop
        epoch = fit.epoch_loop
        find_place = epoch.on_run_start

        def on_run_start(fetcher: object) -> None:
            del epoch.on_run_start  # the next epochs begin as ever
            find_place(fetcher)
            self._put_back()
            for loop in (fit, epoch, epoch.automatic_optimization, epoch.manual_optimization, epoch.val_loop):
                loop.on_iteration_done()

        epoch.on_run_start = on_run_start

    def _put_back(self) -> None:
        trainer, saved = self._trainer, self._saved
        trainer.fit_loop._last_train_dl_reload_epoch = saved["reloaded"]
        for name in _SHOWN:
            getattr(trainer._logger_connector, name).update(saved["shown"][name])
        vars(trainer._logger_connector).update(saved["logging"])
        for one in saved["logged"]:
            _log_again(trainer, one)
        metrics = dict(_metrics(trainer.lightning_module))
        for name, state in saved["metrics"].items():
            for key, value in state.items():
                setattr(metrics[name], key, _on(value, trainer.strategy.root_device))


def _logged(result: Any) -> dict[str, Any]:
    """One value of self.log(): how it was logged, and what has been added up in this epoch."""
    meta = result.meta
    return {
        **{name: getattr(meta, name) for name in _LOGGED_AS},
        "reduce_fx": meta.reduce_fx.__name__,
        "is_builtin": meta.reduce_fx.__module__ == "builtins",
        "sync_dist": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "sums": {name: getattr(result, name) for name in _SUMS if hasattr(result, name)},
    }


def _log_again(trainer: Any, saved: dict[str, Any]) -> None:
    arguments = {name: value for name, value in saved.items() if name not in ("sums", "is_builtin")}
    arguments["reduce_fx"] = getattr(builtins if saved["is_builtin"] else torch, saved["reduce_fx"])
    results, device = trainer.fit_loop.epoch_loop._results, trainer.strategy.root_device
    results.log(**arguments, value=torch.zeros((), device=device), batch_size=1, sync_dist_fn=trainer.strategy.reduce)
    for name, value in saved["sums"].items():
        setattr(results[f"{saved['fx']}.{saved['name']}"], name, _on(value, device))


def _metrics(module: Any) -> list[tuple[str, Any]]:
    from torchmetrics import Metric

    return [(name, one) for name, one in module.named_modules() if isinstance(one, Metric)]


def _metric_state(metric: Any) -> dict[str, Any]:
    """What a metric has counted: it is no buffer, so no state_dict has it."""
    return {name: getattr(metric, name) for name in (*metric._defaults, "_update_count")}


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_on(one, device) for one in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
