"""Where Prometheus asks: a small HTTP server in a thread of the keeper, if somebody wished for one.

One question is answered after the other, and whoever says nothing is not waited for. An address that is taken costs an
event, and is tried again: it may be that of a keeper that is about to end. Training knows nothing of all this.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler

from everstep.events import Degraded, MetricsServed, Sink
from everstep.keeper.metrics import Metrics

PATH = "/metrics"
_AGAIN_S = 2.0  # after an address was taken
_LOOK_S = 0.25  # until an end is noticed
_SILENCE_S = 2.0  # of whoever has connected


class Scrape:
    def __init__(self, metrics: Metrics, emit: Sink) -> None:
        self._metrics, self._emit = metrics, emit
        self._address = ""
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, address: str) -> None:
        """Answer there from now on; nowhere, if it is empty."""
        if address == self._address:
            return
        self.close()
        self._address, self._ending = address, threading.Event()
        if address:
            self._thread = threading.Thread(
                target=self._work, args=(address, self._ending), name="everstep-metrics", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            self._thread = None

    def _work(self, address: str, ending: threading.Event) -> None:
        server = self._listen(address, ending)
        if server is None:
            return
        with server:
            host, port = server.server_address[:2]
            shown = f"[{host!s}]" if ":" in str(host) else str(host)
            self._emit(MetricsServed(address=f"http://{shown}:{port}{PATH}"))
            while not ending.is_set():
                server.handle_request()
                self._metrics.look()

    def _listen(self, address: str, ending: threading.Event) -> _Server | None:
        """As soon as the address is free; None if the keeper ends before."""
        host, _, port = address.rpartition(":")
        is_told = False
        while not ending.is_set():
            try:
                return _Server(host.strip("[]"), int(port), self._metrics)
            except OSError as error:
                if not is_told:
                    reason = f"{error.strerror or error}; it is tried again"
                    self._emit(Degraded(what=f"no metrics are served at {address}", reason=reason))
                is_told = True
                ending.wait(_AGAIN_S)
        return None


class _Server(socketserver.TCPServer):
    """Not http.server's own, which asks a name server for its name."""

    allow_reuse_address = True
    timeout = _LOOK_S

    def __init__(self, host: str, port: int, metrics: Metrics) -> None:
        self.metrics = metrics
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Answer)

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever asked has left before the answer was there."""


class _Answer(BaseHTTPRequestHandler):
    timeout = _SILENCE_S
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self._say(404, "text/plain; charset=utf-8", f"metrics are at {PATH}\n")
            return
        try:
            text = self.server.metrics.text()
        except Exception as error:  # whatever it is: a keeper that changes in this very moment is asked again
            self._say(503, "text/plain; charset=utf-8", f"{error}\n")
            return
        self._say(200, "text/plain; version=0.0.4; charset=utf-8", text)

    def _say(self, code: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads that."""
