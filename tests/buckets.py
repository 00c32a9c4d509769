"""A real server that speaks S3, on loopback, in a process of its own that can be killed, frozen and started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

BUCKET = "everstep"
KEYS = {"access_key_id": "none", "secret_access_key": "none", "region": "us-east-1"}
HASTY = {"timeout": "2s", "connect_timeout": "1s", "max_retries": "2", "retry_timeout_s": "3"}


class Server:
    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        """What the last one kept is gone, but not its address."""
        command = [sys.executable, __file__, str(self.port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.ask("PUT", "")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    @property
    def options(self) -> dict[str, str]:
        return {"endpoint": f"http://127.0.0.1:{self.port}", **KEYS}

    def environment(self, *folders: Path) -> dict[str, str]:
        """For a process that finds this server by itself, and modules in these folders."""
        return {
            **os.environ, **{f"AWS_{name.upper()}": value for name, value in KEYS.items()}, "AWS_ALLOW_HTTP": "true",
            "AWS_ENDPOINT": f"http://127.0.0.1:{self.port}", "PYTHONPATH": os.pathsep.join(map(str, folders)),
        }  # fmt: skip

    def ask(self, method: str, key: str, body: bytes | None = None) -> bytes:
        """Past the tier: what an administrator does, or an accident."""
        signature = "AWS4-HMAC-SHA256 Credential=none/20260101/us-east-1/s3/aws4_request"  # looked at, not checked
        headers = {"content-type": "application/octet-stream", "authorization": signature}
        where = f"http://127.0.0.1:{self.port}/{BUCKET}/{key}"
        request = urllib.request.Request(where, method=method, data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return bytes(answer.read())

    def objects(self, prefix: str) -> list[str]:
        """All keys, also those that no tier lists."""
        return re.findall(rf"<Key>({prefix}[^<]*)</Key>", self.ask("GET", "?list-type=2").decode())

    def unfinished(self, prefix: str) -> list[str]:
        """Uploads that nobody has ended."""
        return re.findall(rf"<Key>({prefix}[^<]*)</Key>", self.ask("GET", "?uploads").decode())


def alone(script: str, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """A process that has never been forked from one that used an object store."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True, **options
    )  # fmt: skip


def _one_at_a_time(app: Any) -> Any:
    """Requests with a condition: S3 looks and acts in one step, and this server would let another in between."""
    lock = threading.Lock()

    def answer(environment: dict[str, Any], begin: Any) -> Any:
        if "HTTP_IF_NONE_MATCH" not in environment:
            return app(environment, begin)
        with lock:
            return list(app(environment, begin))

    return answer


def _leave_with_the_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    import logging

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = _one_at_a_time(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", int(sys.argv[1]), app, threaded=True)
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()
    print(server.server_port, flush=True)
    server.serve_forever()
