"""`everstep run` on several nodes, each imitated on this machine: a real training loses a node, and goes on."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import pytest
from crews import Job
from lives import kill_keeper, run_directory, told
from test_supervised import TRAIN, reached, results, undisturbed
from typer.testing import CliRunner

from everstep.cli import app
from everstep.events import Called, RanksLost

STEPS = 300


class Site:
    """A job of several nodes with one directory that all of them see."""

    def __init__(self, folder: Path, directory: Path) -> None:
        self.folder, self.directory = folder, directory
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            self.master = f"127.0.0.1:{held.getsockname()[1]}"
        self.jobs: dict[str, Job] = {}

    def start(self, node: str, *words: object) -> Job:
        folder = self.folder / f"{node}-{len(self.jobs)}"
        folder.mkdir()
        train = [TRAIN, "--dir", self.directory, "--steps", STEPS, "--detect", "3s"]
        before = f"import os; os.environ['EVERSTEP_NODE'] = '{node}'"
        job = self.jobs[folder.name] = Job(folder, *words, "--master", self.master, *train, before=before)
        return job

    def lose(self, node: str, job: Job) -> None:
        """The supervisor's death is that of its workers; the keeper goes as well."""
        os.environ["EVERSTEP_NODE"] = node
        try:
            job.process.send_signal(signal.SIGKILL)
            job.process.wait()
            pid = kill_keeper(self.directory)
        finally:
            del os.environ["EVERSTEP_NODE"]
        assert pid is not None

    def end_keepers(self, *nodes: str) -> None:
        for node in nodes:
            os.environ["EVERSTEP_NODE"] = node
            try:
                kill_keeper(self.directory)
            finally:
                del os.environ["EVERSTEP_NODE"]


@pytest.mark.soak
def test_a_node_that_is_lost_is_replaced_by_one_that_stands_by_and_not_a_bit_differs(tmp_path: Path) -> None:
    mark = os.getpid()
    nodes = [f"c{number}-{mark}" for number in range(4)]
    with run_directory() as directory:
        site = Site(tmp_path, directory)
        try:
            crews = [
                site.start(node, "--nproc", 1, "--nodes", 3, "--node-rank", rank) for rank, node in enumerate(nodes[:3])
            ]
            stand_by = site.start(nodes[3], "--nproc", 1, "--stand-by")
            crews[0].until(lambda: reached(directory) >= 30 and (directory / "council").exists())
            crews[0].until(lambda: list(directory.glob(f"events-keeper-{nodes[3]}.jsonl")))
            site.lose(nodes[1], crews[1])
            for job in (crews[0], crews[2], stand_by):
                assert job.wait() == 0, job.said
            found = {rank: line for job in (crews[0], crews[2], stand_by) for rank, line in results(job).items()}
            assert found == undisturbed(tmp_path / "undisturbed", 3, STEPS)[1]
            assert {event.node for event in told(directory, RanksLost)} == {nodes[1]}
            assert [event.policy for event in told(directory, Called)] == ["spare"]
            shown = CliRunner().invoke(app, ["status", str(directory)]).output
            lost = rf"lived through a loss at step \d+, view 1: spare, 3 ranks, exact \(rank 1.*{nodes[1]}.*\)"
            assert re.search(lost, shown), shown
        finally:
            site.end_keepers(*nodes)
