"""Programs that were written for SCR: their files survive what bases survive."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from ranks import Nodes, content, die, read_back, results, write

from everstep.capture.arena import Arena
from everstep.errors import BadConfig, EverstepError, Misuse, NothingToRestore
from everstep.events import Degraded, Rejected
from everstep.integrations import scr


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Any]:
    made: list[Nodes] = []

    def make(*ranks: int, **settings: Any) -> Nodes:
        made.append(Nodes(tmp_path / f"j{len(made)}", ranks, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def write_some(last: int, *, level: str = "protected") -> Any:
    """Datasets 1 to `last`; all die when the last one is as safe as asked."""

    def app(rank: int) -> None:
        scr.init()
        assert scr.have_restart() is None
        for number in range(1, last + 1):
            assert write(number, rank)
        while (scr.status()[level] or 0) < last:
            time.sleep(0.01)
        die()

    return app


def go_on(rank: int) -> list[str | None]:
    """Restart, write one more, and end well."""
    scr.init()
    name = read_back(rank)
    number = int(name.removeprefix("step")) + 1 if name else 1
    assert write(number, rank)
    assert scr.finalize()
    return [name]


# -- coming back


@pytest.mark.parametrize(
    "ranks", [(1,), pytest.param((2,), marks=pytest.mark.soak), (2, 1)], ids=["alone", "two", "three-on-two-nodes"]
)
def test_what_was_written_is_given_back_byte_by_byte(ranks: tuple[int, ...], nodes: Any) -> None:
    job = nodes(*ranks, SCR_COPY_TYPE="PARTNER")
    job.live(write_some(3, level="durable"))
    assert results(job.live(go_on)) == [["step3"]] * sum(ranks)
    assert results(job.live(go_on)) == [["step4"]] * sum(ranks)


@pytest.mark.parametrize(
    "scheme", ["XOR", *(pytest.param(scheme, marks=pytest.mark.soak) for scheme in ("PARTNER", "RS"))]
)
def test_a_lost_node_is_made_good_and_its_cache_filled_again(scheme: str, nodes: Any) -> None:
    job = nodes(2, 1, 1, SCR_COPY_TYPE=scheme, SCR_FLUSH=0)
    job.live(write_some(3))
    job.lose(job.names[0])

    def restart_and_die(rank: int) -> None:
        scr.init()
        assert read_back(rank) == "step3"
        while (scr.status()["protected"] or 0) < 4:  # what was put back has a number of its own
            time.sleep(0.01)
        die()

    assert all(one.killed for one in job.live(restart_and_die))
    job.lose(job.names[1])  # another one: redundancy was whole again
    ended = job.live(lambda rank: [scr.init(), read_back(rank)][1])
    assert results(ended) == ["step3"] * 4


@pytest.mark.soak
def test_two_lost_nodes_are_made_good_by_reed_solomon(nodes: Any) -> None:
    job = nodes(1, 1, 1, 1, SCR_COPY_TYPE="RS", SCR_SET_FAILURES=2, SCR_FLUSH=0)
    job.live(write_some(2))
    job.lose(job.names[1], job.names[2])
    assert results(job.live(lambda rank: [scr.init(), read_back(rank)][1])) == ["step2"] * 4


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_without_protection_a_lost_node_is_refused_clearly_on_all_ranks(nodes: Any) -> None:
    job = nodes(1, 1, SCR_COPY_TYPE="SINGLE", SCR_FLUSH=0)
    job.live(write_some(2, level="durable"))
    job.lose(job.names[1])

    def look(rank: int) -> Any:
        scr.init()
        return scr.have_restart()

    assert results(job.live(look)) == [None, None]
    said = " ".join(event.reason for event in job.told(job.names[0], Degraded))
    assert "SCR_COPY_TYPE=SINGLE protects nothing against the loss of a node" in said
    assert "no checkpoint can be restored" in said and "no readable part of rank 1" in said


@pytest.mark.soak
@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param((2, 1), (2,), id="fewer", marks=pytest.mark.soak), pytest.param((1, 1), (2, 1), id="more")],
)
def test_another_number_of_ranks_is_given_all_files(
    before: tuple[int, ...], after: tuple[int, ...], nodes: Any
) -> None:
    job = nodes(*before, SCR_COPY_TYPE="PARTNER", SCR_FLUSH=1, SCR_FLUSH_ASYNC=0)
    job.live(write_some(2, level="flushed"))
    job.lose(*job.names)
    other = nodes(*after, SCR_COPY_TYPE="PARTNER", SCR_FLUSH=1)
    other.prefix.rmdir()
    job.prefix.rename(other.prefix)
    world = sum(after)

    def app(rank: int) -> Any:
        scr.init()
        name = scr.have_restart()
        scr.start_restart()
        mine = [old for old in range(sum(before)) if old % world == rank]
        for file, data in (item for old in mine for item in content(old, 2).items()):
            assert Path(scr.route_file(f"step2/{file}")).read_bytes() == data
        assert scr.complete_restart()
        assert write(3, rank)
        assert scr.finalize()
        return name

    assert results(other.live(app)) == ["step2"] * world
    assert results(other.live(go_on)) == [["step3"]] * world


@pytest.mark.soak
def test_a_process_may_end_one_job_and_begin_another(nodes: Any) -> None:
    job = nodes(2, SCR_FLUSH=1)

    def app(rank: int) -> Any:
        return [go_on(rank)[0] for _ in range(3)]

    assert results(job.live(app)) == [[None, "step1", "step2"]] * 2


def test_a_file_outside_the_prefix_is_no_output_and_links_lead_into_it(nodes: Any) -> None:
    job = nodes(1)

    def app(rank: int) -> Any:
        (job.root / "link").symlink_to(job.prefix)
        os.environ["SCR_PREFIX"] = str(job.root / "link")
        scr.init()
        scr.start_output("out", scr.FLAG_OUTPUT)
        refused(lambda: scr.route_file("/elsewhere/file"), "outside SCR_PREFIX")
        for number, name in enumerate(["a", str(job.root / "link/b"), str(job.prefix / "c"), "../link/d/a"]):
            Path(scr.route_file(name)).write_text(str(number))
        assert scr.complete_output()
        assert scr.finalize()
        return [(job.prefix / name).read_text() for name in ("a", "b", "c", "d/a")]

    assert results(job.live(app)) == [["0", "1", "2", "3"]]


@pytest.mark.soak
def test_ranks_may_come_back_on_other_nodes(nodes: Any) -> None:
    job = nodes(1, 1, SCR_COPY_TYPE="PARTNER", SCR_FLUSH=0)
    job.live(write_some(2))
    assert results(job.live(go_on, order=job.names[::-1])) == [["step2"]] * 2


# -- flushing


@pytest.mark.soak
def test_the_prefix_alone_gives_back_what_was_flushed(nodes: Any) -> None:
    job = nodes(1, 1, SCR_COPY_TYPE="PARTNER", SCR_FLUSH=2)

    def app(rank: int) -> None:
        scr.init()
        for number in range(1, 6):
            assert write(number, rank)
            time.sleep(0.1)  # a program computes in between
        while (scr.status()["flushed"] or 0) < 4:
            time.sleep(0.01)
        die()

    job.live(app)
    flushed = sorted(path.name for path in job.prefix.glob(".everstep/job/step-*.json"))
    assert flushed[:2] == ["step-0000000002.json", "step-0000000004.json"]
    job.lose(*job.names)
    found = int(results(job.live(go_on))[0][0].removeprefix("step"))
    assert found in (4, 5), "keepers whose ranks are gone bring the newest as well, if they are given the time"
    job.lose(*job.names)
    assert results(job.live(go_on)) == [[f"step{found + 1}"]] * 2  # finalize flushes the newest


@pytest.mark.soak
def test_nothing_is_retired_from_the_prefix_unless_asked(nodes: Any) -> None:
    def app(rank: int) -> None:
        scr.init()
        for number in range(1, 6):
            assert write(number, rank)
        assert scr.finalize()

    job, few = nodes(1, SCR_FLUSH=1, SCR_FLUSH_ASYNC=0), nodes(1, SCR_FLUSH=1, SCR_FLUSH_ASYNC=0, SCR_PREFIX_SIZE=2)
    for one in (job, few):
        results(one.live(app))
    assert len(list(job.prefix.glob(".everstep/job/step-*.json"))) == 5
    assert len(list(few.prefix.glob(".everstep/job/step-*.json"))) == 2


@pytest.mark.soak
def test_a_flush_that_lacks_a_part_is_not_offered(nodes: Any) -> None:
    job = nodes(1, 1, SCR_COPY_TYPE="PARTNER", SCR_FLUSH=1, SCR_FLUSH_ASYNC=0)
    job.live(write_some(3, level="flushed"))
    job.lose(*job.names)
    (job.prefix / ".everstep/job/step-0000000003.json").unlink()  # as if the last part had not come
    assert results(job.live(go_on)) == [["step2"]] * 2


@pytest.mark.soak
def test_bytes_that_were_changed_on_the_prefix_are_found_and_the_one_before_is_given(nodes: Any) -> None:
    job = nodes(1, 1, SCR_COPY_TYPE="PARTNER", SCR_FLUSH=1, SCR_FLUSH_ASYNC=0)
    job.live(write_some(2, level="flushed"))
    job.lose(*job.names)
    path = job.prefix / ".everstep/job/step-0000000002/rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    assert results(job.live(go_on)) == [["step1"]] * 2


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_flush_that_fails_is_seen_and_nobody_is_held_up(nodes: Any) -> None:
    job = nodes(1, SCR_FLUSH=1)

    def app(rank: int) -> Any:
        scr.init()
        assert write(1, rank)
        while scr.status()["flushed"] != 1:
            time.sleep(0.01)
        flushed = job.prefix / ".everstep/job"
        flushed.rename(job.prefix / "away")
        flushed.write_text("a file where a directory was")
        assert write(2, rank)
        while scr.status()["flush_failed"] != 2:
            time.sleep(0.01)
        assert write(3, rank)
        return scr.finalize()

    assert results(job.live(app)) == [False]
    said = [event.what for event in job.told(job.names[0], Degraded)]
    assert any("step 2 is not on the shared tier yet" in one for one in said)


@pytest.mark.soak
def test_a_keeper_that_dies_is_replaced_and_what_it_was_to_bring_is_brought(nodes: Any) -> None:
    job = nodes(1, 1, SCR_COPY_TYPE="PARTNER", SCR_FLUSH=2)

    def app(rank: int) -> Any:
        scr.init()
        for number in range(1, 5):
            assert write(number, rank)
            if rank == number % 2:
                job.kill_keeper(job.names[rank])
        assert scr.finalize()
        return scr.config("SCR_FLUSH")

    assert results(job.live(app)) == ["2", "2"]
    job.lose(*job.names)
    assert results(job.live(go_on)) == [["step4"]] * 2


@pytest.mark.soak
def test_outputs_lie_on_the_prefix_as_files_and_are_never_restarted_from(nodes: Any) -> None:
    job = nodes(2, SCR_FLUSH=1)

    def app(rank: int) -> Any:
        scr.init()
        assert write(1, rank)
        assert write(2, rank, flags=scr.FLAG_OUTPUT)
        assert write(3, rank, flags=scr.FLAG_CHECKPOINT | scr.FLAG_OUTPUT)
        assert write(4, rank, flags=scr.FLAG_OUTPUT)
        assert scr.finalize()

    results(job.live(app))
    for number in (2, 3, 4):
        for name, data in content(1, number).items():
            assert (job.prefix / f"step{number}" / name).read_bytes() == data
    assert not (job.prefix / "step1").exists()
    assert results(job.live(go_on)) == [["step3"]] * 2


@pytest.mark.soak
def test_an_output_that_was_on_its_way_is_brought_by_the_next_life(nodes: Any) -> None:
    job = nodes(2, SCR_FLUSH=1)
    (job.prefix / "step1").write_text("in the way")

    def app(rank: int) -> None:
        scr.init()
        assert write(1, rank, flags=scr.FLAG_OUTPUT)
        die()

    job.live(app)
    (job.prefix / "step1").unlink()
    results(job.live(lambda rank: [scr.init(), scr.finalize()][1]))
    for name, data in content(1, 1).items():
        assert (job.prefix / "step1" / name).read_bytes() == data


# -- dying in the middle


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_rank_that_dies_in_complete_output_leaves_the_dataset_before(victim: int, nodes: Any) -> None:
    job = nodes(2, 1, SCR_COPY_TYPE="XOR", SCR_FLUSH=0)

    def app(rank: int) -> None:
        scr.init()
        assert write(1, rank)
        assert write(2, rank)
        if rank == victim:
            Arena.before = staticmethod(lambda operation: operation == "seal" and os.kill(os.getpid(), signal.SIGKILL))
        write(3, rank)
        time.sleep(60)

    job.live(app)
    assert results(job.live(go_on)) == [["step2"]] * 3


@pytest.mark.soak
def test_a_checkpoint_that_ends_its_readers_is_not_tried_for_ever(nodes: Any) -> None:
    job = nodes(1, 1, SCR_COPY_TYPE="PARTNER", SCR_FLUSH=0)
    job.live(write_some(2))

    def crash(rank: int) -> None:
        scr.init()
        assert scr.have_restart() == "step2"
        scr.start_restart()
        die()

    for _ in range(2):
        assert all(one.killed for one in job.live(crash))

    def look(rank: int) -> Any:
        scr.init()
        found = read_back(rank)
        die_after = found == "step1"
        assert die_after
        die()

    assert all(one.killed for one in job.live(look))
    assert results(job.live(go_on)) == [["step1"]] * 2  # nor again: the job went on from the older one


# -- being told


@pytest.mark.soak
def test_a_dataset_that_is_not_valid_on_one_rank_is_dropped_on_all(nodes: Any) -> None:
    job = nodes(2, 1, SCR_COPY_TYPE="XOR")

    def app(rank: int) -> Any:
        scr.init()
        said = [write(1, rank), write(2, rank, valid=rank != 1), write(3, rank)]
        scr.start_output("step4")
        scr.route_file("step4/never-written") if rank == 2 else None
        said.append(scr.complete_output())
        scr.finalize()
        return said

    assert results(job.live(app)) == [[True, False, True, False]] * 3
    reasons = [event.reason for event in job.told(job.names[0], Rejected)]
    assert any("step2: rank 1: it is not valid" in one for one in reasons)
    assert any("rank 2" in one and "never-written" in one for one in reasons)
    assert results(job.live(go_on)) == [["step3"]] * 3


@pytest.mark.soak
def test_a_restart_that_fails_on_one_rank_goes_on_to_the_one_before_until_there_is_none(nodes: Any) -> None:
    job = nodes(1, 1, SCR_COPY_TYPE="PARTNER", SCR_FLUSH=0)
    job.live(write_some(2))

    def app(rank: int) -> Any:
        scr.init()
        tried = []
        while (name := scr.have_restart()) is not None:
            scr.start_restart()
            tried.append(name)
            assert not scr.complete_restart(rank != 1)
        assert write(3, rank)
        scr.finalize()
        return tried

    assert results(job.live(app)) == [["step2", "step1"]] * 2
    assert results(job.live(go_on)) == [["step3"]] * 2


def refused(call: Any, *words: str) -> None:
    with pytest.raises(Misuse) as caught:
        call()
    assert isinstance(caught.value, EverstepError)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.soak
def test_a_wrong_order_of_calls_is_refused_on_all_ranks_and_the_job_goes_on(nodes: Any) -> None:
    job = nodes(2, 1, SCR_COPY_TYPE="XOR")

    def app(rank: int) -> Any:
        refused(scr.need_checkpoint, "init()")
        scr.init()
        refused(scr.init, "finalize() first")
        refused(lambda: scr.config("SCR_FLUSH=3"), "before init()")
        refused(scr.complete_output, "rank 0", "start_output()")
        refused(lambda: scr.route_file("x"), "start_output()")
        refused(scr.start_restart, "have_restart()")
        refused(scr.complete_restart, "start_restart()")
        refused(lambda: scr.start_output("a", 0), "flags")
        refused(lambda: scr.start_output(f"name{rank}"), "same name")
        scr.start_output("step1")
        refused(lambda: scr.start_output("step2"), "complete_output()")
        refused(scr.finalize, "complete_output()")
        refused(scr.have_restart, "complete_output()")
        refused(lambda: scr.route_file(""), "path")
        Path(scr.route_file("step1/a")).write_text("a")
        if rank == 1:
            refused(scr.complete_restart, "rank 1")  # alone: the others hear of it where they are
        else:
            refused(scr.complete_output, "rank 1: complete_restart() cannot come")
        assert scr.complete_output()
        refused(scr.need_checkpoint if rank == 1 else scr.should_exit, "the same", "rank 1 has need_checkpoint()")
        assert scr.finalize()
        refused(scr.finalize, "init()")
        return "through"

    assert results(job.live(app)) == ["through"] * 3


@pytest.mark.soak
def test_datasets_are_chosen_dropped_and_deleted_by_name(nodes: Any) -> None:
    job = nodes(1, 1, SCR_COPY_TYPE="PARTNER", SCR_FLUSH=1, SCR_FLUSH_ASYNC=0, SCR_CACHE_SIZE=9)
    job.live(write_some(4, level="flushed"))

    def app(rank: int) -> Any:
        scr.init()
        said = [scr.have_restart()]
        scr.drop("step4")
        said.append(scr.have_restart())
        scr.delete("step3")
        said.append(scr.have_restart())
        with pytest.raises(NothingToRestore, match="no dataset 'step9'"):
            scr.current("step9")
        scr.current("step1")
        said.append(read_back(rank))
        die()
        return said

    job.live(app)
    assert not list(job.root.rglob("step-0000000003*")) and list(job.prefix.rglob("step-0000000004.json"))
    job.lose(*job.names)
    assert results(job.live(go_on)) == [["step1"]] * 2


# -- settings


def test_settings_come_from_the_environment_a_file_and_config_in_that_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everstep.integrations.scr_settings import choose

    (tmp_path / ".scrconf").write_text("# for people\nSCR_FLUSH=3  # often\n\nSCR_SET_SIZE=4\nSCR_NEW_THING=1\n")
    told = {"SCR_PREFIX": str(tmp_path), "SCR_FLUSH": "5", "SCR_CACHE_SIZE": "7", "SCR_SET_SIZE": "5"}
    found = choose(told, {"SCR_SET_SIZE": "6", "HOME": "/"})
    assert (found.flush, found.set_size, found.cache_size) == (3, 6, 7)
    assert found.is_async and found.scheme == "XOR"
    assert any("SCR_NEW_THING" in warning for warning in found.warnings)
    for name, value in (("SCR_COPY_TYPE", "RAID"), ("SCR_FLUSH", "-1"), ("SCR_HALT_SECONDS", "soon")):
        with pytest.raises(BadConfig, match=name):
            choose(told, {name: value})
    assert scr.config("SCR_FLUSH") is None
    assert scr.config("SCR_FLUSH=4") == "4"
    assert scr.config("SCR_FLUSH") == "4"
    assert scr.config("SCR_FLUSH=") is None


def test_a_setting_that_is_wrong_on_one_rank_is_said_on_all(nodes: Any) -> None:
    job = nodes(2)

    def app(rank: int) -> str:
        if rank == 1:
            os.environ["SCR_FLUSH"] = "often"
        with pytest.raises(BadConfig, match="rank 1: SCR_FLUSH"):
            scr.init()
        return "told"

    assert results(job.live(app)) == ["told"] * 2


def test_checkpoints_are_due_by_calls_by_time_and_by_cost() -> None:
    from everstep.integrations.scr_pace import Pace, is_near_end
    from everstep.integrations.scr_settings import choose

    def asked(pace: Pace, times: list[float]) -> list[bool]:
        return [pace.needs_one(now) for now in times]

    assert asked(Pace(choose({}, {}), 0.0), [1, 2]) == [True, True]
    assert asked(Pace(choose({"SCR_CHECKPOINT_INTERVAL": "3"}, {}), 0.0), [1, 2, 3, 4]) == [False, False, True, False]
    assert asked(Pace(choose({"SCR_CHECKPOINT_SECONDS": "10"}, {}), 0.0), [9, 10]) == [False, True]
    costly = Pace(choose({"SCR_CHECKPOINT_OVERHEAD": "10"}, {}), 0.0)
    assert asked(costly, [1]) == [True]
    costly.wrote(1.0, 2.0)  # a second, so nine of other work make it a tenth
    assert asked(costly, [10.9, 11.1]) == [False, True]
    halts = choose({"SCR_HALT_SECONDS": "60"}, {})
    assert [is_near_end(halts, {"SLURM_JOB_END_TIME": "1000"}, now) for now in (930, 950)] == [False, True]
    assert not is_near_end(choose({}, {}), {"SLURM_JOB_END_TIME": "1000"}, 2000)


@pytest.mark.soak
def test_all_leave_when_the_allocation_is_about_to_end(nodes: Any) -> None:
    job = nodes(2, SCR_HALT_SECONDS=3600, SCR_CHECKPOINT_INTERVAL=100)

    def app(rank: int) -> list[bool]:
        scr.init()
        before = [scr.should_exit(), scr.need_checkpoint()]
        if rank == 0:
            os.environ["EVERSTEP_END_TIME"] = str(time.time() + 100)
        dist.barrier()
        after = [scr.need_checkpoint(), scr.should_exit()]
        scr.finalize()
        return before + after

    assert results(job.live(app)) == [[False, False, True, True]] * 2
