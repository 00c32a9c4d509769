"""docs/dcp.md is true: its program runs and says what is shown, and its commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import options_of

import everstep

TEXT = (Path(__file__).parents[2] / "docs/dcp.md").read_text()


def test_every_command_that_is_shown_exists() -> None:
    shown = re.findall(r"^\$ everstep (\w+)", TEXT, re.MULTILINE)
    assert shown == ["ls", "verify"] and all(options_of(name) for name in shown)


@pytest.mark.soak
def test_the_program_says_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0])
    source = str(Path(everstep.__file__).parents[1])
    said = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": source},
    )  # fmt: skip
    assert said.stdout == "loaded step 2\n", said.stderr
    past = everstep.open(tmp_path / "runs/fsdp")
    assert [(kept.step, kept.world) for kept in past.kept()] == [(2, 2), (3, 2)]
    read = past.load()
    assert tuple(read["model.0.weight"].shape) == (256, 64) and read["values"]["step"] == 3
