"""`everstep doctor`: each thing that it looks at is shown something bad, and must say so."""

from __future__ import annotations

import os
import resource
import tomllib
from pathlib import Path

import pytest
from said import Cli

from everstep.cli import environment
from everstep.cli.environment import (
    BRINGS,
    Line,
    clock_line,
    disk_lines,
    file_system,
    gpu_lines,
    is_synchronized,
    locked_memory_line,
    package_lines,
    pinning,
    port_line,
    python_line,
    shared_memory_line,
)
from everstep.store.disk import DiskTier

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PROBE_BYTES", 8 << 20)


def looked_at(directory: Path, **how: float) -> dict[str, Line]:
    return {line.what.partition(" (")[0]: line for line in disk_lines(directory, lambda done: None, **how)}


def test_what_it_says_is_the_same_for_people_and_for_machines(cli: Cli, tmp_path: Path) -> None:
    said = cli("doctor", tmp_path / "not" / "yet", "--json")
    assert all(set(line) == {"what", "found", "verdict", "advice"} for line in said.json)
    assert said.code == any(line["verdict"] == "must be fixed" for line in said.json)
    assert all(line["advice"] for line in said.json if line["verdict"] != "ok")
    found = {line["what"] for line in said.json}
    assert {"Python", "torch", "everstep[nodes]", "shared memory (/dev/shm)", "ports", "O_DIRECT", "clock"} <= found
    assert f"disk ({tmp_path}), writing" in found and f"disk ({tmp_path}), reading" in found
    told = cli("doctor", tmp_path / "not" / "yet")
    assert told.code == said.code and "worth a look, " in told.out and "locked memory" in told.out
    assert list(tmp_path.iterdir()) == []


def test_what_must_be_fixed_is_exit_code_1(cli: Cli) -> None:
    said = cli("doctor", "/proc/self")
    assert said.code == 1
    assert "must be fixed" in said.out and "choose a place to write to" in said.out


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    passed: list[int] = []
    lines = {line.what.partition(" (")[0]: line for line in disk_lines(tmp_path, passed.append)}
    assert max(passed) == environment.PROBE_BYTES and {"free disk", "disk"} <= lines.keys()
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_a_directory_should_be_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        assert looked_at(place)["disk"].found == "Not a directory"


def test_a_slow_disk_is_called_off(tmp_path: Path) -> None:
    found = looked_at(tmp_path, patience_s=1e-9)["disk"]
    assert found.verdict == "worth a look" and found.found.startswith("at most 0 B/s")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_must_be_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskTier, "free_bytes", lambda self: 1000)
    found = looked_at(tmp_path)
    assert found["disk"].verdict == "must be fixed" and found["free disk"].found == "1.0 kB"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_gives_back_other_bytes_must_be_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flipped(self: DiskTier, name: str) -> memoryview:
        content = bytearray((self.root / name).read_bytes())
        content[5_000_000] ^= 1
        return memoryview(content)

    monkeypatch.setattr(DiskTier, "get", flipped)
    assert looked_at(tmp_path)["disk"].verdict == "must be fixed"


def test_a_file_system_without_o_direct_is_worth_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskTier, "direct", False)
    assert looked_at(tmp_path)["O_DIRECT"].verdict == "worth a look"


def test_a_directory_in_memory_is_worth_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 0:20 / / rw,relatime - overlay overlay rw\n"
        "22 21 0:21 / /dev/shm rw - tmpfs shm rw,size=64k\n"
        "23 21 0:22 / /a\\040b rw shared:1 - ext4 /dev/sda1 rw\n"
    )
    kinds = {place: file_system(Path(place), mounts) for place in ("/dev/shm/run", "/dev/shmall", "/a b/c", "/")}
    assert kinds == {"/dev/shm/run": "tmpfs", "/dev/shmall": "overlay", "/a b/c": "ext4", "/": "overlay"}
    assert file_system(tmp_path, tmp_path / "none") == ""
    assert looked_at(tmp_path)["free disk"].verdict == ("worth a look" if file_system(tmp_path) == "tmpfs" else "ok")
    monkeypatch.setattr(environment, "file_system", lambda place: "tmpfs")
    assert looked_at(tmp_path)["free disk"].verdict == "worth a look"


