"""Residuals of compressed training on several nodes: of one step on all of them, and with partners, so that none of
them is missing after a reboot of all nodes or the loss of one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import msgspec
import torch.distributed as dist
from cluster import AtStep, Cluster, die_at, results
from doom import dies_before, keeper_with
from situation import flip, guests
from typer.testing import CliRunner

import everstep
from everstep import Disk, Parity, Partner, Shared
from everstep.capture.compress import TopK
from everstep.cli import app
from everstep.events import KeeperStarted, read_events
from everstep.keeper import record_writer
from everstep.keeper.client import keeper_pid
from everstep.store.disk import DiskTier
from everstep.store.manifest import committed_steps, read_single_part, run_name, values_folder, values_steps

OPTIONS: dict[str, Any] = {"strategy": "log", "compress": TopK(0.4)}
AT = 6  # a step that is waited for; the only base before it is that of step 1
NEVER = 10**6  # steps between bases
PATIENCE_S = 60.0


def die_with_the_keeper(directory: Path, when: Callable[[everstep.Run], int | None], *ranks: int) -> AtStep:
    """These ranks (all, if none is named) and their keepers die at once, when there is a step to go back to."""
    began = time.monotonic()

    def at_step(run: everstep.Run, rank: int) -> None:
        assert time.monotonic() < began + PATIENCE_S, run.status()
        found = when(run)
        if found is not None and (rank in ranks or not ranks):
            (directory / f"rank-{rank}").write_text(f"{found} {run.step}")
            pid = keeper_pid(str(run.status()["run"]))
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    return at_step


def wait_and_die(level: str, directory: Path) -> AtStep:
    """All ranks die when a step has reached a level on all of them, and leave word that it has."""

    def at_step(run: everstep.Run, rank: int) -> None:
        if run.step == AT:
            assert run.wait(level, timeout=PATIENCE_S / 2), run.status()
            (directory / f"rank-{rank}").touch()
        die_at(AT, level=level)(run, rank)

    return at_step


def far_beyond(level: str) -> Callable[[everstep.Run], int | None]:
    """Some steps after one that has reached a level without being waited for. The last base is that of step 2."""

    def when(run: everstep.Run) -> int | None:
        if run.step == 2:
            run.wait(level)
        time.sleep(0.002)
        safe = int(run.status()[f"{level}_step"] or 0)  # type: ignore[call-overload]
        return safe if safe > 2 and run.step > safe + 5 else None

    return when


def said_by(directory: Path) -> tuple[int, int]:
    """The newest safe step that one of those who died knew of, and the newest step of all."""
    said = [tuple(map(int, path.read_text().split())) for path in directory.glob("rank-*")]
    return max(safe for safe, _ in said), max(step for _, step in said)


def of_all_nodes(nodes: Cluster) -> set[int]:
    """The steps whose values lie on the disks of all nodes, whole."""
    found = []
    for rank, node in enumerate(nodes.nodes):
        tier = DiskTier(nodes.directory(node))
        found.append({step for step in values_steps(tier) if _has_part(tier, step, rank)})
    return set.intersection(*found)


def _has_part(tier: DiskTier, step: int, rank: int) -> bool:
    try:
        return read_single_part(tier, step, rank, run_name(tier), values_folder).step == step
    except FileNotFoundError:
        return False


def test_a_lost_node_comes_back_at_a_step_that_has_only_records_and_residuals(cluster: Any, undisturbed: Any) -> None:
    nodes = cluster(1, 1, tiers=[Partner()], **OPTIONS)
    nodes.live(die_at(AT, level="protected"))
    nodes.lose(nodes.nodes[1])
    assert AT not in committed_steps(DiskTier(nodes.directory(nodes.nodes[0])))
    ended = results(nodes.live())
    assert [one["resumed_from"] for one in ended] == [AT, AT]
    assert {one["state"] for one in ended} == {undisturbed(1, 1, **OPTIONS)}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("ranks", "tiers", "lost"),
    [
        ((1, 1, 1), [Partner()], (0,)),
        ((2, 1, 1), [Partner(copies=2)], (0, 2)),
        ((2, 1, 1), [Parity("xor")], (0,)),
        ((1, 1, 1, 1), [Parity("rs", losses=2)], (1, 2)),
    ],
    ids=str,
)
def test_as_many_lost_nodes_as_the_scheme_covers_come_back_at_the_newest_residuals(
    ranks: tuple[int, ...], tiers: list[Any], lost: tuple[int, ...], cluster: Any, undisturbed: Any
) -> None:
    nodes = cluster(*ranks, tiers=tiers, **OPTIONS)
    nodes.live(die_at(AT, level="protected"))
    nodes.lose(*(nodes.nodes[one] for one in lost))
    ended = results(nodes.live())
    assert {one["resumed_from"] for one in ended} == {AT}
    assert {one["state"] for one in ended} == {undisturbed(*ranks, **OPTIONS)}


def look_rarely() -> None:
    """By itself, this keeper would hardly choose a step that another does."""
    record_writer._LOG_TICK_S = 0.3


@pytest.mark.soak
def test_after_a_reboot_of_all_nodes_a_loop_that_never_waited_goes_on_from_residuals_of_one_step(
    cluster: Any, undisturbed: Any, tmp_path: Path
) -> None:
    nodes = cluster(1, 1, steps=10**6, tiers=[Disk(every=NEVER)], **OPTIONS)
    prepare = keeper_with(look_rarely, nodes.nodes[1])
    nodes.live(die_with_the_keeper(tmp_path, far_beyond("durable")), prepare=prepare)
    safe, died = said_by(tmp_path)
    nodes.reboot(*nodes.nodes)
    found = of_all_nodes(nodes)
    assert safe in found
    steps = died + 5
    ended = results(nodes.live(steps=steps))
    assert {one["resumed_from"] for one in ended} == {max(found)}
    assert {one["state"] for one in ended} == {undisturbed(1, 1, steps=steps, **OPTIONS)}


@pytest.mark.soak
def test_a_node_lost_in_the_midst_of_training_comes_back_at_the_newest_residuals_that_all_have_copied(
    cluster: Any, undisturbed: Any, tmp_path: Path
) -> None:
    nodes = cluster(1, 1, 1, tiers=[Partner(every=NEVER), Disk(every=NEVER)], steps=10**6, **OPTIONS)
    nodes.live(die_with_the_keeper(tmp_path, far_beyond("protected"), 1))
    safe, died = said_by(tmp_path)
    nodes.lose(nodes.nodes[1])
    steps = died + 5
    ended = results(nodes.live(steps=steps))
    (resumed_from,) = {one["resumed_from"] for one in ended}
    assert safe <= resumed_from <= died
    assert {one["state"] for one in ended} == {undisturbed(1, 1, 1, steps=steps, **OPTIONS)}


MOMENTS = [
    ("mkdir values-", "beginning", True),
    ("rename values-", "saving", False),
    ("begin values-", "beginning a copy", True),
    ("piece values-", "copying", True),
    ("end values-", "ending a copy", True),
]


@pytest.mark.parametrize(
    ("operation", "after"),
    [
        pytest.param(operation, after, id=f"{doing} {after}", marks=pytest.mark.soak if is_long or after else ())
        for operation, doing, is_long in MOMENTS
        for after in (0, 1)
    ],
)
@pytest.mark.parametrize("which", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_keeper_killed_while_it_saves_residuals_is_replaced_and_they_are_saved(
    which: int, operation: str, after: int, cluster: Any, undisturbed: Any, tmp_path: Path
) -> None:
    nodes, marker = cluster(1, 1, tiers=[Partner()], **OPTIONS), tmp_path / "died"
    prepare = keeper_with(dies_before(operation, marker, after=after), nodes.nodes[which])
    nodes.live(wait_and_die("protected", tmp_path), prepare=prepare)
    assert len(list(tmp_path.glob("rank-*"))) == 2, "the step was never protected"
    assert marker.exists(), f"nobody was killed before {operation}"
    started = [e for e in read_events(nodes.directory(nodes.nodes[which])) if isinstance(e, KeeperStarted)]
    assert len(started) == 2
    nodes.lose(nodes.nodes[1])
    ended = results(nodes.live())
    assert [one["resumed_from"] for one in ended] == [AT, AT]
    assert {one["state"] for one in ended} == {undisturbed(1, 1, **OPTIONS)}


@pytest.mark.soak
def test_wherever_all_keepers_and_trainers_die_in_a_save_the_nodes_agree_after_a_reboot(
    cluster: Any, undisturbed: Any, tmp_path: Path
) -> None:
    """Every step is waited for, and one node's keeper dies in the middle of the save of the last one."""
    for operation in ("mkdir values-", "rename values-", "delete values-"):
        for after in range(3):
            nodes, marker = cluster(1, 1, **OPTIONS), tmp_path / f"{operation} {after}"

            def when(run: everstep.Run, rank: int, marker: Path = marker) -> None:
                run.wait("durable", timeout=0.5)
                dist.barrier()
                if marker.exists():
                    os.kill(os.getpid(), signal.SIGKILL)

            nodes.live(when, prepare=keeper_with(dies_before(operation, marker, after=after), nodes.nodes[1]))
            assert marker.exists(), f"nobody was killed before {operation}"
            nodes.reboot(*nodes.nodes)
            ended = results(nodes.live())
            assert len({one["resumed_from"] for one in ended}) == 1
            assert {one["state"] for one in ended} == {undisturbed(1, 1, **OPTIONS)}
            nodes.close()


