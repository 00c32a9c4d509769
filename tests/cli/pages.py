"""Pages that the command line writes, as they are and as a browser draws them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from said import Cli


def report(cli: Cli, page: Path, *words: object) -> str:
    said = cli("report", *words, "-o", page)
    assert said.code == 0, said.err
    return page.read_text()


def body(page: str) -> str:
    """What is not the script that draws."""
    return page[page.rindex("</head>") :]


def drawn(chromium: str, page: Path, tmp_path: Path) -> str:
    """The page as a browser has made it, without a network."""
    ended = subprocess.run(
        [
            chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={tmp_path}/profile", "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1360,3000",
            "--virtual-time-budget=10000", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    return body(ended.stdout)


def sections(page: str) -> dict[str, str]:
    """By their titles, in their order."""
    return dict(re.findall(r"<h2>([^<]+)</h2>(.*?)</section>", page, re.DOTALL))
