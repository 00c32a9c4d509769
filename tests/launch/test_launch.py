"""Rank, node and failure domain under every launcher: recorded environments, and real ones where they run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from network import free_port

from everstep import launch, topology
from everstep.errors import BadConfig

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu08", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
MPIRUN = {  # Open MPI 4.1.4, mpirun -n 2 on one machine
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1", "OMPI_MCA_ess_base_jobid": "947781633",
    "PMIX_NAMESPACE": "947781633", "PMIX_RANK": "1", "PMIX_HOSTNAME": "vm",
}  # fmt: skip
MPIRUN_NODES = {**MPIRUN, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "PMIX_HOSTNAME": "gpu09"}
SLURM_JOB = {  # what every process of a job sees, its batch script included
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "gpu[08-09]", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4",
}  # fmt: skip
SRUN = {
    **SLURM_JOB, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[08-09]", "SLURM_STEP_NUM_NODES": "2", "SLURMD_NODENAME": "gpu09",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.8", "SLURM_TOPOLOGY_ADDR": "top.leaf2.gpu09",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
}  # fmt: skip
LAUNCHER = ("OMPI_", "PMIX_", "SLURM", "EVERSTEP_")


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> object:
    """The environment of a recorded launcher instead of this one."""

    def be(environment: dict[str, str]) -> None:
        for name in (*TORCHRUN, *(name for name in os.environ if name.startswith(LAUNCHER))):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return be


# -- recorded


def test_what_torchrun_has_set_is_left_alone() -> None:
    assert launch.missing(TORCHRUN) == {}
    assert launch.missing({**SRUN, **TORCHRUN}) == {}


def test_mpirun_on_one_node_meets_on_loopback() -> None:
    found = launch.missing(MPIRUN)
    assert {**found, "MASTER_PORT": ""} == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "",
    }  # fmt: skip
    other = launch.missing({**MPIRUN, "PMIX_NAMESPACE": "947781634"})
    assert 10_000 <= int(found["MASTER_PORT"]) < 30_000 and other["MASTER_PORT"] != found["MASTER_PORT"]


def test_mpirun_on_several_nodes_asks_for_the_master_unless_slurm_knows_it() -> None:
    with pytest.raises(BadConfig, match=r"mpirun -x MASTER_ADDR=<that node>"):
        launch.missing(MPIRUN_NODES)
    assert launch.missing({**MPIRUN_NODES, "MASTER_ADDR": "gpu08"})["RANK"] == "3"
    assert "MASTER_ADDR" not in launch.missing({**MPIRUN_NODES, "MASTER_ADDR": "gpu08"})
    inside = launch.missing({**SRUN, **MPIRUN_NODES, "SLURM_PROCID": "1"})
    assert (inside["RANK"], inside["MASTER_ADDR"]) == ("3", "gpu08"), "the numbers of Slurm's are those of its daemons"


def test_srun_meets_on_the_first_node_of_its_step() -> None:
    found = launch.missing(SRUN)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("3", "4", "1")
    assert found["MASTER_ADDR"] == "gpu08"
    first = launch.missing({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "gpu08"})
    assert first["MASTER_PORT"] == found["MASTER_PORT"]
    assert launch.missing({**SRUN, "SLURM_STEP_ID": "1"})["MASTER_PORT"] != found["MASTER_PORT"]
    assert launch.missing({**SRUN, "SLURM_STEP_NUM_NODES": "1"})["MASTER_ADDR"] == "127.0.0.1"
    bare = {name: value for name, value in SRUN.items() if not name.endswith("NODELIST")}
    assert launch.missing(bare)["MASTER_ADDR"] == "10.0.0.8"


def test_a_batch_script_is_one_process_and_not_the_first_of_its_tasks() -> None:
    for step in ({}, {"SLURM_STEP_ID": "4294967291"}):
        with pytest.raises(BadConfig, match="start this program with torchrun, mpirun or srun"):
            launch.missing({**SLURM_JOB, "SLURM_PROCID": "0", **step})


def test_without_a_launcher_one_sentence_says_what_is_missing() -> None:
    with pytest.raises(BadConfig, match=r"^WORLD_SIZE, MASTER_ADDR not set: start this program with torchrun, mpirun"):
        launch.missing({"RANK": "0", "MASTER_PORT": "1"})
    with pytest.raises(BadConfig, match="OMPI_COMM_WORLD_SIZE must be a number, not None"):
        launch.missing({"OMPI_COMM_WORLD_RANK": "0"})
    with pytest.raises(BadConfig, match="SLURM_PROCID must be a number, not '-1'"):
        launch.missing({**SRUN, "SLURM_PROCID": "-1"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu08", "gpu08"), ("gpu[08-11,20],login1", "gpu08"), ("gpu[3,5]", "gpu3"), ("a1,b[1-2]", "a1"),
        ("r1-n[001-016]-ib", "r1-n001-ib"), ("n1.site.org,n2.site.org", "n1.site.org"), ("", ""),
    ],
)  # fmt: skip
def test_the_first_of_a_list_of_nodes(nodes: str, first: str) -> None:
    assert launch.first_host(nodes) == first


@pytest.mark.parametrize(
    ("environment", "node", "domain"),
    [
        (MPIRUN_NODES, "gpu09", "gpu09"),
        (SRUN, "gpu09", "leaf2"),
        ({**SRUN, "SLURM_TOPOLOGY_ADDR": "gpu09", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, "gpu09", "gpu09"),
        ({**SRUN, "SLURM_TOPOLOGY_ADDR": "top.s[1-2].gpu09"}, "gpu09", "gpu09"),
        ({**SRUN, **MPIRUN_NODES, "SLURMD_NODENAME": "gpu08"}, "gpu09", "gpu09"),
        ({**SRUN, "EVERSTEP_NODE": "mine", "EVERSTEP_DOMAIN": "rack1"}, "mine", "rack1"),
        ({**SRUN, "EVERSTEP_NODE": "mine"}, "mine", "leaf2"),
    ],
)  # fmt: skip
def test_node_and_domain_are_the_launchers_unless_they_are_named(
    environment: dict[str, str], node: str, domain: str, pretend: object
) -> None:
    pretend(environment)  # type: ignore[operator]
    assert (topology.node_name(), topology.domain_name()) == (node, domain)


# -- real

ASK = """
import everstep.topology as t, torch.distributed as dist
t.init_process_group("gloo")
place = t.here()
said = ("place", str(place.rank), str(place.world), place.node, ",".join(place.nodes), ",".join(place.domains))
print(" ".join(said) + "\\n", end="", flush=True)  # one write: the other rank writes beside it
dist.barrier()
dist.destroy_process_group()
"""


def places(said: str) -> list[str]:
    return sorted(line.split("place ", 1)[1] for line in said.splitlines() if "place " in line)


def clean_environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in TORCHRUN and not name.startswith(LAUNCHER)}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_two_ranks_of_mpirun_find_each_other() -> None:
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-c", ASK]
    ended = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )
    assert ended.returncode == 0, ended.stderr
    node = places(ended.stdout)[0].split()[2]
    assert places(ended.stdout) == [f"{rank} 2 {node} {node},{node} {node},{node}" for rank in range(2)]


def test_two_agents_of_torchrun_are_two_nodes(tmp_path: Path) -> None:
    script = tmp_path / "ask.py"
    script.write_text(ASK)
    port = free_port()
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend",
             "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two", str(script)],
            env=clean_environment(EVERSTEP_NODE=node, EVERSTEP_DOMAIN=f"rack-{node}"), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in ("one", "two")
    ]  # fmt: skip
    said = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    found = [line.split() for line in places(said[0][0] + said[1][0])]
    assert [(line[0], line[1]) for line in found] == [("0", "2"), ("1", "2")]
    assert {line[2] for line in found} == {"one", "two"}
    assert {line[3] for line in found} == {",".join(line[2] for line in found)}
    assert {line[4] for line in found} == {",".join(f"rack-{line[2]}" for line in found)}
