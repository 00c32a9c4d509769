"""The bench of the log, walked through where no device is: a stand-in model takes the place of the large ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "log.py"


@pytest.mark.soak
def test_the_gpu_part_of_the_log_bench_says_what_each_way_costs(tmp_path: Path) -> None:
    words = ["--gpu", "--quick", "--only", "bert", "--device", "cpu", "--out", str(tmp_path)]
    with (tmp_path / "said").open("w+") as said:
        ended = subprocess.run(
            [sys.executable, str(BENCH), *words], stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=240
        )
        said.seek(0)
        assert ended.returncode == 0, said.read()
    found = json.loads((tmp_path / "log-gpu.json").read_text())
    assert found["command"].endswith(" ".join(words[: words.index("--out")]))
    kinds = found["data"]["models"]["bert"]["kinds"]
    assert set(kinds) == {"dense", "topk"}
    for kind, ways in (
        ("dense", {"plain", "log"}),
        ("topk", {"plain", "torch.topk per tensor", "compressor alone", "log"}),
    ):
        one = kinds[kind]
        assert not one["error"], one["error"]
        assert set(one["ways"]) == ways
        assert all(len(way["step_s"]) == 3 for way in one["ways"].values())
        # A plain block between two of the log's is not seen by it: neither as steps without a cut, nor as other writes.
        assert not any("twice" in said or "asynchronous" in said for said in one["troubles"])
        assert one["bytes"]["record"] > 0
        assert one["bytes"]["base"] > one["bytes"]["record"]
    assert kinds["topk"]["bytes"]["values"] > 0
