"""`everstep tune` offline: every number with its formula, its inputs and what decided it."""

from __future__ import annotations

import json
import re
from math import cbrt, sqrt
from pathlib import Path

import pytest
from said import Cli

OFFLINE = ("tune", "--state", "1.5GB", "--step", "110ms", "--mtbf", "6h")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"link": "55GB/s", "disk": "2.4GB/s", "serialize": "1.06GB/s", "free_disk": "2TB"}))
    return path


def test_every_rule_is_shown_with_what_it_was_made_of(cli: Cli, machine: Path) -> None:
    found = cli(*OFFLINE, "--machine", machine, "--json").json
    advice = {one["tuning"]["what"]: one for one in found["advice"]}
    assert len(advice) == 11
    young = advice["steps per checkpoint (Young)"]
    assert young["tuning"]["inputs"] == {"C": pytest.approx(1.5 / 1.06), "M": 21600.0, "T": 0.11}
    assert young["tuning"]["value"] == round(sqrt(2 * 1.5 / 1.06 * 21600) / 0.11)
    assert young["seconds"] == pytest.approx(young["tuning"]["value"] * 0.11)
    batch = advice["steps per batch (LowDiff)"]["tuning"]
    assert batch["value"] == round(cbrt(2 * 1.5e9 * 0.2 * 0.11 * 21600 / 2.4e9) / 0.11)
    for one in advice.values():
        assert one["tuning"]["formula"] and one["tuning"]["bound"] and one["tuning"]["inputs"]
        assert 0 <= one["waste"] < 0.05
    assert set(found["machine"]["assumed"]) >= {"network", "shared", "replay"}
    assert not set(found["machine"]["assumed"]) & {"link", "disk", "serialize", "free_disk"}
    said = cli(*OFFLINE, "--machine", machine).out
    assert "sqrt(2 C M) / T" in said
    assert re.search(r"assumed, because no --machine file says it: network=1e\+10", said)


def test_without_a_machine_what_is_assumed_is_said(cli: Cli) -> None:
    said = cli("tune", "--state", "1.5GB", "--step", "110ms")
    assert said.code == 0
    assert "M=2.16e+04 (assumed)" in said.out.replace("\n", " ") or "(assumed)" in said.out
    found = cli("tune", "--state", "1.5GB", "--step", "110ms", "--json").json
    assert "link" in found["machine"]["assumed"]
    assert found["advice"][0]["tuning"]["assumed"] == ["M"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"disk": "fast"}', "disk = 'fast' must be a rate such as '2GB/s'"),
        ('{"disc": "2GB/s"}', "disc = '2GB/s' is not known here; known are link, disk, network"),
        ('{"process_failures": 0.6, "node_failures": 0.6}', "node_failures = 0.6 must be at most 0.4"),
        ('{"replay": -1}', "replay = -1 must be a number from 0 to 10"),
        ("[1]", "must be a table"),
        ("{", "is not JSON"),
    ],
)
def test_a_wrong_machine_is_named(cli: Cli, tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(content)
    said = cli(*OFFLINE, "--machine", path)
    assert said.code == 2
    assert str(path) in said.err and named in said.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("tune",), "tune takes a run's directory, or --state and --step"),
        (("tune", "--state", "1.5GB"), "--state and --step"),
        (("tune", "--state", "much", "--step", "1s"), "--state must be a size such as '500MB'"),
        (("tune", "--state", "1GB", "--step", "-1s"), "--step must be a positive duration"),
        (("tune", "runs/x", "--state", "1GB"), "leave the directory out"),
        ((*OFFLINE, "--budget", "1.5"), "--budget must be a share between 0 and 1"),
        ((*OFFLINE, "--machine", "absent.json"), "absent.json cannot be read"),
    ],
)
def test_a_wrong_word_is_named(cli: Cli, words: tuple[str, ...], named: str) -> None:
    said = cli(*words)
    assert said.code == 2
    assert named in said.err
