"""What this machine offers a run, looked at without torch: each answer says what was found, and what to do about it.

A check is a function that returns lines. What it looks at is given to it where a test wants to show it something else.
"""

from __future__ import annotations

import ctypes
import importlib.metadata as metadata
import platform
import re
import resource
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from everstep.capture.host import SHARED_MEMORY, free_memory
from everstep.cli.output import human_bytes
from everstep.errors import EverstepError
from everstep.image import CHUNK_BYTES
from everstep.store.blocks import room_for
from everstep.store.disk import DiskTier

Verdict = Literal["ok", "worth a look", "must be fixed"]

PROBE_BYTES = 128 << 20  # written and read back, at most
PATIENCE_S = 10.0  # for writing them; a disk that needs longer is slow, and that is known by then
SLOW_BYTES_S = 100e6
SMALL_SHARED_BYTES = 1 << 30
JUMP_S = 0.1  # by which two clocks may disagree over the seconds that all checks take
_ADAM_BYTES = 12e9  # of a model of a billion parameters, with its optimizer

BRINGS = {
    "torchdata": "StatefulDataLoader: data positions that need no fast-forward",
    "nodes": "several nodes: partners, parity, a secret between keepers",
    "objects": "S3, GCS and Azure as a tier",
    "mpi": "programs that were written for SCR and MPI",
    "report": "everstep report",
    "nvml": "how busy the accelerators were, in reports",
    "lightning": "the callback for Lightning",
    "transformers": "the callback for the Trainer of transformers",
    "accelerate": "loops over what Accelerate prepared",
    "ray": "train functions of Ray Train",
    "deepspeed": "loops over an engine of DeepSpeed with ZeRO 1 or 2",
}


class Line(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    found: str
    verdict: Verdict = "ok"
    advice: str = ""


# -- software


def python_line(version: tuple[int, int], name: str) -> Line:
    if version >= (3, 11):
        return Line(what="Python", found=name)
    return Line(what="Python", found=name, verdict="must be fixed", advice="Everstep needs Python 3.11 or later")


def package_lines(requirements: list[str], version_of: Callable[[str], str | None]) -> list[Line]:
    """`requirements`: as the package's metadata has them. What is required, then a line for each extra."""
    needed: list[str] = []
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        name, _, marker = requirement.partition(";")
        extra = re.search(r"extra == ['\"](\w+)['\"]", marker)
        extras.setdefault(extra[1], []).append(name.strip()) if extra else needed.append(name.strip())
    lines = [_required(one, version_of) for one in needed]
    return lines + [_optional(extra, extras[extra], version_of) for extra in BRINGS if extra in extras]


def _required(requirement: str, version_of: Callable[[str], str | None]) -> Line:
    name = _name(requirement)
    found = version_of(name)
    if found is None:
        return Line(what=name, found="not installed", verdict="must be fixed", advice=f"pip install '{requirement}'")
    if not _suits(found, requirement):
        return Line(what=name, found=found, verdict="must be fixed", advice=f"pip install -U '{requirement}'")
    return Line(what=name, found=found)


def _optional(extra: str, requirements: list[str], version_of: Callable[[str], str | None]) -> Line:
    """All of an extra, or nothing of it, is as somebody wanted it; a part of it does not do what it should."""
    versions = {requirement: version_of(_name(requirement)) for requirement in requirements}
    bad = [one for one, found in versions.items() if found is None or not _suits(found, one)]
    what, install = f"everstep[{extra}]", f"pip install 'everstep[{extra}]'"
    if not any(versions.values()):
        return Line(what=what, found="not installed", advice=f"{install} for {BRINGS[extra]}")
    there = ", ".join(f"{_name(one)} {found or 'missing'}" for one, found in versions.items())
    if bad:
        return Line(what=what, found=there, verdict="worth a look", advice=f"{install} for {BRINGS[extra]}")
    return Line(what=what, found=there)


def required() -> list[str]:
    """What Everstep needs and can use, as it was installed; nothing if it runs from its source."""
    try:
        return metadata.requires("everstep") or []
    except metadata.PackageNotFoundError:
        return []


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=~! ]", requirement, maxsplit=1)[0]


def _suits(version: str, requirement: str) -> bool:
    """Whether a version is from the least to before the first that will not do, where a requirement names them."""
    least, below = (re.search(sign + r"([\d.]+)", requirement) for sign in (">=", "<"))
    if least is not None and _numbers(version) < _numbers(least[1]):
        return False
    return below is None or _numbers(version) < _numbers(below[1])


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


# -- memory


def shared_memory_line(place: Path = SHARED_MEMORY) -> Line:
    what = f"shared memory ({place})"
    if not place.is_dir():
        advice = "arenas will be memory of the keeper (memfd), which its death takes along; mount a tmpfs there"
        return Line(what=what, found="none", verdict="worth a look", advice=advice)
    free = free_memory(place)
    found = f"{human_bytes(free)} can be taken"
    if free >= SMALL_SHARED_BYTES:
        return Line(what=what, found=found)
    advice = "arenas that do not fit will be memory of the keeper (memfd); docker run --shm-size=16g or --ipc=host"
    return Line(what=what, found=found, verdict="worth a look", advice=advice)


