"""Prometheus asks the keeper of a real run, and hears what the run's own files say."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from lives import STEPS, live, must_finish, run_directory, run_of, told, train_log, train_tiny
from metered import Scraped, address_of, read, scrape, scraped, until

import everstep
from everstep.errors import BadConfig
from everstep.events import Degraded, Finished, MetricsServed, Persisted
from everstep.keeper.client import keeper_pid
from everstep.keeper.keeper import Keeper
from everstep.keeper.metrics import METRICS, Cuts, Tally
from everstep.launch import metrics_address
from everstep.store.disk import DiskTier
from everstep.timeline import unmarked

EXAMPLES = Path(__file__).parents[2] / "examples"
ANY_PORT = "127.0.0.1:0"


def asked(
    directory: Path, at: int, look: Callable[[everstep.Run], Any] = lambda run: None, train: Any = train_tiny,
    metrics: str = ANY_PORT, **options: Any,
) -> Callable[[], dict[str, Any]]:  # fmt: skip
    """A life whose keeper is asked while a step is computed, after what was done before it is durable."""
    seen: dict[str, Any] = {}

    def at_step(run: everstep.Run) -> None:
        if run.step == at:
            run.wait("durable")
            seen["looked"] = look(run)
            seen["text"] = scrape(address_of(directory))

    def life() -> dict[str, Any]:
        os.environ["EVERSTEP_METRICS"] = metrics
        return {**train(directory, at_step, **{"keeper": "process", **options}), **seen}

    return life


# -- what is said


def test_a_run_is_told_in_numbers_that_its_events_confirm() -> None:
    with run_directory() as directory:
        said = Scraped(must_finish(asked(directory, 4))["text"])
        assert said("everstep_run_info", directory=str(directory), version=everstep.__version__) == 1
        assert {dict(key)["run"] for family in said.families.values() for key in family.samples} == {run_of(directory)}
        assert said("everstep_world_ranks") == said("everstep_rank_alive", rank="0") == 1
        assert said("everstep_step", rank="0") == said("everstep_sealed_step", rank="0") == 4
        assert said("everstep_durable_step") == 4
        for loss in ("process", "reboot"):
            assert said("everstep_exposure_steps", loss=loss) == 0
            assert 0 <= said("everstep_exposure_seconds", loss=loss) < 30
        written = [event for event in told(directory, Persisted) if event.step <= 4]
        disk = {"tier": "disk", "what": "bases"}
        assert said("everstep_writes_total", **disk) == len(written) > 0
        assert said("everstep_written_bytes_total", **disk) == sum(event.bytes for event in written)
        assert said("everstep_write_seconds_total", **disk) == pytest.approx(sum(e.seconds for e in written))
        assert said("everstep_lives_total") == 1
        for none in ("everstep_flush_failures_total", "everstep_ranks_lost_total", "everstep_degraded_total"):
            assert said(none) == 0
        assert {dict(k)["policy"] for k in said.all("everstep_recoveries_total")} == {
            "spare", "forward", "rollback", "restart",
        }  # fmt: skip
        assert not said.all("everstep_protected_step") and not said.all("everstep_shared_step")  # there is no such tier


def test_every_metric_is_exported_with_the_labels_that_it_is_said_to_have() -> None:
    with run_directory() as directory:
        said = Scraped(must_finish(asked(directory, 3, train=train_log))["text"])
        assert {name: (one.kind, one.help) for name, one in said.families.items()} == {
            name: (metric.kind, metric.help) for name, metric in METRICS.items()
        }
        for name, family in said.families.items():
            for key in family.samples:
                assert set(dict(key)) == {"run", "node", *METRICS[name].labels}, name
        nodes_only = {"everstep_protected_step", "everstep_shared_step", "everstep_flush_waiting_bytes"}
        assert {name for name, family in said.families.items() if not family.samples} == nodes_only


def test_the_parser_of_prometheus_itself_agrees() -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
    with run_directory() as directory:
        text = must_finish(asked(directory, 3))["text"]
        theirs = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in parser.text_string_to_metric_families(text)
            for sample in family.samples
        }
        ours = {(name, key): v for name, family in read(text).items() for key, v in family.samples.items()}
        assert theirs == ours


def test_records_are_counted_as_they_are_written() -> None:
    with run_directory() as directory:
        said = Scraped(must_finish(asked(directory, 5, train=train_log, records_a_base=100))["text"])
        assert said("everstep_records_total", rank="0") == 5 - 1  # the first step of a life is kept by a base
        assert said("everstep_records_waiting", rank="0") == 0
        records = {"tier": "disk", "what": "records"}
        assert said("everstep_writes_total", **records) >= 1
        assert said("everstep_written_bytes_total", **records) > 4 * 4 * (8 * 16 + 16 * 3)  # more than the weights'
        assert said("everstep_write_seconds_total", **records) > 0
        assert said("everstep_durable_step") == 5


def test_a_deeper_tier_has_its_own_numbers(tmp_path: Path) -> None:
    def look(run: everstep.Run) -> None:
        run.wait("shared")

    with run_directory() as directory:
        tiers = [everstep.Shared(str(tmp_path / "lustre"), every=100)]
        said = Scraped(must_finish(asked(directory, 4, look, tiers=tiers))["text"])
        assert said("everstep_shared_step") == 4
        assert said("everstep_exposure_steps", loss="all_nodes") == 0
        assert said("everstep_written_bytes_total", tier="shared", what="bases") > 0
        assert said("everstep_flush_waiting_bytes", tier="shared") == 0
        assert said("everstep_flush_failures_total", tier="shared") == 0


def test_what_a_reboot_would_cost_grows_until_something_is_durable() -> None:
    """Nothing is written before it is asked for, but for the first: the disk is to get one step in a million."""
    seen: dict[int, Any] = {}

    def at_step(run: everstep.Run) -> None:
        if run.step == 2:
            run.wait("durable")
        if run.step in (3, 5):
            run.wait("sealed")
            seen[run.step] = scrape(address_of(Path(run.settings.directory)))

    def life() -> dict[str, Any]:
        os.environ["EVERSTEP_METRICS"] = ANY_PORT
        train_tiny(directory, at_step, keeper="process", tiers=[everstep.Disk(every=1_000_000)])
        return {"first": seen[3], "second": seen[5]}

    with run_directory() as directory:
        first, second = (Scraped(text) for text in must_finish(life).values())
        assert [one("everstep_durable_step") for one in (first, second)] == [2, 2]
        assert [one("everstep_exposure_steps", loss="reboot") for one in (first, second)] == [3 - 2, 5 - 2]
        assert second("everstep_exposure_seconds", loss="reboot") > second("everstep_exposure_seconds", loss="process")
        assert second("everstep_exposure_steps", loss="process") == 0


def test_a_keeper_that_outlives_its_trainers_counts_on() -> None:
    def die(run: everstep.Run) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with run_directory() as directory:
        assert live(asked(directory, 3, die)).killed
        keeper = keeper_pid(run_of(directory))
        alone = until(lambda: found if (found := scraped(directory))("everstep_rank_alive", rank="0") == 0 else None)
        assert alone("everstep_step", rank="0") == 3
        said = Scraped(must_finish(asked(directory, 5))["text"])
        assert said("everstep_lives_total") == 2 and said("everstep_rank_alive", rank="0") == 1
        assert said("everstep_step", rank="0") == 5
        (served,) = told(directory, MetricsServed)  # by the same keeper, at the same place
        assert keeper is not None and served.address


def test_a_disk_that_refuses_is_counted() -> None:
    def refuse(name: str) -> None:
        DiskTier.before = staticmethod(lambda name: None)  # type: ignore[assignment]
        raise OSError(errno.ENOSPC, "no space left on device")

    def at_step(run: everstep.Run) -> None:
        if run.step == 2:
            run.wait("durable")
            DiskTier.before = staticmethod(refuse)  # type: ignore[assignment]
        if run.step == 3:
            until(lambda: run._keeper.trouble)
            run.wait("durable")
            seen["text"] = scrape(address_of(directory))

    def life() -> dict[str, Any]:
        os.environ["EVERSTEP_METRICS"] = ANY_PORT
        return {**train_tiny(directory, at_step, tiers=[everstep.Disk(every=1)]), **seen}

    seen: dict[str, str] = {}
    with run_directory() as directory:
        said = Scraped(must_finish(life)["text"])
        failures = [event for event in told(directory, Degraded) if event.tier == "disk"]
        assert said("everstep_flush_failures_total", tier="disk") == len(failures) == 1
        assert said("everstep_degraded_total") == len(told(directory, Degraded))


def test_a_name_with_quotes_and_backslashes_is_quoted() -> None:
    with run_directory() as directory:
        odd = directory.parent / 'a "run" of \\ its own'
        said = Scraped(must_finish(asked(odd, 2, keeper="inline"))["text"])
        assert said("everstep_run_info", directory=str(odd)) == 1


# -- where it is said


def test_nothing_listens_unless_somebody_asked_for_it() -> None:
    def look(run: everstep.Run) -> None:
        keeper = keeper_pid(run_of(directory))
        assert keeper is not None
        seen["listens"] = len(psutil.Process(keeper).net_connections(kind="inet"))

    def life() -> dict[str, Any]:
        os.environ.pop("EVERSTEP_METRICS", None)
        train_tiny(directory, lambda run: look(run) if run.step == 3 else None, keeper="process")
        return seen

    seen: dict[str, Any] = {}
    with run_directory() as directory:
        assert must_finish(life)["listens"] == 0
        assert told(directory, MetricsServed) == []


def test_a_taken_port_is_an_event_and_training_goes_on_and_a_freed_one_is_used() -> None:
    def life() -> dict[str, Any]:
        other = socket.create_server(("127.0.0.1", 0))
        port = other.getsockname()[1]

        def look(run: everstep.Run) -> None:
            sentence = f"no metrics are served at 127.0.0.1:{port}"
            until(lambda: [event for event in told(directory, Degraded) if event.what == sentence])
            assert told(directory, MetricsServed) == []
            other.close()

        return {**asked(directory, 3, look, metrics=str(port))(), "port": port}

    with run_directory() as directory:
        ended = must_finish(life)
        assert ended["step"] == STEPS
        (complaint,) = told(directory, Degraded)
        assert complaint.reason == "Address already in use; it is tried again"
        assert address_of(directory) == f"http://127.0.0.1:{ended['port']}/metrics"
        assert Scraped(ended["text"])("everstep_degraded_total") == 1


def test_a_taken_port_that_stays_taken_costs_training_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, run_directory() as directory:

        def life() -> dict[str, Any]:
            os.environ["EVERSTEP_METRICS"] = str(other.getsockname()[1])
            return train_tiny(directory, keeper="process")

        assert must_finish(life)["step"] == STEPS
        assert len(told(directory, Finished)) == 1


def test_no_lock_that_a_trainer_waits_for_is_taken() -> None:
    """All locks of the keeper are held by another thread while it is asked."""
    keepers: list[Keeper] = []
    made = Keeper.__init__

    def remember(self: Keeper, *args: Any, **options: Any) -> None:
        keepers.append(self)
        made(self, *args, **options)

    def look(run: everstep.Run) -> str:
        (keeper,) = keepers
        (session,) = keeper._roster.all()
        with ExitStack() as held:
            for lock in (
                keeper._roster.lock, keeper._logbook.writing, keeper._takers._lock, keeper._council._lock,
                session.leasing,
            ):  # fmt: skip
                held.enter_context(lock)
            return scrape(address_of(directory), timeout_s=20.0)

    with run_directory() as directory:
        Keeper.__init__ = remember  # type: ignore[method-assign]
        try:
            ended = must_finish(asked(directory, 3, look, keeper="inline", train=train_log))
        finally:
            Keeper.__init__ = made  # type: ignore[method-assign]
        assert Scraped(ended["looked"])("everstep_step", rank="0") == 3


def test_whoever_connects_and_says_nothing_does_not_keep_others_waiting() -> None:
    def look(run: everstep.Run) -> int:
        address = address_of(directory)
        host, port = re.fullmatch(r"http://([\d.]+):(\d+)/metrics", address).groups()  # type: ignore[union-attr]
        with socket.create_connection((host, int(port))):
            scrape(address, timeout_s=30.0)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(address.replace("/metrics", "/etc/passwd"), timeout=30.0)
        return int(refused.value.code)

    with run_directory() as directory:
        assert must_finish(asked(directory, 3, look))["looked"] == 404


@pytest.mark.parametrize(
    ("text", "meant"),
    [("", ""), ("9464", "127.0.0.1:9464"), (":9464", "127.0.0.1:9464"), ("0.0.0.0:1", "0.0.0.0:1"),
     ("[::1]:80", "[::1]:80"), ("node-7.local:80", "node-7.local:80")],
)  # fmt: skip
def test_an_address_is_a_port_or_a_host_and_a_port(text: str, meant: str) -> None:
    assert metrics_address({"EVERSTEP_METRICS": text}) == meant
    assert metrics_address({}) == ""


@pytest.mark.parametrize("text", ["nonsense", "host:", "127.0.0.1:99999", "a b:1", "::1:80", "-1", "9464\n"])
def test_a_wrong_address_ends_the_program_before_anything_begins(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_METRICS", text)
    with run_directory() as directory, pytest.raises(BadConfig, match="EVERSTEP_METRICS must be a port or host:port"):
        train_tiny(directory)


# -- the parts


def test_cuts_forget_the_old_before_the_new_and_never_tell_a_loss_too_small() -> None:
    cuts = Cuts()
    cuts.begin(0, 1000.0)
    for step in range(1, 20_001):
        cuts.note(step, 1000.0 + step)
    assert cuts.time_of(20_000) == 21_000.0 and cuts.time_of(0) == cuts.time_of(-1) == 1000.0
    for step in (1, 100, 9_999, 19_000):
        assert cuts.time_of(step) <= 1000.0 + step
    assert 1000.0 + 19_900 - cuts.time_of(19_900) < 2 and len(cuts._steps) <= 4096
    cuts.begin(15_000, 50_000.0)  # a life goes back
    cuts.note(15_001, 50_001.0)
    assert cuts.time_of(19_000) == 50_001.0 and cuts.time_of(15_000) == 50_000.0 and cuts.time_of(14_999) <= 15_999.0


def test_a_tally_passes_on_what_it_counts() -> None:
    heard: list[Any] = []
    tally = Tally(heard.append, unmarked)
    event = Persisted(step=1, bytes=7, seconds=0.5, direct=False)
    tally.emit(event)
    assert heard == [event]
    assert ("everstep_written_bytes_total", {"tier": "disk", "what": "bases"}, 7) in tally.samples()


# -- the dashboard


def test_the_dashboard_shows_exactly_what_is_exported() -> None:
    board = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    named = set(re.findall(r"everstep_\w+", " ".join(queries)))
    assert named == set(METRICS)
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert set(re.findall(r"\$(\w+)", " ".join(queries))) - {"__rate_interval"} <= variables.keys()
    for one in variables.values():
        assert set(re.findall(r"everstep_\w+", str(one.get("query", "")))) <= set(METRICS)


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    board = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    assert board["title"] and board["uid"] and board["schemaVersion"] >= 36
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(numbers) == len(set(numbers))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["expr"].count("(") == target["expr"].count(")") and target["refId"]
            of = re.findall(r"everstep_\w+\{([^}]*)\}", target["expr"])
            assert len(of) == len(re.findall(r"everstep_\w+", target["expr"]))
            assert all(labels == 'run=~"$run",node=~"$node"' for labels in of), target["expr"]
            for name in re.findall(r"everstep_\w+", target["expr"]):
                asked = re.findall(r"by \(([^)]*)\)", target["expr"]) + re.findall(r"\{\{(\w+)\}\}", str(target))
                wanted = {label for labels in asked for label in labels.split(", ")}
                assert wanted <= {"run", "node", *METRICS[name].labels}, target["expr"]
                is_counter = METRICS[name].kind == "counter"
                assert ("rate(" in target["expr"] or "increase(" in target["expr"]) == is_counter, target["expr"]
