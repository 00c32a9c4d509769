"""The bench on a device: a cell of its tables says what was seen, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def frequency(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_frequency

    return gpu_frequency


def shown(frequency: Any, interval: int, *, steps: int, durable: int, cost: float = 0.01, ended: bool = False) -> str:
    kept = {"steps": steps, "kept": steps, "durable": durable}
    run = frequency.Run(interval, plain_s=[1.0], kept_s=[1 + cost], unsynced_s=[1.0], kept=kept)
    return str(frequency._interval(frequency.Cell([run], ended=ended), durable=True))


def test_a_run_that_is_too_short_to_see_two_says_so(frequency: Any) -> None:
    assert shown(frequency, 1, steps=27, durable=0) == "0 in 27 (1.0%)"
    assert shown(frequency, 1, steps=36, durable=1) == "1 in 36 (1.0%)"
    assert shown(frequency, 1, steps=36, durable=9) == "4 (1.0%)"


def test_who_was_asked_to_save_once_in_so_many_steps_has_that_interval_and_never_a_shorter_one(frequency: Any) -> None:
    assert shown(frequency, 44, steps=44, durable=1) == "44 (1.0%)"
    assert shown(frequency, 2, steps=51, durable=27) == "2 (1.0%)"


def test_an_interval_that_is_only_a_bound_is_shown_as_one(frequency: Any) -> None:
    assert shown(frequency, 7, steps=91, durable=13, ended=True) == "<= 7 (1.0%)"
    assert shown(frequency, 16, steps=64, durable=4, cost=0.742) == "> 16 (74.2%)"


def test_modes_that_leave_no_step_on_the_disk_have_no_row_among_those_that_do(frequency: Any) -> None:
    from common import Report

    kept = {"steps": 9, "kept": 9, "durable": 0}
    cell = {"runs": [{"interval": 1, "plain_s": [1.0], "kept_s": [1.0], "unsynced_s": [1.0], "kept": kept}]}
    cells = {name: {**cell, "error": "", "ended": False} for name in ("Everstep, host", "Everstep, disk")}
    report = Report("", "", {})
    entry = {"title": "a model", "step_s": 0.1, "link_bytes_s": 1e9, "disk_bytes_s": 1e9, "cells": cells}
    frequency.frequency_report(report, {"gpt2": entry})
    kept_table, durable_table = report.tables[:2]
    assert [row[0] for row in kept_table.rows] == ["Everstep, host", "Everstep, disk", "LightCheck, published"]
    assert durable_table.rows == [["Everstep, disk", "0 in 9 (0.0%)"]]


def test_the_tables_that_are_committed_are_those_of_their_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu

    committed = {name: BENCH / "results" / f"gpu-{name}.md" for name in gpu.PARTS}
    committed = {name: path for name, path in committed.items() if path.exists()}
    assert {"frequency", "recovery"} <= committed.keys()
    for name, path in committed.items():
        (tmp_path / f"gpu-{name}.json").write_bytes(path.with_suffix(".json").read_bytes())
        gpu.write_again(name, tmp_path)
        assert (tmp_path / path.name).read_text() == path.read_text(), f"python bench/gpu.py {name} --tables"
    (tmp_path / "gpu-all.json").write_bytes((BENCH / "results" / "gpu-all.json").read_bytes())
    gpu.write_all_again(tmp_path)
    assert (tmp_path / "gpu-all.md").read_text() == (BENCH / "results" / "gpu-all.md").read_text()


class Said:
    """A sampler that says one thing of every span, or fails."""

    def __init__(self, percent: float | None) -> None:
        self._percent = percent

    def values(self, spans: list[tuple[float, float]]) -> tuple[list[tuple[float, float]], str]:
        if self._percent is None:
            raise RuntimeError("the sampler has ended")
        return [(begin, self._percent) for begin, _ in spans], "samples"


def test_how_busy_a_device_is_stands_in_a_table_of_its_own_and_in_the_picture(frequency: Any, tmp_path: Path) -> None:
    from types import SimpleNamespace

    import gpu_utilisation

    case, clock = SimpleNamespace(title="a model", timed=(0.0, 0.0)), 0.0

    def block(steps: int) -> float:
        nonlocal clock
        case.timed = (clock, clock + 1.0)
        clock += 1.0
        return 1.0 / steps

    busy = [gpu_utilisation.watched(case, block, 0.1, Said(percent)) for percent in (99.0, 40.0, None)]
    assert clock == 9.0 and busy[2] is None  # three seconds each
    cells = {"Everstep, host": {"busy": busy[1]}, "Everstep, disk": {"busy": busy[2]}, "torch.save": {}}
    models = {"gpt2": {"title": "a model", "busy": busy[0], "cells": cells}, "bert": {"title": "another", "cells": {}}}
    table = gpu_utilisation.busy_table(models)
    assert table is not None
    assert table.rows == [
        ["a model", "nothing kept", "99.0", "99.0"],
        ["a model", "Everstep, host", "40.0", "40.0"],
    ]
    gpu_utilisation.draw_busy(models, tmp_path / "busy.svg")
    assert "Everstep, host" in (tmp_path / "busy.svg").read_text()
    assert gpu_utilisation.busy_table({"bert": {"title": "another", "cells": {}}}) is None


def test_a_block_that_fails_while_somebody_looks_loses_nothing_but_the_look(frequency: Any) -> None:
    from types import SimpleNamespace

    import gpu_utilisation
    from gpu_ways import Overrun

    def fails(steps: int) -> float:
        raise OSError("no room")

    def is_late(steps: int) -> float:
        raise Overrun("the time of the model was over")

    assert gpu_utilisation.watched(SimpleNamespace(title="a model"), fails, 0.1, Said(1.0)) is None
    with pytest.raises(Overrun):
        gpu_utilisation.watched(SimpleNamespace(title="a model"), is_late, 0.1, Said(1.0))
