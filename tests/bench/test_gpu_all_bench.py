"""The bench on a device as a whole: what is there is not measured again, what overruns is ended, what it left goes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
OLD, NEW = "2026-11-16 11:24 UTC", "2026-11-18 09:12 UTC"


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def asked(out: Path, since: str = "", only: str = "", method: str = "") -> argparse.Namespace:
    return argparse.Namespace(out=out, since=since, only=only, method=method)


def found(out: Path, part: str, models: dict[str, Any], targets: list[dict[str, Any]] | None = None) -> None:
    told = {"data": {"models": models}, "targets": targets or []}
    (out / f"gpu-{part}.json").write_text(json.dumps(told))


def cells(date: str, *methods: str, error: str = "") -> dict[str, Any]:
    return {"cells": {one: {"error": error} for one in methods}, "dates": dict.fromkeys(methods, date)}


def test_methods_that_were_found_well_since_a_day_are_not_run_again(tmp_path: Path) -> None:
    import gpu

    found(tmp_path, "frequency", {
        "bert": cells(NEW, *gpu.METHODS),
        "gpt2": cells(NEW, "Everstep, host", "torch.save"),
        "vgg16": cells(OLD, *gpu.METHODS),
        "alexnet": cells(NEW, "Everstep, host", "torch.save", error="OSError: it broke"),
        "gpt2-xl": cells(NEW, "Everstep, replica", error="left out: it needs too much"),
    })  # fmt: skip
    plan = gpu.missing("frequency", asked(tmp_path, since="2026-11-18"))
    assert "bert" not in plan
    assert set(gpu.METHODS) - set(plan["gpt2"]) == {"Everstep, host", "torch.save"}
    assert plan["vgg16"] == plan["resnet18"] == list(gpu.METHODS)
    assert "Everstep, host" in plan["alexnet"] and "torch.save" not in plan["alexnet"]  # that others fail is a result
    assert "Everstep, replica" not in plan["gpt2-xl"]
    assert next(iter(plan)) == "gpt2-xl"  # least known, so first
    assert all(left == list(gpu.METHODS) for left in gpu.missing("frequency", asked(tmp_path)).values())


def test_a_model_whose_lives_were_not_all_seen_is_run_again(tmp_path: Path) -> None:
    import gpu

    whole = {"lives": {"memory": {"error": ""}}, "made": [{"date": NEW}], "whole": True}
    found(tmp_path, "recovery", {"gpt2": whole, "gpt2-xl": {**whole, "whole": False}})
    assert list(gpu.missing("recovery", asked(tmp_path, since="2026-11-18"))) == ["gpt2-xl"]
    assert list(gpu.missing("recovery", asked(tmp_path, since="2026-11-18 10:00"))) == ["gpt2", "gpt2-xl"]


def test_what_a_call_finds_has_its_date_and_what_it_did_not_run_keeps_its_own() -> None:
    from gpu_merge import is_there, merge

    first = merge({}, {"cells": {"a": {}, "b": {}}}, {"date": OLD})
    second = merge(first, {"cells": {"b": {}}}, {"date": NEW})
    assert second["dates"] == {"a": OLD, "b": NEW}
    assert [is_there(second, "2026-11-17", one) for one in ("a", "b", "c")] == [False, True, False]


def test_a_search_that_its_time_has_ended_keeps_what_a_longer_one_has_found() -> None:
    from gpu_merge import merge

    def searched(*intervals: int, ended: bool) -> dict[str, Any]:
        return {"cells": {"a": {"runs": [{"interval": one} for one in intervals], "ended": ended}}}

    def shown(entry: dict[str, Any]) -> tuple[list[int], bool, list[str]]:
        cell = entry["cells"]["a"]
        return [run["interval"] for run in cell["runs"]], cell["ended"], [one["date"] for one in entry["made"]]

    longer = merge({}, searched(1, 80, 64, ended=False), {"date": OLD})
    assert shown(merge(longer, searched(1, ended=True), {"date": NEW})) == ([1, 80, 64], False, [OLD, NEW])
    assert shown(merge(longer, searched(1, 40, ended=False), {"date": NEW})) == ([1, 40], False, [NEW])
    twice = merge(merge(longer, searched(1, ended=True), {"date": NEW}), searched(1, ended=True), {"date": "later"})
    assert shown(twice) == ([1, 80, 64], False, [OLD, "later"])


def test_a_table_that_is_cut_off_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from common import Report

    Report("whole", "", {}).save(tmp_path, "gpu-x")

    def broken(_: Path, text: str) -> None:
        with open(_, "w") as file:
            file.write(text[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", broken)
    with pytest.raises(KeyboardInterrupt):
        Report("other", "", {}).save(tmp_path, "gpu-x")
    assert json.loads((tmp_path / "gpu-x.json").read_text())["title"] == "whole"


def test_a_method_that_overruns_is_ended_and_nothing_is_rung_later() -> None:
    from gpu_ways import Overrun, limited

    with pytest.raises(Overrun), limited(0.2):
        time.sleep(30)
    with limited(0.2):
        pass
    time.sleep(0.4)


def test_a_method_without_room_is_named_and_left_out(tmp_path: Path) -> None:
    import torch
    from gpu_merge import has_failed
    from gpu_models import Case
    from gpu_ways import METHODS, why_left_out

    model = torch.nn.Linear(1 << 20, 1 << 20, device="meta")  # four terabytes that are nowhere
    case = Case("", model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: torch.zeros(()))
    for name, method in METHODS.items():
        reason = why_left_out(case, method, tmp_path)
        assert "GB of memory" in reason, name
        assert not has_failed({"cells": {name: {"error": reason}}})
    assert has_failed({"cells": {"Everstep, host": {"error": "OSError: it broke"}}})


def test_of_a_large_model_what_matters_most_comes_first() -> None:
    from gpu_frequency import ordered
    from gpu_ways import METHODS

    large, other = (ordered(name, list(METHODS)) for name in ("gpt2-xl", "vgg16"))
    assert other == list(METHODS)
    assert sorted(large) == sorted(METHODS)
    assert large[:2] == ["Everstep, dense log", "Everstep, host"]


def test_a_model_has_its_own_time_and_what_those_before_it_have_left_and_nobody_more_than_there_is() -> None:
    from gpu_frequency import LONGEST_S, MODELS_S, ends_of

    first, second, third = (MODELS_S[name] for name in ("resnet18", "vgg16", "bert"))
    ends = ends_of(["resnet18", "vgg16", "bert"], LONGEST_S, 100.0, 1000.0)
    assert list(ends.values()) == [100 + first, 100 + first + second, 100 + first + second + third]
    ends = ends_of(["resnet18", "vgg16"], 2 * LONGEST_S, 100.0, 100 + 2 * first + 5)
    assert list(ends.values()) == [100 + 2 * first, 100 + 2 * first + 5]


def test_every_part_of_all_has_a_unit_and_every_model_of_it_one() -> None:
    import gpu
    from gpu_all import UNITS

    assert {unit.part for unit in UNITS} == set(gpu.PARTS)
    for part in gpu.PARTS:
        units = [unit for unit in UNITS if unit.part == part]
        names = [name for unit in units for name in unit.only or gpu.PARTS[part].names]
        assert sorted(names) == sorted(gpu.PARTS[part].names)


def test_all_says_of_each_part_whether_it_is_there_and_passes_over_those_without_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu
    import gpu_all

    begun: list[str] = []
    monkeypatch.setattr(gpu_all, "_ended", lambda part, limit_s, given: begun.append(part) or gpu_all.WELL)
    whole = {"made": [{"date": NEW}], "exact": True}
    found(
        tmp_path,
        "exact",
        {"gpt2": whole},
        [{"what": "gpt2", "wanted": "the same bits", "measured": "others", "met": False}],
    )
    given = asked(tmp_path, since="2026-11-18", only="gpt2")
    given.part, given.deadline = ["all"], time.monotonic() + 1000
    assert gpu_all.bench_all(list(gpu.PARTS), given, gpu.missing)
    assert begun == ["frequency", "recovery", "paced"]
    told = json.loads((tmp_path / "gpu-all.json").read_text())
    said = told["tables"][0]["rows"]
    assert {row[0]: row[3] for row in said} == {**dict.fromkeys(begun, gpu_all.WELL), "exact": gpu_all.THERE}
    assert [(one["what"], one["met"]) for one in told["targets"]] == [("exact: gpt2", False)]


def test_what_a_unit_has_left_goes_and_nothing_else() -> None:
    from gpu_all import end_unit
    from gpu_methods import UNIT

    def sleeper(token: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", "import time; time.sleep(60)"]
        return subprocess.Popen(words, env={**os.environ, UNIT: token}, start_new_session=True)

    tokens = [os.urandom(4).hex() for _ in range(2)]
    ours, other = map(sleeper, tokens)
    folders = [Path("/dev/shm") / f"everstep-bench-{token}-x" for token in tokens]
    try:
        for folder in folders:
            folder.mkdir()
        end_unit(tokens[0])
        ours.wait(timeout=10)
        assert other.poll() is None
        assert [folder.exists() for folder in folders] == [False, True]
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()
        for folder in folders:
            if folder.exists():
                folder.rmdir()
