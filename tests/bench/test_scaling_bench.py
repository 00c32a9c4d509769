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
    targets = {target.what: target.verdict for target in scaling.fit_targets(points)}
    assert targets["blocked a capture: more for 10,000 tensors"] == verdict
    assert targets["blocked a capture: more for 20 GB, by the fit up to 3.0"] == "missed"


def test_what_the_measurements_are_too_far_apart_for_is_neither_met_nor_missed(scaling: Any) -> None:
    points = [point(scaling, *state, per_tensor_s=20e-9) for state in STATES]
    for one in points:
        one.call_s = [one.call_s[0] + noise for noise in (-5e-3, 0.0, 5e-3)]
    [target] = [one for one in scaling.fit_targets(points) if one.what == "blocked a capture: more for 10,000 tensors"]
    assert target.verdict == "not measured"


def test_a_state_that_does_not_fit_is_named_and_left_out(scaling: Any, tmp_path: Path) -> None:
    assert "GB of memory" in scaling.missing(10**15, tmp_path)
    assert scaling.missing(10**6, tmp_path) == ""


def test_the_table_of_a_device_says_what_was_seen_and_what_did_not_fit(scaling: Any) -> None:
    import gpu_scaling
    from common import Report

    entry = {"title": "1 GB", "link": {"out": 50e9, "back": 25e9}, "whole": True}
    times = {name: [0.1, 0.2] for name in scaling.Point.__annotations__ if name not in ("tensors", "bytes")}
    one = {**entry, "point": {"tensors": 256, "bytes": 10**9, **times, "seal_s": [0.025], "recall_s": [0.1]}}
    report = Report("", "", {})
    gpu_scaling.scaling_report(report, {"20 GB": {**entry, "title": "20 GB", "left_out": "left out: no"}, "1 GB": one})
    table = report.tables[0]
    assert [row[0] for row in table.rows] == ["1 GB", "20 GB"]
    assert len(table.headers) == len(table.rows[0]) == len(table.rows[1])
    cells = dict(zip(table.headers[:10], table.rows[0], strict=False))
    assert cells["copied and sealed, GB/s"] == "40" and cells["of the link"] == "80 %"
    assert table.rows[0][12:14] == ["10", "40 %"]
    assert table.rows[1][-1] == "left out: no"
    assert report.targets[0].what == "processor time of a cut, 1 GB"
