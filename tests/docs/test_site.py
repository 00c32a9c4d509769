"""The site has every page, the command line as it is, and a quickstart that works from the built package."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_command_line_is_as_the_commands_say() -> None:
    reference = runpy.run_path(str(ROOT / "docs" / "cli_reference.py"))["reference"]
    assert (ROOT / "docs" / "cli.md").read_text() == reference(), "python docs/cli_reference.py > docs/cli.md"


def test_every_page_is_on_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))]
    assert [page for page in pages if not re.search(rf"\b{re.escape(page)}$", nav, re.MULTILINE)] == []
    listed = re.findall(r"(\S+\.md)$", nav, re.MULTILINE)
    assert [page for page in listed if not (ROOT / page).is_file()] == []


@pytest.mark.soak
def test_the_wheel_of_the_sdist_has_all_and_its_quickstart_is_killed_and_goes_on_with_the_same_bits(
    tmp_path: Path,
) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path), "-t"]
    subprocess.run([*build, "sdist"], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    subprocess.run([*build, "wheel"], cwd=next((tmp_path / "source").iterdir()), check=True, capture_output=True)
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*install, "--target", str(site), str(next(tmp_path.glob("*.whl")))], check=True)
    page = (ROOT / "docs" / "quickstart.md").read_text()
    [program] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    undisturbed, killed = _train(tmp_path / "a", program, site, 0), _train(tmp_path / "b", program, site, 1000)
    resumed = _train(tmp_path / "b", program, site, 0)
    assert undisturbed[-1] == "done at step 2560"
    assert killed[-1].startswith("step 1000 ") and killed[1:] == undisturbed[1 : len(killed)]
    assert 3 <= len(resumed) < len(undisturbed) and resumed[1:] == undisturbed[1 - len(resumed) :]
    assert Path(resumed[0]).is_relative_to(site)


def _train(folder: Path, program: str, site: Path, kill_at: int) -> list[str]:
    """What it printed, after where the package was; killed when it has printed the loss of a step."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text("import everstep\nprint(everstep.__file__, flush=True)\n" + program)
    child = subprocess.Popen(
        [sys.executable, "train.py"], cwd=folder, env={**os.environ, "PYTHONPATH": str(site)}, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append(line.strip())
        if kill_at and line.startswith(f"step {kill_at} "):
            child.send_signal(signal.SIGKILL)
            break
    child.stdout.close()
    assert child.wait(120) == (-signal.SIGKILL if kill_at else 0)
    return lines