def test_commands_tell_what_a_loss_would_leave_and_read_the_residuals_of_other_nodes(cluster: Any) -> None:
    nodes = cluster(1, 1, tiers=[Partner()], **OPTIONS)
    nodes.live(die_at(AT, level="protected"))
    here, other = nodes.nodes

    def said(*words: str) -> str:
        asked = [*words[:1], str(nodes.directory(here)), *words[1:]]
        return str(nodes.on(here, lambda: CliRunner().invoke(app, asked, env={"COLUMNS": "300"}).output))

    assert f"step {AT} would be restored" in said("plan", "--lost", other)
    (row,) = [row for row in said("ls").splitlines() if row.startswith(f"│{AT:>5} │")]
    assert "memory and partner and disk" in row
    found = [one for one in msgspec.json.decode(said("verify", "--json")) if "values" in one["note"]]
    assert not any(one["problem"] for one in found)
    places = {(one["node"], one["source"]) for one in found if one["step"] == AT}
    assert places >= {("", "disk"), ("", "partner"), (other, "disk"), (other, "partner")}
    flip(guests(nodes, here).glob(f"{values_folder(AT)}/*.safetensors"))
    damaged = [one for one in msgspec.json.decode(said("verify", "--json")) if one["problem"]]
    assert {(one["step"], one["source"]) for one in damaged} == {(AT, "partner")}
    answer = said("plan", "--lost", other)
    assert f"step {AT} would be restored" not in answer
    assert "of the values that its records need beside them" in answer


@pytest.mark.soak
def test_scavenging_rescues_the_residuals_that_a_lost_node_had(cluster: Any, undisturbed: Any) -> None:
    nodes = cluster(1, 1, tiers=[Partner()], **OPTIONS)
    nodes.live(die_at(AT, level="protected"))
    nodes.lose(nodes.nodes[1])
    here, rescued = nodes.nodes[0], nodes.root / "rescued"
    step, _ = nodes.on(here, lambda: everstep.open(nodes.directory(here)).scavenge(str(rescued)))
    assert step == AT and committed_steps(DiskTier(rescued))[-1] < AT
    nodes.lose(*nodes.nodes)
    nodes.options["tiers"] = [Shared(str(rescued))]
    ended = results(nodes.live())
    assert [one["resumed_from"] for one in ended] == [AT, AT]
    assert {one["state"] for one in ended} == {undisturbed(1, 1, **OPTIONS)}
