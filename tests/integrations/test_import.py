"""Checkpoints of other tools as step 0 of a run: what comes in is what was there, and nothing of it is executed."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from lives import Countdown, live, must_finish, run_directory, tiny
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict

import everstep
from everstep.errors import BadConfig, Damaged, NothingToRestore, Unstorable
from everstep.integrations import inert
from everstep.integrations.adopt import adopt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Weights and moments that no new model has."""
    model, optimizer, loader = tiny()
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def saved_as(kind: str, place: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    state = model.state_dict()
    if kind == "safetensors":
        safetensors.torch.save_file(state, place / "model.safetensors")
        return place / "model.safetensors"
    if kind == "torch":
        torch.save(state, place / "model.pt")
        return place / "model.pt"
    if kind == "old torch":
        torch.save({"state_dict": state, "epoch": 3}, place / "old.pt", _use_new_zipfile_serialization=False)
        return place / "old.pt"
    if kind == "hf sharded":
        names = list(state)
        shards = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
        for file, members in shards.items():
            safetensors.torch.save_file({name: state[name] for name in members}, place / file)
        index = {"metadata": {"total_size": 1}, "weight_map": {n: f for f, members in shards.items() for n in members}}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "hf bin":
        torch.save(state, place / "pytorch_model.bin")
    else:
        names, moments = get_state_dict(model, optimizer)
        dcp.save({"model": names, "optimizer": moments, "step": 12}, checkpoint_id=place / "dcp", no_dist=True)
        return place / "dcp"
    return place


@pytest.mark.parametrize("kind", ["safetensors", "torch", "old torch", "hf sharded", "hf bin", "dcp"])
def test_what_comes_in_is_what_was_there(kind: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    source = saved_as(kind, tmp_path, model, optimizer)
    adopted = adopt(source, tmp_path / "run")
    past = everstep.open(tmp_path / "run")
    assert past.steps() == [0] and [one.problem for one in past.verify()] == [""]
    loaded = past.load()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[f"model.{name}"], value), name
    assert adopted.tensors == len(model.state_dict())
    assert bool(adopted.notes) == (kind == "dcp")


def train_on(directory: Path, steps: int, **options: Any) -> dict[str, Any]:
    """A training that begins with other weights; those that it had before its first step, and then."""
    model, optimizer, loader = tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    run = everstep.guard(
        model, optimizer, loader, dir=directory, scheduler=scheduler, steps=steps, epochs=None, keeper="inline",
        **options,
    )  # fmt: skip
    began = {name: value.tolist() for name, value in model.state_dict().items()}
    moments = {str(index): one["exp_avg"].tolist() for index, one in optimizer.state_dict()["state"].items()}
    resumed_from = run.resumed_from
    for x, y in run:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    run.close()
    return {"began": began, "moments": moments, "resumed_from": resumed_from, "step": run.step}


def test_a_run_begins_with_imported_weights_and_goes_on_from_its_own(tmp_path: Path) -> None:
    model, optimizer = trained()
    source = saved_as("torch", tmp_path, model, optimizer)
    with run_directory() as directory:
        adopt(source, directory)
        first = must_finish(lambda: train_on(directory, 3))
        assert (first["resumed_from"], first["step"], first["moments"]) == (0, 3, {})
        assert first["began"] == {name: value.tolist() for name, value in model.state_dict().items()}
        assert must_finish(lambda: train_on(directory, 5))["resumed_from"] == 3


def test_an_optimizer_that_is_saved_by_names_comes_along_if_its_class_is_named(tmp_path: Path) -> None:
    model, optimizer = trained()
    source = saved_as("dcp", tmp_path, model, optimizer)
    with run_directory() as directory:
        assert adopt(source, directory, optimizer="AdamW").optimizer == "torch.optim.adamw.AdamW"
        with safetensors.safe_open(next(directory.glob("step-*/*.safetensors")), "pt") as opened:
            info = json.loads(opened.metadata()["everstep"])["info"]
        assert "optimizer.state.model.0.weight.step" in info["on_host"]  # where Adam wants it, whatever the model is on
        found = must_finish(lambda: train_on(directory, 1))
        assert found["moments"] == {
            str(index): one["exp_avg"].tolist() for index, one in optimizer.state_dict()["state"].items()
        }
        assert found["began"] == {name: value.tolist() for name, value in model.state_dict().items()}
    with run_directory() as directory:
        adopt(source, directory, optimizer="Adam")
        with pytest.raises(AssertionError, match=r"optimizer was torch\.optim\.adam\.Adam"):
            must_finish(lambda: train_on(directory, 1))


def test_a_model_of_other_names_or_shapes_is_refused_unless_what_fits_is_wanted(tmp_path: Path) -> None:
    model, _ = trained()
    state = dict(model.state_dict())
    state["more.weight"] = torch.ones(2)
    torch.save({"model": state}, tmp_path / "more.pt")
    with run_directory() as directory:
        adopt(tmp_path / "more.pt", directory)
        with pytest.raises(AssertionError, match=r"missing in the program: model\.more\.weight"):
            must_finish(lambda: train_on(directory, 1))
        began = must_finish(lambda: train_on(directory, 1, strict=False))["began"]
        assert began["0.weight"] == state["0.weight"].tolist()


def test_numbered_state_of_an_optimizer_is_not_guessed(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "both.pt")
    with pytest.raises(BadConfig, match="only the program knows"):
        adopt(tmp_path / "both.pt", tmp_path / "run", optimizer="AdamW")
    with pytest.raises(BadConfig, match=r"torch\.optim has no Adamm"):
        adopt(tmp_path / "both.pt", tmp_path / "run", optimizer="Adamm")
    assert not (tmp_path / "run").exists()
    named = torch.optim.AdamW(model.named_parameters(), lr=0.5)
    named.load_state_dict(optimizer.state_dict())
    torch.save({"model": model.state_dict(), "optimizer": named.state_dict()}, tmp_path / "named.pt")
    adopt(tmp_path / "named.pt", tmp_path / "run", optimizer="AdamW")
    loaded = everstep.open(tmp_path / "run").load()
    moment = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(loaded["optimizer.state.model.0.weight.exp_avg"], moment)


def test_tied_weights_are_one_tensor_with_two_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({"inner": nn.Linear(3, 3), "outer": nn.Linear(3, 3)})
    model["outer"].weight = model["inner"].weight
    torch.save({f"module.{name}": value for name, value in model.state_dict().items()}, tmp_path / "ddp.pt")
    assert adopt(tmp_path / "ddp.pt", tmp_path / "run").tensors == 3
    loaded = everstep.open(tmp_path / "run").load()
    assert torch.equal(loaded["model.outer.weight"], model["inner"].weight)


# -- what is refused


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(Path(os.environ["EVERSTEP_EVIL"])),)


