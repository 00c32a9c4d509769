"""Network namespaces for keepers: a node's cable can be pulled, and put in again, and ports to listen at."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from everstep.keeper import client
from everstep.keeper.process import environment, keeper_log


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def free_port() -> int:
    """Below those that the system lends to whoever connects: one of those could be taken before it is used."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("of 100 ports none is free")


class Network:
    """A bridge in a namespace of its own, and a namespace with a cable to it for every node."""

    def __init__(self, nodes: list[str]) -> None:
        self.name = f"ev{os.getpid() % 100000}"
        self.places = {node: (f"{self.name}n{number}", f"10.213.7.{number + 1}") for number, node in enumerate(nodes)}
        ip("netns", "add", self.name)
        self._in_bridge("link", "add", "hub", "type", "bridge")
        self._in_bridge("link", "set", "hub", "up")
        for space, address in self.places.values():
            ip("netns", "add", space)
            self._in_bridge("link", "add", space, "type", "veth", "peer", "name", "wire", "netns", space)
            self._in_bridge("link", "set", space, "master", "hub", "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", space, "link", "set", device, "up")

    def _in_bridge(self, *words: str) -> None:
        ip("-n", self.name, *words)

    def cut(self, node: str) -> None:
        self._in_bridge("link", "set", self.places[node][0], "down")

    def mend(self, node: str) -> None:
        self._in_bridge("link", "set", self.places[node][0], "up")

    def prepare(self, node: str) -> None:
        """Only keepers live there: ranks talk as ever, and to their keepers by a socket in a directory."""
        space, address = self.places[node]
        os.environ["EVERSTEP_ADDRESS"] = address

        def start(run: str, directory: Path) -> None:
            with open(keeper_log(directory), "ab") as log:
                subprocess.run(
                    [
                        "ip", "netns", "exec", space, sys.executable, "-m", "everstep.keeper.process", run,
                        str(directory),
                    ],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(), check=True,
                )  # fmt: skip

        client.start = start

    def close(self) -> None:
        for space in (self.name, *(space for space, _ in self.places.values())):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
