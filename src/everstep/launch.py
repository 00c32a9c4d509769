"""What a launcher says of this process: its rank, its node, and where rank 0 is, under torchrun, mpirun and srun alike.

Pure functions of an environment. OpenMPI's variables are asked before Slurm's: mpirun inside a Slurm job leaves both,
and Slurm's are then those of its daemons. What torchrun sets is what torch reads, so there is nothing to translate.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from everstep.errors import BadConfig

_FIRST_PORT, _PORTS = 10_000, 20_000  # below those that kernels give to clients
_NO_REAL_STEP = 0xFFFF_FFF0  # Slurm numbers a batch script from here on: it is one process, whatever SLURM_NTASKS says
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HOST = r"[A-Za-z0-9._-]*|\[[0-9a-fA-F:.]+\]"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """One process of a job. `master`: where rank 0 is; empty if the launcher does not say."""

    by: str
    rank: int
    world: int
    local_rank: int
    job: str  # the same for all processes of this start, and for no other
    master: str
    node: str = ""  # as the launcher calls it
    domain: str = ""  # what the launcher says fails together with it


def launched(environment: Mapping[str, str]) -> Launched | None:
    """What mpirun or srun said; None if neither started this process."""
    if "OMPI_COMM_WORLD_RANK" in environment:
        return _by_mpirun(environment)
    if "SLURM_PROCID" in environment and _number(environment, "SLURM_STEP_ID", default=_NO_REAL_STEP) < _NO_REAL_STEP:
        return _by_srun(environment)
    return None


def missing(environment: Mapping[str, str]) -> dict[str, str]:
    """What torch needs to begin and nobody has set yet, from the launcher. BadConfig if it does not say."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    absent = [name for name in needed if not environment.get(name)]
    if not absent:
        return {}
    found = launched(environment)
    if found is None:
        raise BadConfig(
            f"{', '.join(absent)} not set: start this program with torchrun, mpirun or srun, or set {', '.join(needed)}"
        )
    if "MASTER_ADDR" in absent and not found.master:
        raise BadConfig(
            f"{found.by} does not say on which node rank 0 is: start it as {found.by} -x MASTER_ADDR=<that node> ..."
        )
    known = {
        "RANK": str(found.rank), "WORLD_SIZE": str(found.world), "LOCAL_RANK": str(found.local_rank),
        "MASTER_ADDR": found.master, "MASTER_PORT": str(_FIRST_PORT + zlib.crc32(found.job.encode()) % _PORTS),
    }  # fmt: skip
    return {name: value for name, value in known.items() if not environment.get(name)}


def is_spare(environment: Mapping[str, str]) -> bool:
    """Whether this process is to stand by until a place becomes free."""
    return environment.get("EVERSTEP_SPARE", "") not in ("", "0")


def end_time(environment: Mapping[str, str]) -> float | None:
    """When the allocation ends, in seconds since the epoch, if anybody says."""
    for name in ("EVERSTEP_END_TIME", "SLURM_JOB_END_TIME"):
        if text := environment.get(name):
            try:
                return float(text)
            except ValueError:
                raise BadConfig(
                    f"{name} must be in seconds since the epoch, as `date +%s` says, not {text!r}"
                ) from None
    return None


def metrics_address(environment: Mapping[str, str]) -> str:
    """Where keepers are to answer Prometheus, as host:port. A port alone: for this machine only; empty: nowhere."""
    text = environment.get("EVERSTEP_METRICS", "")
    host, _, port = text.rpartition(":")
    if text and not (port.isascii() and port.isdigit() and int(port) < 1 << 16 and re.fullmatch(_HOST, host)):
        raise BadConfig(f"EVERSTEP_METRICS must be a port or host:port, such as 9464 or 0.0.0.0:9464, not {text!r}")
    return f"{host or _LOOPBACK}:{port}" if text else ""


def first_host(nodes: str) -> str:
    """The first of a list as Slurm writes it: `gpu[08-11,20],login1` begins with `gpu08`."""
    found = re.match(rf"({_NAME})?(?:\[([A-Za-z0-9]+)[^\]]*\]([A-Za-z0-9._-]*))?", nodes)
    assert found is not None
    return "".join(part or "" for part in found.groups())


def _by_mpirun(environment: Mapping[str, str]) -> Launched:
    world = _number(environment, "OMPI_COMM_WORLD_SIZE")
    if _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", default=0) == world:
        master = _LOOPBACK
    else:  # it tells nobody where rank 0 is; inside a Slurm job that is the first node
        master = first_host(environment.get("SLURM_JOB_NODELIST", ""))
    return Launched(
        by="mpirun", rank=_number(environment, "OMPI_COMM_WORLD_RANK"), world=world,
        local_rank=_number(environment, "OMPI_COMM_WORLD_LOCAL_RANK", default=0), master=master,
        job=environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", ""),
        node=environment.get("PMIX_HOSTNAME", ""),
    )  # fmt: skip


def _by_srun(environment: Mapping[str, str]) -> Launched:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    master = first_host(nodes) or environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
    if "1" in (environment.get("SLURM_STEP_NUM_NODES"), environment.get("SLURM_JOB_NUM_NODES")):
        master = _LOOPBACK
    world = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    return Launched(
        by="srun", rank=_number(environment, "SLURM_PROCID"), world=_number(environment, world),
        local_rank=_number(environment, "SLURM_LOCALID", default=0), master=master,
        job=f"{environment.get('SLURM_JOB_ID', '')}.{environment['SLURM_STEP_ID']}",
        node=environment.get("SLURMD_NODENAME", ""), domain=_leaf_switch(environment),
    )  # fmt: skip


def _leaf_switch(environment: Mapping[str, str]) -> str:
    """The switch that a node hangs on; empty where Slurm knows of none, or of several."""
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")[:-1]
    names = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    leaf = names[len(kinds) - 1] if 0 < len(kinds) < len(names) else ""
    return leaf if re.fullmatch(_NAME, leaf) else ""


def _number(environment: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdigit():
        raise BadConfig(f"{name} must be a number, not {text!r}: the launcher of this process set part of its own only")
    return int(text)