@pytest.mark.parametrize("where", ["torch", "hf bin", "dcp table", "dcp value"])
def test_code_in_a_file_is_refused_and_not_run(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    monkeypatch.setenv("EVERSTEP_EVIL", str(tmp_path / "evil"))
    source = tmp_path / "source"
    source.mkdir()
    if where == "torch":
        torch.save({"w": torch.ones(1), "evil": Evil()}, source / "a.pt")
        source = source / "a.pt"
    elif where == "hf bin":
        torch.save({"w": torch.ones(1), "evil": Evil()}, source / "pytorch_model.bin")
    else:
        dcp.save({"w": torch.ones(1), "evil": Evil()}, checkpoint_id=source, no_dist=True)
        if where == "dcp table":
            (source / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(Damaged):
        adopt(source, tmp_path / "run")
    assert not (tmp_path / "evil").exists() and not (tmp_path / "run").exists()


def test_a_table_of_contents_is_data(tmp_path: Path) -> None:
    import pickle

    tree = {"a": [1, -2, 2**40, 0.5, None, True], "b": ("x", b"y", {1, 2}), 3: {"c": []}, "long": "z" * 300}
    for protocol in (4, 5):
        assert inert.read(pickle.dumps(tree, protocol), file="") == tree
    found = inert.read(pickle.dumps(Path("a")), file="")
    assert isinstance(found, inert.Thing) and found.kind.module.startswith("pathlib")
    for bad in (b"", b"garbage", pickle.dumps(tree)[:-1], b"\x80\x04NPx\n."):
        with pytest.raises(Damaged):
            inert.read(bad, file="")


def test_what_is_cut_off_is_damage_and_leaves_no_step(tmp_path: Path) -> None:
    model, optimizer = trained()
    for kind in ("safetensors", "torch", "hf sharded", "dcp"):
        place = tmp_path / kind
        place.mkdir()
        source = saved_as(kind, place, model, optimizer)
        largest = max((p for p in [source, *source.rglob("*")] if p.is_file()), key=lambda p: p.stat().st_size)
        content = largest.read_bytes()
        largest.write_bytes(content[: len(content) // 2])
        with pytest.raises(Damaged):
            adopt(source, place / "run")
        assert not list((place / "run").glob("step-*.json"))


def test_an_entry_of_dcp_that_is_not_what_its_table_names_is_damage(tmp_path: Path) -> None:
    for name, shape in (("a", (2, 3)), ("b", (3, 2))):
        dcp.save({"w": torch.ones(shape)}, checkpoint_id=tmp_path / name, no_dist=True)
    (tmp_path / "b/__0_0.distcp").replace(tmp_path / "a/__0_0.distcp")
    with pytest.raises(Damaged, match="not the tensor that the table names"):
        adopt(tmp_path / "a", tmp_path / "run")
    (tmp_path / "a/__0_0.distcp").unlink()
    with pytest.raises(Damaged, match="w cannot be read: No such file"):
        adopt(tmp_path / "a", tmp_path / "run")


def test_each_refusal_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NothingToRestore, match="is not there"):
        adopt(tmp_path / "nothing", tmp_path / "run")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadConfig, match="neither a DCP directory nor a model folder"):
        adopt(tmp_path / "folder", tmp_path / "run")
    torch.save({"a": {"w": torch.ones(1)}, "b": {"w": torch.zeros(1)}}, tmp_path / "two.pt")
    with pytest.raises(BadConfig, match="which of a, b is the model"):
        adopt(tmp_path / "two.pt", tmp_path / "run")
    with pytest.raises(BadConfig, match="no 'c' on the way"):
        adopt(tmp_path / "two.pt", tmp_path / "run", key="a.c")
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    with pytest.raises(BadConfig, match="holds a Tensor"):
        adopt(tmp_path / "tensor.pt", tmp_path / "run")
    torch.save({"w": torch.ones(3, dtype=torch.complex128)}, tmp_path / "odd.pt")
    with pytest.raises(Unstorable, match=r"model\.w .*complex128"):
        adopt(tmp_path / "odd.pt", tmp_path / "run")
    index = {"weight_map": {"w": "../../etc/passwd"}}
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Damaged, match="no file beside it"):
        adopt(tmp_path / "folder", tmp_path / "run")
    adopt(tmp_path / "two.pt", tmp_path / "run", key="b")
    assert everstep.open(tmp_path / "run").load()["model.w"].tolist() == [0.0]
    with pytest.raises(BadConfig, match="a run with a past already"):
        adopt(tmp_path / "two.pt", tmp_path / "run", key="a")


def rewritten(place: Path, change: Any) -> Path:
    """A DCP directory whose table of contents somebody has changed."""
    import pickle

    dcp.save({"w": torch.arange(4.0), "m": {"k": torch.ones(2)}}, checkpoint_id=place, no_dist=True)
    table = pickle.loads((place / ".metadata").read_bytes())
    changed = change(table)
    (place / ".metadata").write_bytes(pickle.dumps(table if changed is None else changed))
    return place


def boxes(table: Any, size: int, *at: tuple[int, int]) -> None:
    table.state_dict_metadata["w"].size = torch.Size([size])
    table.state_dict_metadata["w"].chunks = [
        ChunkStorageMetadata(torch.Size([start]), torch.Size([extent])) for start, extent in at
    ]


def moved(table: Any, offset: float) -> None:
    index = next(one for one in table.storage_data if one.fqn == "w")
    table.storage_data[index] = dataclasses.replace(table.storage_data[index], offset=offset)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda table: boxes(table, 4, (0, 2), (0, 2)), "some elements of w are there twice, and others are not"),
        (lambda table: boxes(table, 4, (2, 4)), "a part of w is outside of it"),
        (lambda table: boxes(table, 4), "nothing of w is there"),
        (lambda table: boxes(table, -4, (0, -4)), "a size of"),
        (lambda table: table.storage_data.clear(), "KeyError"),
        (lambda table: moved(table, float("inf")), "infinity"),
        (lambda table: table.planner_data.update({"w": ("q",), "m.k": ("q",)}), "two entries have the place"),
        (lambda table: many_times([], lambda one: [one, one]), "a list where a Metadata should be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "table",
)
def test_a_table_of_dcp_that_was_tampered_with_is_damage(change: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(Damaged, match=said):
        adopt(rewritten(tmp_path / "dcp", change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def many_times(value: Any, wrap: Any, times: int = 40) -> Any:
    for _ in range(times):
        value = wrap(value)
    return value


def test_a_few_bytes_that_hold_themselves_often_or_deeply_are_damage_at_once(tmp_path: Path) -> None:
    """To show or to hash what such a pickle holds would take forever, or more stack than there is."""
    twice = b"".join(b"h" + bytes([at]) + b"h" + bytes([at]) + b"\x86\x94" for at in range(40))
    deep = b"(" * 300_000 + b"t" * 300_000
    for key in (b")\x94" + twice, deep):
        with pytest.raises(Damaged, match="a tuple is no key"):
            inert.read(b"\x80\x04}" + key + b"K\x01s.", file="")
    itself: list[Any] = []
    itself.append(itself)
    for name, value in {"itself": itself, "often": many_times([], lambda one: [one, one])}.items():
        torch.save({"w": torch.ones(1), "x": value}, tmp_path / name)
        with pytest.raises(Damaged, match=r"holds? itself"):
            adopt(tmp_path / name, tmp_path / "run")


def test_no_tensor_takes_the_place_of_another_and_none_is_left_out_silently(tmp_path: Path) -> None:
    for name, state in {
        "prefix": {"module.w": torch.ones(2), "w": torch.zeros(2)},
        "nested": {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}},
    }.items():
        torch.save(state, tmp_path / name)
        with pytest.raises(BadConfig, match=r"two entries would both be model\."):
            adopt(tmp_path / name, tmp_path / "run")
    torch.save({"model": {"w": torch.ones(1)}, "head": torch.ones(2)}, tmp_path / "beside")
    assert adopt(tmp_path / "beside", tmp_path / "run").notes == ("head stands beside the model and was left out",)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.empty(2, device="meta"),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["coo", "csr", "meta", "nested"],
)
def test_a_tensor_that_is_not_plain_numbers_is_refused_by_its_name(
    make: Callable[[], torch.Tensor], tmp_path: Path
) -> None:
    torch.save({"w": make(), "v": torch.ones(1)}, tmp_path / "odd.pt")
    with pytest.raises(Unstorable, match=r"model\.w .*sparse, nested, or without data"):
        adopt(tmp_path / "odd.pt", tmp_path / "run")


def test_an_optimizer_of_another_shape_is_refused_and_a_tensor_of_a_group_is_taken(tmp_path: Path) -> None:
    def imported(state: Any, *groups: Any) -> None:
        optimizer = {"state": state, "param_groups": list(groups)}
        torch.save({"model": {"w": torch.ones(1)}, "optimizer": optimizer}, tmp_path / "odd.pt")
        adopt(tmp_path / "odd.pt", tmp_path / "run", optimizer="AdamW")

    for group in (3, {}, {"params": 3}, {"params": ["w"], "param_names": 3}, {"params": [["w"]]}):
        with pytest.raises(BadConfig, match="no list of the names or numbers"):
            imported({}, group)
    with pytest.raises(BadConfig, match="state of w is a int"):
        imported({"w": 3}, {"params": ["w"]})
    imported({}, {"params": ["w"], "lr": torch.tensor(0.25)})
    (saved,) = everstep.open(tmp_path / "run").load()["optimizers"]
    assert saved["groups"][0]["lr"].item() == 0.25


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_an_import_that_is_killed_anywhere_leaves_a_whole_step_or_none(every: int, tmp_path: Path) -> None:
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "w.pt")
    for operation in range(0, 100, every):
        place = tmp_path / f"run-{operation}"

        def life(operation: int = operation, place: Path = place) -> dict[str, Any]:
            Countdown(operation).install()
            adopt(tmp_path / "w.pt", place)
            return {}

        outcome = live(life)
        if not list(place.glob("step-*.json")):
            assert outcome.killed
            adopt(tmp_path / "w.pt", place)  # what is left of the first attempt is in nobody's way
        assert everstep.open(place).load()["model.w"].tolist() == list(range(1000))
        if not outcome.killed:
            assert operation > 10, outcome.error
            return
    raise AssertionError("an import takes more than 100 operations")