def locked_memory_line(limit: int, pins: list[str]) -> Line:
    """`pins`: what on this machine wants locked memory."""
    what = "locked memory (ulimit -l)"
    found = "unlimited" if limit == resource.RLIM_INFINITY else human_bytes(limit)
    if limit == resource.RLIM_INFINITY or not pins:
        return Line(what=what, found=found if pins else f"{found}; nothing here pins memory")
    advice = f"{' and '.join(pins)} may not pin buffers, so that copies are slower: ulimit -l unlimited"
    return Line(what=what, found=found, verdict="worth a look", advice=advice)


def pinning(system: Path = Path("/")) -> list[str]:
    found = ["CUDA"] if (system / "dev/nvidiactl").exists() else []
    infiniband = system / "sys/class/infiniband"
    return [*found, "RDMA"] if infiniband.is_dir() and any(infiniband.iterdir()) else found


# -- accelerators


def gpu_lines(torch_version: str | None, system: Path = Path("/")) -> list[Line]:
    """As far as it shows without torch: the driver, and for what torch was built."""
    built = (torch_version or "").partition("+")[2]
    driver = system / "proc/driver/nvidia/version"
    if not driver.exists():
        return [Line(what="CUDA", found="no NVIDIA driver; training is on the CPU or on another accelerator")]
    version = re.search(r"Module\s+([\d.]+)", driver.read_text())
    found = f"driver {version[1] if version else 'of an unknown version'}"
    lines = [Line(what="CUDA", found=f"{found}, torch for {built or 'CUDA'}")]
    if built == "cpu":
        advice = "this torch is built for CPUs only: install one for CUDA (pytorch.org)"
        lines = [Line(what="CUDA", found=f"{found}, torch for CPUs", verdict="worth a look", advice=advice)]
    nccl = [one for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if (one := installed(name))]
    return [*lines, Line(what="NCCL", found=nccl[0] if nccl else "not a package here; --torch asks torch itself")]


def torch_lines() -> list[Line]:
    """The same as torch sees it, which takes seconds to load."""
    import torch

    if not torch.cuda.is_available():
        lines = [Line(what="CUDA for torch", found="none")]
    else:
        names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
        lines = [Line(what="CUDA for torch", found=f"{torch.cuda.device_count()} x {', '.join(names)}")]
    if not torch.distributed.is_available():
        advice = "this torch is built without torch.distributed, so only one process can train"
        return [*lines, Line(what="backends", found="none", verdict="worth a look", advice=advice)]
    backends = {"gloo": torch.distributed.is_gloo_available(), "nccl": torch.distributed.is_nccl_available()}
    found = ", ".join(name for name, there in backends.items() if there) or "none"
    if torch.cuda.is_available() and not backends["nccl"]:
        advice = "several GPUs need NCCL: install a torch that has it"
        return [*lines, Line(what="backends", found=found, verdict="worth a look", advice=advice)]
    return [*lines, Line(what="backends", found=found)]


# -- ports and clocks


def port_line(address: str = "127.0.0.1") -> Line:
    """Ranks, keepers and Prometheus meet over TCP: bind, connect, and say something."""
    try:
        with socket.create_server((address, 0)) as server:
            server.settimeout(5.0)
            port = server.getsockname()[1]
            with socket.create_connection((address, port), timeout=5.0) as near, server.accept()[0] as far:
                far.settimeout(5.0)
                near.sendall(b"!")
                if far.recv(1) != b"!":
                    raise OSError("nothing arrived")
    except OSError as error:
        advice = "no port of this machine can be used; look at the sandbox, the network namespace and the firewall"
        return Line(what="ports", found=f"{address}: {error}", verdict="must be fixed", advice=advice)
    return Line(what="ports", found=f"{address}: bound, connected")


def clocks() -> tuple[float, float]:
    return time.time(), time.monotonic()


def clock_line(before: tuple[float, float], after: tuple[float, float], synchronized: bool | None) -> Line:
    """Two looks at the wall clock and at the one that never jumps; `synchronized`: None if it cannot be told."""
    jump = (after[0] - before[0]) - (after[1] - before[1])
    told = {True: "synchronized", False: "not synchronized", None: "whether it is synchronized cannot be told here"}
    if abs(jump) > JUMP_S:
        advice = "somebody sets the clock by force; times of events and halt --before are wrong by that: use NTP"
        return Line(what="clock", found=f"jumped by {jump:+.2f} s meanwhile", verdict="worth a look", advice=advice)
    if synchronized is False:
        advice = "times in reports of several nodes do not fit together; start chrony or systemd-timesyncd"
        return Line(what="clock", found=told[False], verdict="worth a look", advice=advice)
    return Line(what="clock", found=f"steady, {told[synchronized]}")


