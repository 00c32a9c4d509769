"""`everstep import`, and `export` the other way: each is read by the tool that the file belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from said import Cli

import everstep

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {
    "0.weight": torch.randn(5, 3),
    "0.bias": torch.randn(5).to(torch.bfloat16),
    "1.num_batches_tracked": torch.tensor(7),
    "empty": torch.empty(0, 4),
    "convolution.weight": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
}


@pytest.fixture
def run(cli: Cli, tmp_path: Path) -> Path:
    torch.save({"model": STATE, "epoch": 3}, tmp_path / "model.pt")
    said = cli("import", tmp_path / "model.pt", tmp_path / "run", "--json")
    assert said.code == 0, said.err
    assert (said.json["kind"], said.json["tensors"], said.json["notes"]) == ("a torch.save file", 5, [])
    return tmp_path / "run"


def assert_same(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == STATE.keys()
    for name, value in STATE.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def test_an_import_is_listed_verified_and_loaded(cli: Cli, run: Path) -> None:
    (kept,) = cli("ls", run, "--json").json
    assert (kept["step"], kept["world"], kept["sources"]) == (0, 1, ["disk"])
    assert cli("verify", run).code == 0
    assert_same({n.removeprefix("model."): t for n, t in everstep.open(run).load().items() if n.startswith("model.")})


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp"])
def test_out_and_in_again_is_the_same(format: str, cli: Cli, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli("export", run, out, "--format", format, "--only", "model").code == 0
    if format == "safetensors":
        assert_same(safetensors.torch.load_file(out))
    elif format == "torch":
        assert_same(torch.load(out, weights_only=True))
    else:
        blank = {"model": {name: torch.zeros_like(value) for name, value in STATE.items()}}
        dcp.load(blank, checkpoint_id=out, no_dist=True)
        assert_same(blank["model"])
    assert cli("import", out, tmp_path / "again").code == 0
    loaded = everstep.open(tmp_path / "again").load()
    assert_same({name.removeprefix("model."): value for name, value in loaded.items() if name.startswith("model.")})


def test_all_of_an_import_can_be_exported(cli: Cli, run: Path, tmp_path: Path) -> None:
    assert cli("export", run, tmp_path / "all.pt", "--format", "torch").code == 0
    everything = torch.load(tmp_path / "all.pt", weights_only=True)
    assert_same(everything["model"])
    assert (everything["step"], everything["optimizer"], everything["scaler"]) == (0, [], None)


def test_its_exit_codes_are_those_of_the_others(cli: Cli, run: Path, tmp_path: Path) -> None:
    said = cli("import", tmp_path / "model.pt", tmp_path / "other")
    assert said.out == f"a torch.save file is step 0 of {tmp_path / 'other'}: 5 tensors, 8.2 kB\n"
    assert cli("import", tmp_path / "model.pt", run).code == 2
    assert cli("import", tmp_path / "model.pt", tmp_path / "new", "--key", "weights").code == 2
    assert cli("import", tmp_path / "nothing", tmp_path / "new").code == 3
    (tmp_path / "text").write_text("not a checkpoint")
    said = cli("import", tmp_path / "text", tmp_path / "new")
    assert said.code == 4 and "neither safetensors nor what torch.save writes" in said.err
    torch.save({"w": torch.ones(1, dtype=torch.complex128)}, tmp_path / "odd.pt")
    assert cli("import", tmp_path / "odd.pt", tmp_path / "new").code == 5
    assert not (tmp_path / "new").exists()