def test_packages_that_are_missing_old_or_half_there() -> None:
    requirements = ["torch>=2.8", "msgspec>=0.19", "numpy>=1.26", "pyzmq>=26; extra == 'nodes'"]
    requirements += ["cryptography>=42; extra == 'nodes'", "obstore>=0.8; extra == 'objects'", "pytest; extra == 'dev'"]
    installed = {"torch": "2.10.1+cu128", "msgspec": "0.18.6", "cryptography": "44.0"}
    found = {line.what: line for line in package_lines(requirements, installed.get)}
    verdicts = {what: line.verdict for what, line in found.items()}
    assert verdicts == {
        "torch": "ok",
        "msgspec": "must be fixed",
        "numpy": "must be fixed",
        "everstep[nodes]": "worth a look",
        "everstep[objects]": "ok",
    }
    assert found["numpy"].advice == "pip install 'numpy>=1.26'"
    assert "pyzmq missing" in found["everstep[nodes]"].found
    assert "S3" in found["everstep[objects]"].advice


def test_an_extra_that_is_too_new_is_worth_a_look() -> None:
    requirements = ["lightning<2.7,>=2.6; extra == 'lightning'"]
    for version, verdict in (("2.5.9", "worth a look"), ("2.6.6", "ok"), ("2.7.0", "worth a look")):
        [line] = package_lines(requirements, {"lightning": version}.get)
        assert (line.found, line.verdict) == (f"lightning {version}", verdict)


def test_every_extra_is_described() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert BRINGS.keys() == project["optional-dependencies"].keys() - {"dev", "docs"}
    assert project["requires-python"] == ">=3.11"
    assert python_line((3, 10), "3.10.1").verdict == "must be fixed"
    assert python_line((3, 11), "3.11.0").verdict == "ok"


def test_shared_memory_that_is_small_or_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_memory_line(tmp_path / "none").verdict == "worth a look"
    for free, verdict in ((64 << 20, "worth a look"), (16 << 30, "ok")):
        monkeypatch.setattr(environment, "free_memory", lambda place, free=free: free)
        assert shared_memory_line(tmp_path).verdict == verdict


def test_locked_memory_matters_where_something_pins_it(tmp_path: Path) -> None:
    assert locked_memory_line(65536, []).verdict == "ok"
    assert locked_memory_line(65536, ["CUDA"]).verdict == "worth a look"
    assert locked_memory_line(resource.RLIM_INFINITY, ["CUDA"]).verdict == "ok"
    assert pinning(tmp_path) == []
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert pinning(tmp_path) == ["CUDA", "RDMA"]


def test_a_torch_for_cpus_beside_a_gpu_is_worth_a_look(tmp_path: Path) -> None:
    assert [line.verdict for line in gpu_lines("2.13.0+cpu", tmp_path)] == ["ok"]
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Kernel Module  570.86.10  Thu\n")
    line = gpu_lines("2.13.0+cpu", tmp_path)[0]
    assert line.verdict == "worth a look" and line.found.startswith("driver 570.86.10")
    assert gpu_lines("2.13.0+cu128", tmp_path)[0].verdict == "ok"


def test_ports_that_cannot_be_bound_must_be_fixed() -> None:
    assert port_line().verdict == "ok"
    assert port_line("192.0.2.1").verdict == "must be fixed"  # an address that nobody has


def test_a_clock_that_jumps_or_is_not_synchronized_is_worth_a_look() -> None:
    before = (1000.0, 50.0)
    assert clock_line(before, (1002.0, 52.0), True).verdict == "ok"
    assert clock_line(before, (1002.0, 52.0), None).verdict == "ok"
    assert clock_line(before, (1002.0, 52.0), False).verdict == "worth a look"
    assert clock_line(before, (1007.0, 52.0), True).found == "jumped by +5.00 s meanwhile"
    assert is_synchronized() in (True, False, None)


def test_torch_is_asked_only_if_wanted(cli: Cli, tmp_path: Path) -> None:
    asked = {line["what"] for line in cli("doctor", tmp_path, "--torch", "--json").json}
    assert {"CUDA for torch", "backends"} <= asked
    assert not {"CUDA for torch", "backends"} & {line["what"] for line in cli("doctor", tmp_path, "--json").json}
    assert os.listdir(tmp_path) == []
