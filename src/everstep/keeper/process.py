"""The keeper as a process of its own session, started by whoever needs it first; a second one steps back at once."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from everstep.capture.host import allow_many_files
from everstep.errors import KeeperLost
from everstep.events import EventLog, KeeperEnded, KeeperStarted
from everstep.keeper.protocol import leave, runtime_folder, socket_address
from everstep.timeline import Timeline, timeline_of_devices, timeline_of_keeper
from everstep.topology import node_name

_NICENESS = 10


def start(run: str, directory: Path) -> None:
    """Have a keeper running for this run on this node when this returns."""
    with open(keeper_log(directory), "ab") as log:
        answer = subprocess.run(
            [sys.executable, "-m", "everstep.keeper.process", run, str(directory)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(), start_new_session=True, timeout=60,
        )  # fmt: skip
    if answer.returncode != 0:
        raise KeeperLost(f"the keeper did not start (exit {answer.returncode}); see {keeper_log(directory)}")


def environment() -> dict[str, str]:
    """Of a process that finds this very package."""
    package = Path(__file__).parents[2]
    found = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found)}


def keeper_log(directory: Path) -> Path:
    return directory / f"keeper-{node_name()}.log"


def last_words(directory: Path) -> str:
    """Of the keepers that ended badly on this node, the last one's; empty if all is well."""
    try:
        lines = keeper_log(directory).read_text(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def main(run: str, directory: Path) -> None:
    from everstep.keeper.devices import Devices
    from everstep.keeper.keeper import Keeper  # whoever only starts one does not load it

    folder = runtime_folder(run)
    if not _lock(folder / "keeper.lock"):
        return  # there is one already
    path = folder / "keeper.sock"
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with socket_address(folder) as address:
        listener.bind(address)
    path.chmod(0o600)
    listener.listen(64)
    if os.fork():
        os._exit(0)  # the starter waits for this: the keeper listens
    listener.listen(64)  # again: whoever asks the socket for its owner must hear of this process
    os.nice(_NICENESS)
    allow_many_files()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its work is done; what must end it at once is SIGKILL
    emit = EventLog(directory / f"events-keeper-{node_name()}.jsonl")
    emit(KeeperStarted(pid=os.getpid(), node=node_name()))
    timeline = Timeline(timeline_of_keeper(directory, node_name()))
    devices = Devices(timeline_of_devices(directory, node_name()))
    Keeper(directory, emit, mark=timeline.mark).serve(listener, [])
    devices.close()
    timeline.close()
    path.unlink(missing_ok=True)
    (folder / "keeper.lock").unlink(missing_ok=True)
    leave(folder)
    emit(KeeperEnded(pid=os.getpid(), reason="no trainers, and all that was sealed is durable"))


def _lock(path: Path) -> bool:
    """Hold the lock for the life of this process; a lock file that a predecessor just removed does not count."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
            return True
        os.close(descriptor)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
