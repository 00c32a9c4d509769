"""What keepers tell each other, as somebody on the network sees it."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from cluster import results

import everstep
from everstep import Parity, Partner
from everstep.keeper.client import KeeperClient
from everstep.keeper.protocol import Member


class Relay:
    """Stands between an asker and a server, passes all on, and writes it down."""

    def __init__(self, address: str, notes: Path) -> None:
        host, _, port = address.rpartition(":")
        self._to, self._notes = (host, int(port)), notes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(self._to)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with (self._notes / f"{id(source):x}").open("ab", buffering=0) as notes:
            try:
                while data := source.recv(1 << 16):
                    notes.write(data)
                    target.sendall(data)
            except OSError:
                pass  # one end is gone, so the other goes too
        source.close()
        target.close()


def sniff(notes: Path) -> Any:
    """Every rank's keeper finds the others behind a relay."""
    notes.mkdir()

    def prepare(node: str) -> None:
        folder, join = notes / node, KeeperClient.join
        folder.mkdir()

        def joined(self: KeeperClient, members: tuple[Member, ...]) -> None:
            behind = [
                one if one.node == node else msgspec.structs.replace(one, address=Relay(one.address, folder).address)
                for one in members
            ]
            join(self, tuple(behind))

        KeeperClient.join = joined  # type: ignore[method-assign]

    return prepare


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("scheme", [Partner, Parity])
def test_on_the_network_nobody_reads_the_state_if_it_is_encrypted(
    scheme: type[Partner | Parity], encrypt: bool, cluster: Any, undisturbed: Any, tmp_path: Path
) -> None:
    nodes, notes = cluster(1, 1, tiers=[scheme(encrypt=encrypt)]), tmp_path / "sniffed"
    weights = tmp_path / "weights"

    def at_step(run: everstep.Run, rank: int) -> None:
        if run.step == 4 and rank == 0:  # what the step has made that is about to be cut
            weights.write_bytes(run._state.subjects.models[0][0].weight.detach()[0].numpy().tobytes())
        if run.step == 5:
            run.wait("protected")
            dist.barrier()

    found = results(nodes.live(at_step, prepare=sniff(notes)))
    assert {one["state"] for one in found} == {undisturbed(1, 1)}
    sniffed = b"".join(path.read_bytes() for path in sorted(notes.rglob("*")) if path.is_file())
    assert len(sniffed) > 10_000
    assert (b"model.0.weight" in sniffed) == (not encrypt), "the names of tensors"
    assert (weights.read_bytes() in sniffed) == (not encrypt), "their bytes"


def test_readers_ask_encrypted_keepers_too(cluster: Any) -> None:
    nodes = cluster(1, 1, tiers=[Partner(encrypt=True)])
    plan = nodes.root / "plan.json"

    def at_step(run: everstep.Run, rank: int) -> None:
        if run.step == 5:
            run.wait("protected")
            if rank == 0:
                past = everstep.open(nodes.directory(nodes.nodes[0]))
                plan.write_bytes(msgspec.json.encode(past.plan(lost=[nodes.nodes[0]])))
            dist.barrier()

    results(nodes.live(at_step))
    found = msgspec.json.decode(plan.read_bytes())
    assert (found["step"], {part["node"] for part in found["parts"]}) == (5, {nodes.nodes[1]})


def test_a_node_without_encryption_is_refused_by_all_with_the_same_sentence(cluster: Any, tmp_path: Path) -> None:
    nodes = cluster(1, 1)
    settings = tmp_path / "everstep.toml"

    def prepare(node: str) -> None:
        path = settings.with_name(f"{node}.toml")
        path.write_text(f"[partner]\nencrypt = {'true' if node == nodes.nodes[0] else 'false'}")
        nodes.options["tiers"] = path

    ended = nodes.live(prepare=prepare)
    for one in ended:
        assert one.result is None
        assert f"node {nodes.nodes[0]} is to be protected by Partner(" in one.error
        assert f"encrypt=True), and node {nodes.nodes[1]} by Partner(" in one.error
        assert "encrypt=False): give all ranks the same" in one.error
