"""The bench of scaling: a cost is taken apart into what bytes and what tensors take, and so is the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
STATES = [(64, 256), (1024, 256), (16384, 256), (256, 100), (256, 1000), (256, 3000)]  # tensors and megabytes


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import scaling

    return scaling


def point(scaling: Any, tensors: int, megabytes: int, per_tensor_s: float) -> Any:
    cost = [0.3e-3 + 2e-3 * megabytes / 1000 + per_tensor_s * tensors + noise for noise in (0.0, 1e-6, -1e-6)]
    times = {name: cost for name in scaling.Point.__annotations__ if name not in ("tensors", "bytes", "gate_s")}
    return scaling.Point(tensors=tensors, bytes=megabytes * 10**6, gate_s=[0.0] * 3, **times)


def test_what_bytes_and_what_tensors_cost_is_told_apart(scaling: Any) -> None:
    points = [point(scaling, *state, per_tensor_s=20e-9) for state in STATES]
    found = scaling.fits(points, scaling.COSTS["blocked a capture"])
    assert found["a"].median == pytest.approx(0.3e-3, rel=0.02)
    assert found["per GB"].median == pytest.approx(2e-3, rel=0.02)
    assert found["per 10,000 tensors"].median == pytest.approx(0.2e-3, rel=0.02)


@pytest.mark.parametrize(("per_tensor_s", "verdict"), [(20e-9, "met"), (200e-9, "missed")])
def test_a_cost_per_tensor_above_the_budget_is_missed(scaling: Any, per_tensor_s: float, verdict: str) -> None:
    points = [point(scaling, *state, per_tensor_s=per_tensor_s) for state in STATES]
    targets = {target.what: target.verdict for target in scaling._fit_targets(points)}
    assert targets["blocked a capture: more for 10,000 tensors"] == verdict
    assert targets["blocked a capture: more for 20 GB, by the fit up to 3.0"] == "missed"


def test_what_the_measurements_are_too_far_apart_for_is_neither_met_nor_missed(scaling: Any) -> None:
    points = [point(scaling, *state, per_tensor_s=20e-9) for state in STATES]
    for one in points:
        one.call_s = [one.call_s[0] + noise for noise in (-5e-3, 0.0, 5e-3)]
    [target] = [one for one in scaling._fit_targets(points) if one.what == "blocked a capture: more for 10,000 tensors"]
    assert target.verdict == "not measured"


def test_a_state_that_does_not_fit_is_named_and_left_out(scaling: Any, tmp_path: Path) -> None:
    assert "GB of memory" in scaling._missing(10**15, tmp_path)
    assert scaling._missing(10**6, tmp_path) == ""
