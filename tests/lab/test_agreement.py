"""Simulated and real: the machine is measured by one run, and every other is foretold from that alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_up import made, played, started, step, struck_once
from tables import table

from everstep.errors import BadConfig, EverstepError
from everstep.lab import agreement
from everstep.lab.agreement import Calibration
from everstep.lab.injections import Injection
from everstep.lab.rhythm import rhythm_of
from everstep.lab.scenario import scenario_of

KILL = Injection(do="kill", target="rank", who="0", step=1)
REBOOT = Injection(do="kill", target="node", step=1, wipe=("memory",))
LOST = Injection(do="kill", target="node", step=1, wipe=("memory", "disk"))
SCENARIO = scenario_of(
    table(
        cluster={"nodes": 1, "gpus_per_node": 2, "repair": 0}, failures=[],
        strategies=[{"kind": "snapshot", "protect": "none", "disk_every": 20}],
        inject={"acts": [{"do": "kill", "rank": 0, "step": 30}]},
    )
)  # fmt: skip


def test_the_same_acts_on_a_virtual_clock_lose_what_the_disk_did_not_have() -> None:
    assert {way.source: way.every for way in rhythm_of(SCENARIO, SCENARIO.strategies[0], 1).ways}["disk"] == 20
    calibration = Calibration(
        steps=100, step_s=0.1, state_bytes=10**7, copy_s=0.01, disk_bytes_per_s=1e9, restart_s=3.0
    )

    def foretold(*struck: tuple[Injection, int]) -> tuple[int, float, int]:
        outcome = agreement.foretold(SCENARIO, [made(act, 0.05, at) for act, at in struck], calibration)
        wasted_s = sum(seconds for cause, seconds in outcome.wasted_s.items() if cause != "stall")
        return outcome.steps_lost, wasted_s, outcome.steps

    assert foretold((KILL, 30)) == (0, pytest.approx(3.1, abs=0.05), 100)
    assert foretold((REBOOT, 55)) == (15, pytest.approx(4.6, abs=0.1), 100)
    assert foretold((LOST, 25)) == (25, pytest.approx(5.6, abs=0.1), 100)
    assert foretold((KILL, 15), (REBOOT, 30), (REBOOT, 50)) == (20, pytest.approx(11.3, abs=0.2), 100)


def test_a_run_is_foretold_from_what_another_one_measured_and_from_nothing_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = {
        "calibration": struck_once(KILL, at=10, back_to=10),
        "alike": struck_once(REBOOT, at=30, back_to=20),
        "slower": struck_once(REBOOT, at=30, back_to=20, restart_s=9.0),
        "lost more": struck_once(REBOOT, at=30, back_to=15),
    }
    monkeypatch.setattr(agreement, "_play", lambda command, directory, *rest: runs[directory.name])
    calibration = agreement.calibrate([], Path())
    assert (calibration.steps, calibration.state_bytes) == (60, 10**7)
    assert (calibration.step_s, calibration.copy_s) == (pytest.approx(0.1), pytest.approx(0.01))
    assert (calibration.restart_s, calibration.disk_bytes_per_s) == (pytest.approx(3.0), pytest.approx(1e9))

    names = ("alike", "slower", "lost more")
    alike, slower, lost_more = agreement.agree({Path(name): SCENARIO for name in names}, [], calibration)
    assert alike.agrees and alike.real_lost == alike.simulated_lost == 10
    assert alike.real_wasted_s == pytest.approx(4.25)
    assert alike.simulated_wasted_s == pytest.approx(4.05, abs=0.05)
    assert slower.simulated_wasted_s == pytest.approx(alike.simulated_wasted_s, abs=1e-6)
    assert slower.real_wasted_s == pytest.approx(10.25)
    assert not slower.agrees and slower.off == pytest.approx(slower.simulated_wasted_s / 10.25 - 1)
    assert (lost_more.real_lost, lost_more.simulated_lost) == (15, 10)
    assert abs(lost_more.off) < agreement.WITHIN and not lost_more.agrees


def test_steps_in_which_something_was_done_or_a_life_began_do_not_count_as_steps() -> None:
    events = [started(0.9, 0, 0), started(4.0, 0, 2, pid=20)]
    ends = ((10, 1, 1.5), (10, 2, 1.6), (20, 3, 6.0), (20, 4, 6.1), (20, 5, 9.0), (20, 6, 9.1))
    spans, before = [], 0.9
    for pid, number, end in ends:
        spans.append(step(0, pid, number, end, seconds=end - before))
        before = end
    stop = Injection(do="stop", target="rank", who="0", step=4, for_s=2.0)
    found = played(list(events), spans, made(KILL, 1.65, 2), made(stop, 6.15, 4))
    assert agreement._steps(found)[1] == pytest.approx(0.1)
    with pytest.raises(EverstepError, match="nobody knows how long one takes"):
        agreement._steps(played(list(events), spans[:1], made(KILL, 1.65, 2)))


def test_what_cannot_be_compared_is_said_before_anything_is_started(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    whole = (Path(__file__).parents[2] / "examples/inject/kill.toml").read_text()
    for changed, said in (
        (whole.replace("nodes = 1\n", "nodes = 2\n"), "cluster.nodes = 2 must be 1"),
        (whole.replace('do = "kill"', 'do = "stop"'), "stop rank 1: only the deaths of ranks and nodes can be simul"),
        (whole[whole.index("[inject]") :], "needs cluster, training and strategies, too"),
    ):
        path.write_text(changed)
        with pytest.raises(BadConfig, match=said):
            agreement.planned([str(path)], tmp_path / "runs")
    path.write_text(whole)
    assert list(agreement.planned([str(path)], tmp_path / "runs")) == [tmp_path / "runs/one"]
    with pytest.raises(BadConfig, match="another run is to have the directory"):
        agreement.planned([str(path), str(path)], tmp_path / "runs")
    taken = tmp_path / "calibration.toml"
    taken.write_text(whole)
    with pytest.raises(BadConfig, match="another run is to have the directory"):
        agreement.planned([str(taken)], tmp_path / "runs")
    (tmp_path / "runs/calibration/old").mkdir(parents=True)
    with pytest.raises(BadConfig, match="calibration is not empty: each scenario needs a run that begins there"):
        agreement.planned([str(path)], tmp_path / "runs")


def test_a_step_that_took_longer_than_those_that_were_measured_is_not_taken_for_two() -> None:
    calibration = Calibration(
        steps=100, step_s=0.1, state_bytes=10**7, copy_s=0.01, disk_bytes_per_s=1e9, restart_s=3.0
    )
    late = replace(made(REBOOT, 5.0, 50), time=6.0)
    assert agreement.foretold(SCENARIO, [late], calibration).steps_lost == 10
