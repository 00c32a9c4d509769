"""Under Ray Train: a worker dies, Ray starts all of them again, and they go on from memory, bit for bit."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from killed import OF_LAUNCHERS, differences, last_state
from lives import run_directory, told

from everstep.events import Started
from everstep.keeper.process import environment

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray"),
    pytest.mark.soak,  # Ray alone starts a dozen processes, each with all of it
]

DRIVER = Path(__file__).with_name("ray_driver.py")


class Cluster:
    """A Ray of this test's own: on this machine only, known by a word in the environment of all its processes."""

    def __init__(self, folder: Path) -> None:
        self._mark = uuid.uuid4().hex
        self._clean = {name: value for name, value in environment().items() if not name.startswith(OF_LAUNCHERS)}
        self._clean |= {
            "RAY_AUTH_TOKEN": self._mark, "RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what they have for a cluster of one: loopback, and nothing else
        }  # fmt: skip

    def start(self, *words: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            list(map(str, [sys.executable, DRIVER, *words])), env=self._clean, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def fit(self, *words: object) -> list[str]:
        """What the driver says of itself, apart from what its workers say."""
        with self.start(*words) as driver:
            try:
                said, _ = driver.communicate(timeout=200)
            finally:
                driver.kill()
        assert driver.returncode == 0, said
        return [line for line in said.splitlines() if line.startswith(("127.", "ended"))]

    def processes(self) -> list[psutil.Process]:
        return [one for one in psutil.process_iter() if self._has_mark(one)]

    def _has_mark(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("RAY_AUTH_TOKEN") == self._mark
        except psutil.Error:
            return False

    def end(self) -> None:
        for process in self.processes():
            process.kill()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(Path(folder))
        yield cluster
        cluster.end()


def test_a_worker_is_killed_and_all_go_on_bit_for_bit(cluster: Cluster) -> None:
    with run_directory() as whole, run_directory() as killed:
        said = cluster.fit(whole, 20, "without", killed, 20, 8)
        assert said == ["127.0.0.1", "ended 20 20"]
        began = sorted((event.rank, event.step, event.source) for event in told(killed, Started))
        assert began in [
            [(0, 0, "nothing"), (0, step, "memory"), (1, 0, "nothing"), (1, step, "memory")] for step in (7, 8)
        ]
        different = differences(last_state(killed), last_state(whole))
        assert not different, f"not the same: {different}"
        assert not _wait_for_none(cluster)


def _wait_for_none(cluster: Cluster) -> list[psutil.Process]:
    """Who is still there, a while after a driver that ended in good order."""
    deadline = time.monotonic() + 20
    while (left := cluster.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def test_all_of_ray_is_killed_and_a_new_one_goes_on_bit_for_bit(cluster: Cluster) -> None:
    """The driver, the workers and all between them; and the keeper, which was started by one of them."""
    with run_directory() as whole, run_directory() as killed:
        assert cluster.fit(whole, 400, "without") == ["127.0.0.1"]
        driver = cluster.start(killed, 400, 0)
        while not list(killed.glob("step-*.json")):
            assert driver.poll() is None
            time.sleep(0.02)
        everybody = cluster.processes()
        for process in everybody:
            process.suspend()  # nobody is to clean up after another
        for process in everybody:
            process.kill()
        driver.communicate()
        assert cluster.fit(killed, 400, 0)[-1] == "ended 400 400"
        assert any(event.step for event in told(killed, Started))
        different = differences(last_state(killed), last_state(whole))
        assert not different, f"not the same: {different}"


def test_a_halt_ends_the_training_and_ray_takes_it_for_done(cluster: Cluster) -> None:
    with run_directory() as directory:
        driver = cluster.start(directory, 100_000, 0)
        while not list(directory.glob("step-*.json")):
            assert driver.poll() is None
            time.sleep(0.02)
        halt = [sys.executable, "-m", "everstep.cli", "halt", str(directory), "--now"]
        subprocess.run(halt, check=True, env=environment(), capture_output=True)
        said, _ = driver.communicate(timeout=120)
        assert driver.returncode == 0 and "ended" in said
        assert len(told(directory, Started)) == 2