def is_synchronized() -> bool | None:
    """What the kernel knows of NTP (adjtimex, which changes nothing so); None where it may not be asked."""
    if struct.calcsize("l") != 8:
        return None
    state = ctypes.create_string_buffer(512)  # struct timex is 208 bytes, and `status` is at 40
    try:
        if ctypes.CDLL(None, use_errno=True).adjtimex(state) < 0:
            return None
    except (OSError, AttributeError):
        return None
    return not struct.unpack_from("i", state, 40)[0] & 0x40  # STA_UNSYNC


# -- the disk


def file_system(place: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Its kind, as the kernel calls it; empty if it does not say."""
    found: dict[Path, str] = {}
    try:
        for line in mounts.read_text().splitlines():
            before, _, after = line.partition(" - ")
            found[Path(before.split()[4].replace("\\040", " "))] = after.split()[0]
    except (OSError, IndexError):
        return ""
    return next((found[one] for one in (place, *place.parents) if one in found), "")


def _free_line(tier: DiskTier, kind: str) -> Line:
    free = human_bytes(tier.free_bytes())
    if kind not in ("tmpfs", "ramfs"):
        return Line(what="free disk", found=free)
    advice = "it is memory: a reboot takes the checkpoints along; put dir= on a disk"
    return Line(what="free disk", found=f"{free}, on {kind}", verdict="worth a look", advice=advice)


class _TooSlow(Exception):
    pass


def disk_lines(directory: Path, watch: Callable[[int], None], *, patience_s: float = PATIENCE_S) -> Iterator[Line]:
    """Write and read as a base is, beside where it would be; `watch` is told how many bytes are through."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    what = f"disk ({place})"
    try:
        folder = Path(tempfile.mkdtemp(prefix=".everstep-doctor-", dir=place))
    except OSError as error:
        yield Line(what=what, found=str(error.strerror), verdict="must be fixed", advice="choose a place to write to")
        return
    tier = DiskTier(folder)
    try:
        yield _free_line(tier, file_system(place))
        yield from _measured(tier, what, watch, patience_s)
    except (EverstepError, OSError) as error:
        yield Line(what=what, found=str(error), verdict="must be fixed", advice="a run could not write here")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measured(tier: DiskTier, what: str, watch: Callable[[int], None], patience_s: float) -> Iterator[Line]:
    done, began = 0, time.monotonic()

    def passing(size_bytes: int) -> None:
        nonlocal done
        if time.monotonic() - began > patience_s:
            raise _TooSlow
        done += size_bytes
        watch(done)

    data = room_for(PROBE_BYTES)
    for at in range(0, PROBE_BYTES, CHUNK_BYTES):
        data[at : at + 8] = at.to_bytes(8, "little")  # no two chunks alike, for those who would keep one of them
    try:
        tier.put("probe", data, passing)
    except _TooSlow:
        yield _bandwidth(f"{what}, writing", done / patience_s, "at most ")
        return
    wrote_s, began = time.monotonic() - began, time.monotonic()
    found = tier.get("probe")
    read_s = time.monotonic() - began
    yield _direct_line(tier.wrote_direct)
    yield _bandwidth(f"{what}, writing", len(data) / wrote_s)
    yield _bandwidth(f"{what}, reading", len(data) / read_s)
    if found != data:
        advice = "what is read is not what was written: do not trust this disk"
        yield Line(what=what, found="it gives back other bytes", verdict="must be fixed", advice=advice)


def _direct_line(is_direct: bool) -> Line:
    if is_direct:
        return Line(what="O_DIRECT", found="taken")
    advice = "checkpoints go through the page cache here (tmpfs, overlay, some network mounts): put dir= on a real disk"
    return Line(what="O_DIRECT", found="refused", verdict="worth a look", advice=advice)


def _bandwidth(what: str, bytes_per_s: float, about: str = "") -> Line:
    found = f"{about}{human_bytes(int(bytes_per_s))}/s"
    if bytes_per_s >= SLOW_BYTES_S:
        return Line(what=what, found=found)
    minutes = _ADAM_BYTES / max(bytes_per_s, 1) / 60
    advice = f'a billion parameters with Adam take {minutes:.0f} min; a faster disk as dir= or Disk("/nvme/...")'
    return Line(what=what, found=found, verdict="worth a look", advice=advice)


def system_lines() -> list[Line]:
    lines = [python_line((sys.version_info[0], sys.version_info[1]), platform.python_version())]
    if not required():
        advice = "packages that it needs were not looked for: pip install -e ."
        lines.append(Line(what="everstep", found="runs from its source", verdict="worth a look", advice=advice))
    lines += package_lines(required(), installed)
    lines += gpu_lines(installed("torch"))
    lines += [shared_memory_line(), locked_memory_line(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], pinning())]
    return [*lines, port_line()]
