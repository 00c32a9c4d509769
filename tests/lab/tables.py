"""Scenarios for tests, as tables: small, and changed in one place at a time."""

from __future__ import annotations

from typing import Any


def table(**changes: Any) -> dict[str, Any]:
    """Eight nodes, four hours, a node lost every half an hour."""
    found: dict[str, Any] = {
        "title": "small",
        "duration": "4h",
        "seeds": 2,
        "cluster": {"nodes": 8, "gpus_per_node": 2, "nodes_per_rack": 2, "spares": 2, "repair": "1h"},
        "training": {"step": "1s", "state": "8GB"},
        "machine": {"link": "20GB/s", "disk": "1GB/s", "network": "5GB/s", "shared": "2GB/s", "serialize": "1GB/s"},
        "recovery": {"detect": "1s", "timeout": "30s", "restart": "60s", "regroup": "2s"},
        "failures": [{"kind": "node", "mtbf": "30m"}, {"kind": "process", "mtbf": "45m"}],
        "strategies": [{"kind": "snapshot"}],
    }
    return {**found, **changes}


EVERY_KIND = [
    {"name": kind, "kind": kind}
    for kind in ("torch-save", "dcp", "checkfreq", "in-memory", "scr", "snapshot", "log", "replica", "auto")
]
EVERY_POLICY = [
    {"name": "spare", "kind": "snapshot", "on_loss": ["spare", "restart"]},
    {"name": "spare, rollback", "kind": "log", "on_loss": ["spare", "rollback", "restart"]},
    {"name": "rollback", "kind": "snapshot", "on_loss": ["rollback", "restart"]},
    {"name": "forward", "kind": "snapshot", "on_loss": ["forward", "rollback", "restart"]},
    {"name": "parity", "kind": "snapshot", "protect": "parity", "group": 4, "on_loss": ["spare", "rollback"]},
]
