"""A process group is set free while it is being made, whatever it waits for."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from everstep import wires
from everstep.live import presence
from everstep.topology import Formed
from everstep.wires import Wires

LIMIT_S = 20.0
HIGHEST_PORT = b"\xff\xff"


class OnlyIts(dist.Store):
    """Rank 0 finds the address of a rank 1 there that never dials: its own, but for the port. The higher one dials."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[str, bytes] = {}
        self.has_read_all = threading.Event()

    def set(self, key: str, value: Any) -> None:
        self._held[key] = bytes(value)

    def get(self, key: str) -> bytes:
        if key in self._held:
            return self._held[key]
        self.has_read_all.set()
        said = self._held[key[:-1] + "0"]
        (name_bytes,) = struct.unpack_from("=Q", said)
        at = 8 + name_bytes + 8 + 2  # after the host's name, the length of the address, and its family
        return said[:at] + HIGHEST_PORT + said[at + 2 :]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        pass


def test_a_rank_that_waits_to_be_dialled_by_one_that_has_given_up_is_set_free() -> None:
    wires, store, ended = Wires(), OnlyIts(), queue.SimpleQueue[str]()

    def form() -> None:
        try:
            with wires.noting(2):
                group = dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=LIMIT_S))
            group.allreduce([torch.zeros(1)]).wait()
            ended.put("it works, without a peer")
        except RuntimeError as error:
            ended.put(str(error))

    threading.Thread(target=form, daemon=True).start()
    assert store.has_read_all.wait(LIMIT_S / 2)
    deadline = time.monotonic() + LIMIT_S / 4
    while ended.empty() and time.monotonic() < deadline:
        wires.cut()
        time.sleep(0.02)
    assert not ended.empty(), "it still waits"
    assert "gloo" in ended.get()


def test_what_a_group_opened_when_it_was_cut_for_the_last_time_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    how, opened = Formed("gloo", timedelta(seconds=1), {}), list[socket.socket]()
    with socket.create_server(("127.0.0.1", 0)) as server:
        making = how.wires.noting(1)
        making.__enter__()

        def meanwhile(_: float) -> None:
            opened.extend((socket.create_connection(server.getsockname()), server.accept()[0]))
            making.__exit__(None, None, None)

        monkeypatch.setattr(presence, "time", SimpleNamespace(sleep=meanwhile))
        presence.Presence._keep_cutting(how)
    for one in opened:
        with one:
            one.settimeout(5.0)
            assert one.recv(1) == b""


def test_who_cuts_a_group_that_has_just_failed_leaves_alone_what_is_opened_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It looks which connections there are, and meanwhile the group is given up and its process meets others."""
    made, looks, has_left = Wires(), threading.Event(), threading.Event()
    cuts, sockets = threading.Thread(target=made.cut), wires._sockets

    def later() -> dict[int, str]:
        if threading.current_thread() is cuts:
            looks.set()
            has_left.wait(1.0)  # in vain, as it should be
        return sockets()

    monkeypatch.setattr(wires, "_sockets", later)
    making = made.noting(1)
    making.__enter__()
    cuts.start()
    assert looks.wait(LIMIT_S)
    making.__exit__(None, None, None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as near, server.accept()[0] as far:
            has_left.set()
            cuts.join(LIMIT_S)
            far.sendall(b"x")
            near.settimeout(LIMIT_S)
            assert near.recv(1) == b"x"
