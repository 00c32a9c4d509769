"""Scenarios: what is wrong in one is named with file, key, value and what would be right."""

from __future__ import annotations

from copy import deepcopy
from math import inf
from pathlib import Path
from typing import Any

import pytest
from tables import table

from everstep.errors import BadConfig
from everstep.lab.scenario import load_scenario, scenario_of, shipped
from everstep.lab.trace import Visit, read_trace


def changed(where: str, value: Any) -> dict[str, Any]:
    found = deepcopy(table())
    *folders, last = where.split(".")
    place: Any = found
    for name in folders:
        place = place[int(name)] if name.isdigit() else place[name]
    place[last] = value
    return found


@pytest.mark.parametrize(
    ("where", "value", "named"),
    [
        ("duration", "-4h", "duration = '-4h' must be a duration such as '30s' or '2h', or a number of sec"),
        ("duration", -3, "duration = -3 must be a duration"),
        ("training.step", 0, "training.step = 0 must be a duration"),
        ("training.state", "8", "training.state = '8' must be a size such as '1.5GB'"),
        ("cluster.nodes", 0, "cluster.nodes = 0 must be a whole number from 1 to 100000"),
        ("cluster.nodes", 2.5, "cluster.nodes = 2.5 must be a whole number"),
        ("cluster.nodes", True, "cluster.nodes = True must be a whole number"),
        ("cluster.node", 3, "cluster.node = 3 is not known here; known are nodes, gpus_per_node"),
        ("cluster", 3, "cluster = 3 must be a table"),
        ("recovery.restart", "soon", "recovery.restart = 'soon' must be a duration"),
        ("machine.disk", "-1GB/s", "machine.disk = '-1GB/s' must be a rate such as '2GB/s'"),
        ("training.overhead_budget", 1.5, "training.overhead_budget = 1.5 must be a number from 1e-06 to 0.999"),
        ("failures.0.mtbf", "0h", "failures[0].mtbf = '0h' must be a duration"),
        ("failures.0.kind", "gpu", "failures[0].kind = 'gpu' must be one of process, node, rack, cluster"),
        ("failures.1.law", "normal", "failures[1].law = 'normal' must be one of exponential, weibull"),
        ("failures.0.shape", 2, "failures[0].shape = 2 is not known here"),
        ("strategies.0.kind", "magic", "strategies[0].kind = 'magic' must be one of torch-save, dcp"),
        ("strategies.0.every", 0, "strategies[0].every = 0 must be steps from 1, a duration such as '30m', or one of"),
        ("strategies.0.on_loss", ["pray"], "strategies[0].on_loss = ['pray'] must be a list out of spare, forward"),
        ("strategies.0.group", 5, "strategies[0].group = 5 must be a whole number from 2 to 4: no two members"),
        ("strategies.0.group", 1, "strategies[0].group = 1 must be a whole number from 2"),
        ("strategies", [], "strategies is missing"),
        ("strategies", [{"kind": "dcp"}, {"kind": "dcp"}], "must have a different name each"),
        ("sweep", {"nodes": [0]}, "sweep.nodes = [0] must be a list of whole numbers from 1 to 100000"),
        ("seeds", 0, "seeds = 0 must be a whole number from 1"),
        ("colour", "red", "colour = 'red' is not known here; known are cluster"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(where: str, value: Any, named: str) -> None:
    with pytest.raises(BadConfig) as refused:
        scenario_of(changed(where, value), file="run7.toml")
    assert str(refused.value).startswith("run7.toml: ")
    assert named in str(refused.value)


def test_nobody_in_the_same_rack_protects() -> None:
    with pytest.raises(BadConfig, match=r"protect = 'partner' must be 'none': all 8 nodes are in one rack"):
        scenario_of(
            table(
                cluster={"nodes": 8, "nodes_per_rack": 8},
                strategies=[{"kind": "snapshot", "protect": "partner"}],
            )
        )


def test_a_key_that_must_be_there_is_named() -> None:
    found = table()
    del found["duration"]
    with pytest.raises(BadConfig, match=r"scenario: duration is missing; it must be a duration"):
        scenario_of(found)


def test_those_that_ship_can_be_loaded_and_say_what_they_are() -> None:
    names = shipped()
    assert list(names) == ["llama3", "preemptible", "spares", "sweep"]
    for name, title in names.items():
        found = load_scenario(name)
        assert found.title == title and found.file == name
    llama = load_scenario("llama3")
    assert llama.cluster.nodes * llama.cluster.gpus_per_node == 16_384
    assert llama.duration_s / llama.mtbf_s == pytest.approx(419, abs=0.1)
    sweep = load_scenario("sweep")
    assert [nodes * 8 for nodes in (sweep.sweep[0], sweep.sweep[-1])] == [1_000, 100_000]
    per_gpu_hour = 3600 / sweep.with_nodes(1).mtbf_s / 8
    assert per_gpu_hour == pytest.approx(2.0e-5, rel=0.03)


def test_a_name_that_is_none_and_a_file_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"neither a .toml file nor a scenario that ships: llama3"):
        load_scenario("lama3")
    with pytest.raises(BadConfig, match="cannot be read"):
        load_scenario(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("duration = ")
    with pytest.raises(BadConfig, match="is not TOML"):
        load_scenario(tmp_path / "broken.toml")


# -- traces


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_a_trace_is_seats_that_lose_their_nodes_and_get_others(tmp_path: Path) -> None:
    path = write(
        tmp_path, "time,event,node\n0,add,a\n5,add,b\n6,add,c\n10,remove,b\n20,remove,a\n35,add,d\n40,remove,c\n"
    )
    visits, most = read_trace(path, unit_s=1.0, nodes=2)
    # a and b sit, c stands by and takes b's seat at once; a's seat is empty until d comes; c is never replaced.
    assert visits == (
        Visit(seat=1, lost_s=5.0, back_s=5.0), Visit(seat=0, lost_s=15.0, back_s=30.0),
        Visit(seat=1, lost_s=35.0, back_s=inf),
    )  # fmt: skip
    assert most == 3
    assert read_trace(path, unit_s=0.001, nodes=2)[0][1].lost_s == pytest.approx(0.015)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("0,add,a\n5,,a\n", "line 2: '5,,a' must be time, add or remove, node"),
        ("0,add,a\n\n", "line 2: '' must be time"),
        ("0,add,a\n-5,remove,a\n", "line 2: time = '-5' must be a number from 0"),
        ("9,add,a\n5,remove,a\n", "line 2: time = '5' must be a number from 9"),
        ("0,add,a\nsoon,remove,a\n", "line 2: time = 'soon' must be a number"),
        ("0,add,a\n1,leave,a\n", "line 2: event = 'leave' must be add or remove"),
        ("0,add,a\n1,remove,b\n", "line 2: node = 'b' is not there, so it cannot remove: is a row missing?"),
        ("0,add,a\n1,add,a\n", "line 2: node = 'a' is already there"),
    ],
)
def test_a_trace_that_cannot_have_happened_is_refused(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(BadConfig) as refused:
        read_trace(write(tmp_path, text), unit_s=1.0, nodes=1)
    assert named in str(refused.value) and "trace.csv" in str(refused.value)


def test_a_trace_must_have_as_many_nodes_as_the_cluster(tmp_path: Path) -> None:
    write(tmp_path, "0,add,a\n5,add,b\n")
    source = [{"law": "trace", "file": "trace.csv"}]
    with pytest.raises(BadConfig, match=r"failures\[0\].file = 'trace.csv' must be a trace with 8 nodes at once"):
        scenario_of(table(failures=source), folder=tmp_path)
    with pytest.raises(BadConfig, match=r"failures\[0\].unit = 'years' must be one of ms, s, m, h"):
        scenario_of(table(failures=[{**source[0], "unit": "years"}]), folder=tmp_path)
