"""Damage to any file of a run: it is found, it is named, and the next best checkpoint takes over by itself.

Two runs are made once: `alone` (one rank: steps 2, 4 and 6 on disk) and `pair` (two ranks, whose images are written
side by side without a process group). Every attack works on a copy.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from lives import forget_memory, live, must_finish, run_directory, run_of, train_tiny
from typer.testing import CliRunner

import everstep
from everstep import Disk, Keep, Memory, image
from everstep.capture.arena import Arena, find_arenas
from everstep.capture.host import arena_root
from everstep.cli import app
from everstep.config import Keep as KeepPolicy
from everstep.errors import Damaged, EverstepError, NewerFormat, PassedOver
from everstep.events import Rejected, read_events
from everstep.keeper import flush
from everstep.store.disk import DiskTier
from everstep.store.manifest import (
    decode,
    encode,
    part_name,
    put_record,
    read_commit,
    read_data,
    read_part,
    run_name,
)
from everstep.types import Commit, ImageInfo, Part, RunRecord

OFTEN = [Disk(every=1)]
LAST = 6


def wait_at_even_steps(run: everstep.Run) -> None:
    if run.step % 2 == 0:
        run.wait("durable")


def part_life(directory: Path, until: int = LAST) -> dict[str, Any]:
    """Trains to a step and leaves the run unfinished."""
    return train_tiny(directory, wait_at_even_steps, steps=until, tiers=[Disk(every=100)], keep=Keep(last=9))


@cache
def original() -> Path:
    """A run of one rank whose disk holds steps 1 (the first is always written), 2, 4 and 6."""
    import tempfile

    directory = Path(tempfile.mkdtemp(prefix="everstep-alone-"), "run")
    must_finish(lambda: part_life(directory))
    forget_memory(directory)
    assert [int(p.name[5:15]) for p in sorted(directory.glob("step-*.json"))][-3:] == [2, 4, 6]
    return directory


@cache
def digest_of(steps: int) -> str:
    with run_directory() as directory:
        return str(must_finish(lambda: train_tiny(directory, steps=steps))["digest"])


def cli(*arguments: object) -> tuple[int, str]:
    """A command's exit code and all it said. Whatever it raises must be one of ours: main() turns those into a line."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "400"})
    if isinstance(result.exception, EverstepError):
        return result.exception.exit_code, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit | OSError), repr(result.exception)
    return result.exit_code, result.output


COMMANDS: list[tuple[str, ...]] = [
    ("ls",), ("show",), ("status",), ("verify",), ("plan",), ("plan", "--lost", "memory"),
]  # fmt: skip


def no_command_stumbles(directory: Path) -> None:
    for command, *options in COMMANDS:
        for more in ((), ("--json",)):
            code, said = cli(command, directory, *options, *more)
            assert code in (0, 3, 4, 7), (command, code, said)
            assert "Traceback" not in said


def tree_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.startswith(("events-", "holder"))
    }


def step_file(directory: Path, step: int, kind: str, rank: int = 0) -> Path:
    name = f"step-{step:010d}"
    return {
        "commit": directory / f"{name}.json",
        "part": directory / name / f"rank-{rank:05d}.json",
        "data": directory / name / f"rank-{rank:05d}.safetensors",
    }[kind]


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


# -- the table: what is done to one file of the newest step


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def a_byte_more(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def foreign(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04 this is somebody else's file\n" * 50)


def not_text(path: Path) -> None:
    path.write_bytes(b'{"format":1,"run":"\xff\xfe\xfd"}')


def deep(path: Path) -> None:
    path.write_bytes(b'{"format":1,"x":' + b'{"x":' * 100_000)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_middle_bit(path: Path) -> None:
    flip(path, path.stat().st_size // 2, 3)


def from_an_older_step(path: Path) -> None:
    shutil.copy(str(path).replace(f"step-{LAST:010d}", f"step-{4:010d}"), path)


DEEDS: list[Callable[[Path], None]] = [
    truncate, empty, a_byte_more, foreign, not_text, deep, zeros, Path.unlink, a_directory, a_middle_bit,
    from_an_older_step,
]  # fmt: skip


@pytest.mark.parametrize("kind", ["data", "part", "commit"])
@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_a_damaged_file_is_named_and_the_step_before_it_takes_over(
    run: Path, kind: str, deed: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    target = step_file(run, LAST, kind)
    deed(target)
    gone = kind == "commit" and deed in (Path.unlink, a_directory)  # without a commit there is no checkpoint

    no_command_stumbles(run)
    code, said = cli("verify", run)
    assert code == (0 if gone else 4)
    if not gone:
        assert target.name in said and str(LAST) in said
    plan = everstep.open(run).plan()
    assert plan.step == 4
    assert gone or any(r.step == LAST and target.name in r.reason for r in plan.rejections)
    if gone:
        assert everstep.open(run).load()["step"] == 4
    else:
        with pytest.warns(PassedOver, match=f"step {LAST} was passed over: .*{target.name}"):
            assert everstep.open(run).load()["step"] == 4

    def every_step(run: everstep.Run) -> None:
        run.wait("durable")  # so that the step of the damaged file is written again

    capfd.readouterr()
    result = must_finish(lambda: train_tiny(run, every_step, steps=8, tiers=OFTEN))
    said = [line for line in capfd.readouterr().err.splitlines() if "passed over" in line]
    assert len(said) == (not gone)
    assert gone or (target.name in said[0] and said[0].endswith(f"everstep verify {run}"))
    assert result["resumed_from"] == 4
    assert result["digest"] == digest_of(8)
    told = [e for e in read_events(run) if isinstance(e, Rejected) and e.step == LAST]
    assert gone or (told and target.name in told[0].reason)


def test_verify_names_tier_step_rank_file_and_chunk(run: Path) -> None:
    path = step_file(run, LAST, "data")
    flip(path, path.stat().st_size - 1)
    code, said = cli("verify", run, "--step", LAST)
    assert code == 4
    assert f"tier disk, step {LAST}, rank 0, file step-{LAST:010d}/rank-00000.safetensors, chunk 0" in said


# -- every byte


def read_step(directory: Path, step: int) -> str:
    """What a reader gets of a step: a hash of its verified bytes, or Damaged."""
    tier = DiskTier(directory)
    commit = read_commit(tier, step, run_name(tier))
    data = read_data(tier, read_part(tier, commit, 0))
    image.parse(data, len(data))
    return xxhash.xxh3_64_hexdigest(data)


@pytest.mark.parametrize("kind", ["data", "part", "commit"])
def test_no_flipped_bit_of_a_checkpoint_goes_unnoticed(run: Path, kind: str) -> None:
    """Every byte of the records, and of the data every 97th: a chunk has one checksum, so all its bytes are alike."""
    path = step_file(run, LAST, kind)
    whole = path.read_bytes()
    for offset in range(0, len(whole), 97 if kind == "data" else 1):
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << (offset % 8)
        path.write_bytes(damaged)
        with pytest.raises(Damaged):
            read_step(run, LAST)
    path.write_bytes(whole)
    read_step(run, LAST)


def test_no_flipped_bit_of_run_json_changes_whose_directory_it_is(run: Path) -> None:
    path, name = run / "run.json", run_of(run)
    whole = path.read_bytes()
    for offset in range(len(whole)):
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << (offset % 8)
        path.write_bytes(damaged)
        try:
            assert run_name(DiskTier(run)) == name  # every commit knows it too
        except NewerFormat:
            assert damaged[offset - 1 : offset] == b":"  # "format":1 became a higher number: refused, not guessed


@pytest.mark.parametrize("deed", [truncate, empty, foreign, not_text, deep, zeros, Path.unlink, a_middle_bit])
def test_without_a_sound_run_json_the_run_goes_on_by_the_name_in_its_commits(
    run: Path, deed: Callable[[Path], None]
) -> None:
    name = run_of(run)
    deed(run / "run.json")
    no_command_stumbles(run)
    assert everstep.open(run).latest() == LAST
    result = must_finish(lambda: train_tiny(run, steps=LAST, tiers=OFTEN))
    assert result["resumed_from"] == LAST and result["digest"] == digest_of(LAST)  # it was finished, and still is
    assert run_of(run) == name


def test_a_damaged_run_json_without_any_commit_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b"{}")
    outcome = live(lambda: train_tiny(tmp_path))
    assert "Damaged" in outcome.error and "run.json" in outcome.error
    assert (tmp_path / "run.json").read_bytes() == b"{}"
    assert cli("ls", tmp_path)[0] == 4


@pytest.mark.parametrize("deed", [truncate, empty, foreign, not_text, deep, zeros, a_middle_bit, a_byte_more])
def test_a_damaged_attempt_record_is_no_obstacle(run: Path, deed: Callable[[Path], None]) -> None:
    """It only says which step to offer last, and whoever loads writes it anew: losing it can cost one more attempt."""
    path = run / "attempt.json"
    path.write_bytes(b'{"format":1,"step":6,"count":1,"error":"","digest":"0123456789abcdef"}')
    deed(path)
    no_command_stumbles(run)
    assert must_finish(lambda: train_tiny(run, steps=8))["resumed_from"] == LAST
    assert not path.exists()


# -- nothing left


@pytest.mark.parametrize("kind", ["data", "part", "commit"])
def test_when_every_checkpoint_is_damaged_the_run_refuses_and_changes_nothing(run: Path, kind: str) -> None:
    for commit in run.glob("step-*.json"):
        a_middle_bit(step_file(run, int(commit.name[5:15]), kind))
    before = tree_of(run)
    outcome = live(lambda: train_tiny(run))
    assert "everstep.errors.Damaged" in outcome.error, outcome.error
    assert "Nothing was changed" in outcome.error or "run.json" in outcome.error
    after = tree_of(run)
    after.pop("attempt.json", None)  # which step was being looked at
    assert after == before
    no_command_stumbles(run)
    with pytest.raises(Damaged):
        everstep.open(run).load()
    assert cli("verify", run)[0] == 4


# -- records that lie, with a digest that is right


def forge(path: Path, **changes: Any) -> None:
    """Change a record and give it the digest it would have."""
    fields = json.loads(path.read_bytes()) | changes | {"digest": ""}
    body = msgspec.json.encode(fields)
    path.write_bytes(msgspec.json.encode(fields | {"digest": xxhash.xxh3_128_hexdigest(body)}))


LIES: list[tuple[str, dict[str, Any]]] = [
    ("commit", {"step": 4}),
    ("commit", {"run": "0" * 32}),
    ("commit", {"run": "../../../../tmp/elsewhere"}),
    ("commit", {"world": 0, "parts": []}),
    ("commit", {"world": 10**5, "parts": []}),
    ("commit", {"world": 10**15}),
    ("commit", {"world": 2}),
    ("commit", {"parts": []}),
    ("commit", {"parts": [{"rank": 0, "bytes": 1, "digest": "x"}, {"rank": 0, "bytes": 1, "digest": "x"}], "world": 2}),
    ("commit", {"step": 2**70}),
    ("commit", {"format": 2}),
    ("part", {"format": 99}),
    ("part", {"bytes": 2**62}),
    ("part", {"rank": -1}),
    ("part", {"step": 4}),
    ("part", {"chunks": []}),
    ("part", {"chunk_bytes": 0}),
    ("part", {"chunk_bytes": 1}),
]


@pytest.mark.parametrize(("kind", "lie"), LIES, ids=lambda value: str(value)[:40])
def test_a_record_that_lies_with_a_right_digest_is_not_believed(run: Path, kind: str, lie: dict[str, Any]) -> None:
    forge(step_file(run, LAST, kind), **lie)
    if kind == "part":  # and the commit is made to vouch for it
        part = json.loads(step_file(run, LAST, "part").read_bytes())
        forge(
            step_file(run, LAST, "commit"),
            parts=[{"rank": 0, "bytes": part["bytes"], "digest": part["digest"]}],
        )
    no_command_stumbles(run)
    assert everstep.open(run).plan().step == 4
    assert must_finish(lambda: train_tiny(run, steps=8))["resumed_from"] == 4


@pytest.mark.parametrize("pieces", [b"7", b"[]", b"[ ]", b'[{"name":"\xff"}]', b"[" * 900 + b"]" * 900])
def test_pieces_that_lie_with_a_right_digest_are_told_by_verify_and_harm_no_restore(run: Path, pieces: bytes) -> None:
    """A restore goes by the header of the image."""
    path = step_file(run, LAST, "part")
    part = decode(path.read_bytes(), Part, tier="disk", file=path.name)
    path.unlink()
    part = put_record(DiskTier(run), part_name(LAST, 0), msgspec.structs.replace(part, raw_pieces=msgspec.Raw(pieces)))
    forge(step_file(run, LAST, "commit"), parts=[{"rank": 0, "bytes": part.bytes, "digest": part.digest}])
    no_command_stumbles(run)
    code, said = cli("verify", run)
    assert code == 4 and ("unreadable pieces" in said or "other tensors than its image" in said), said
    assert cli("show", run, "--json")[0] == (0 if pieces == b"[]" else 4)
    assert must_finish(lambda: train_tiny(run, steps=8))["resumed_from"] == LAST


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc", "", "x", "a" * 31, "A" * 32, "a" * 32 + "\n"])
def test_a_run_whose_name_would_climb_out_of_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    record = RunRecord(format=1, run=name, created_time=0.0)
    (tmp_path / "run.json").write_bytes(encode(record))
    with pytest.raises(Damaged):
        everstep.open(tmp_path)
    led_to = arena_root(None) / name
    was_there = led_to.exists()
    outcome = live(lambda: train_tiny(tmp_path))
    assert "Damaged" in outcome.error
    assert led_to.exists() == was_there


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../b", ".tmp-x", "a/b/c", "a\0b", "a\n", "..", "."])
def test_a_tier_takes_no_name_that_leaves_it(tmp_path: Path, name: str) -> None:
    tier = DiskTier(tmp_path / "tier")
    for deed in (tier.get, tier.size, tier.delete, lambda n: tier.put(n, memoryview(b"x"))):
        with pytest.raises(EverstepError):
            deed(name)
    assert list(tmp_path.iterdir()) == []


def test_a_record_of_absurd_size_is_not_read(run: Path) -> None:
    for path in (run / "run.json", step_file(run, LAST, "commit"), run / "attempt.json"):
        path.touch()
        os.truncate(path, 1 << 40)  # sparse
    no_command_stumbles(run)
    assert everstep.open(run).plan().step == 4


# -- images


def image_with(header: bytes | dict[str, Any], data: int = 0, claim: int | None = None) -> bytes:
    body = header if isinstance(header, bytes) else msgspec.json.encode(header)
    return struct.pack("<Q", len(body) if claim is None else claim) + body + bytes(data)


def meta(**boxes: Any) -> dict[str, str]:
    info = {"format": 1, "run": "0" * 32, "rank": 0, "world": 1}
    return {"everstep": json.dumps({"info": info, "boxes": boxes, "private": []})}


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


EXTRAS = {"everstep.extras": tensor("U8", [8], 0, 8)}
IMAGES: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "a header of 2^64-1 bytes": image_with(b"{}", claim=2**64 - 1),
    "a header of 2^40 bytes": image_with(b"{}", claim=2**40),
    "a header longer than the file": image_with(b"{}", claim=100),
    "no JSON": image_with(b"}{"),
    "deep JSON": image_with(b'{"x":' * 100_000),
    "deep JSON in a tensor": image_with(b'{"x":' + b"[" * 100_000),
    "not UTF-8": image_with(b'{"\xff":1}'),
    "no metadata": image_with(dict(EXTRAS), 8),
    "another program's": image_with({"__metadata__": {"format": "pt"}, "w": tensor("F32", [1], 0, 4)}, 4),
    "no extras": image_with({"__metadata__": meta(), "w": tensor("F32", [1], 0, 4)}, 4),
    "extras in front": image_with({"__metadata__": meta(), **EXTRAS, "w": tensor("U8", [4], 8, 12)}, 12),
    "short extras": image_with({"__metadata__": meta(), "everstep.extras": tensor("U8", [4], 0, 4)}, 4),
    "a hole": image_with({"__metadata__": meta(), "everstep.extras": tensor("U8", [8], 4, 12)}, 12),
    "bytes behind the end": image_with({"__metadata__": meta(), **EXTRAS}, 9),
    "overlapping tensors": image_with({"__metadata__": meta(), **EXTRAS, "w": tensor("U8", [4], 4, 8)}, 8),
    "a tensor of 2^62 elements": image_with({"__metadata__": meta(), "w": tensor("F32", [2**62], 0, 2**64)}, 8),
    "negative sizes": image_with({"__metadata__": meta(), **EXTRAS, "w": tensor("U8", [-2, -2], 8, 12)}, 12),
    "an empty tensor of 2^70 columns": image_with(
        {"__metadata__": meta(), "w": tensor("U8", [0, 2**70], 0, 0), **EXTRAS}, 8
    ),
    "backward offsets": image_with({"__metadata__": meta(), **EXTRAS, "w": tensor("U8", [0], 8, 4)}, 8),
    "an unknown dtype": image_with({"__metadata__": meta(), **EXTRAS, "w": tensor("F3", [0], 8, 8)}, 8),
    "a box outside its tensor": image_with(
        {"__metadata__": meta(w={"shape": [4], "start": [3]}), **EXTRAS, "w": tensor("U8", [2], 8, 10)}, 10
    ),
    "a box of a tensor of 2^70 columns": image_with(
        {"__metadata__": meta(w={"shape": [0, 2**70], "start": [0, 0]}), "w": tensor("U8", [0, 5], 0, 0), **EXTRAS}, 8
    ),
    "a tensor of 100 dimensions": image_with(
        {"__metadata__": meta(), "w": tensor("U8", [1] * 100, 0, 1), "everstep.extras": tensor("U8", [8], 1, 9)}, 9
    ),
    "a box of other dimensions": image_with(
        {"__metadata__": meta(w={"shape": [4, 4], "start": [0, 0]}), **EXTRAS, "w": tensor("U8", [2], 8, 10)}, 10
    ),
}


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_that_claims_what_cannot_be_is_refused(name: str) -> None:
    data = memoryview(IMAGES[name])
    with pytest.raises(Damaged):
        image.parse(data, len(data))


def test_an_image_of_a_newer_everstep_is_refused_as_such() -> None:
    newer = {"everstep": meta()["everstep"].replace('"format": 1', f'"format": {image.NEWEST_FORMAT + 1}')}
    data = image_with({"__metadata__": newer, **EXTRAS}, 8)
    with pytest.raises(NewerFormat, match="upgrade"):
        image.parse(data, len(data))


# -- swaps


def test_files_swapped_between_runs_are_not_taken(run: Path, tmp_path: Path) -> None:
    """Another run of the same program: the same names, shapes and steps, with every checksum right."""
    other = tmp_path / "other"
    must_finish(lambda: part_life(other))
    forget_memory(other)
    for kind in ("commit", "part", "data"):
        shutil.copy(step_file(other, LAST, kind), step_file(run, LAST, kind))
    code, said = cli("verify", run)
    assert code == 4 and "of run" in said
    assert everstep.open(run).plan().step == 4
    assert must_finish(lambda: train_tiny(run, steps=8))["resumed_from"] == 4


def test_a_whole_checkpoint_under_another_steps_name_is_not_taken(run: Path) -> None:
    for kind in ("commit", "part", "data"):
        step_file(run, LAST, kind).unlink()
        shutil.copy(step_file(run, 4, kind), step_file(run, LAST, kind))
    assert everstep.open(run).plan().step == 4
    assert cli("verify", run)[0] == 4
    assert must_finish(lambda: train_tiny(run, steps=8))["resumed_from"] == 4


def write_pair(directory: Path, steps: list[int]) -> str:
    """A run of two ranks, written by the keeper's own hands; returns the run's name."""
    name = os.urandom(16).hex()
    tier = DiskTier(directory)
    tier.put("run.json", memoryview(encode(RunRecord(format=1, run=name, created_time=0.0))))
    for rank in range(2):
        info = ImageInfo(format=1, run=name, rank=rank, world=2)
        wanted = image.Wanted(name="model.w", dtype="U8", shape=(4,), start=(2 * rank,), extent=(2,))
        layout = image.lay_out([wanted], info, 100)
        arena = Arena.create(None, run=name, rank=rank, world=2, layout=layout, slots=2)
        for step in steps:
            extras = msgspec.msgpack.encode({"step": step})
            slot = arena.free_slot(1, set())
            assert slot is not None
            arena.slots[slot][len(layout.header) : len(layout.header) + 2] = bytes([step, rank])
            at = layout.extras_offset
            arena.slots[slot][at : at + 8 + len(extras)] = struct.pack("<Q", len(extras)) + extras
            arena.seal(slot, step=step, cut_time=float(step), generation="0" * 32)
            assert flush.persist_part(tier, arena, slot, torch_version="") is not None
        arena.close()
    for step in steps:
        assert flush.commit(tier, step, [0, 1], 2, "0" * 32)
    return name


SWAPS = {
    "data of the ranks": lambda d: swap(step_file(d, 2, "data", 0), step_file(d, 2, "data", 1)),
    "manifests of the ranks": lambda d: swap(step_file(d, 2, "part", 0), step_file(d, 2, "part", 1)),
    "both of the ranks": lambda d: [swap(step_file(d, 2, k, 0), step_file(d, 2, k, 1)) for k in ("part", "data")],
    "one rank's data from the step before": lambda d: swap(step_file(d, 1, "data", 1), step_file(d, 2, "data", 1)),
    "one rank's all from the step before": lambda d: [
        swap(step_file(d, 1, k, 1), step_file(d, 2, k, 1)) for k in ("part", "data")
    ],
}


def swap(a: Path, b: Path) -> None:
    kept = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(kept)


@pytest.mark.parametrize("what", SWAPS)
def test_parts_swapped_between_ranks_or_steps_are_not_taken(tmp_path: Path, what: str) -> None:
    write_pair(tmp_path, [1, 2])
    archive = everstep.open(tmp_path)
    assert archive.load(2)["model.w"].tolist() == [2, 0, 2, 1]
    SWAPS[what](tmp_path)
    no_command_stumbles(tmp_path)
    with pytest.raises(Damaged):
        archive.load(2)
    code, said = cli("verify", tmp_path, "--step", 2)
    assert code == 4 and "rank-0000" in said


@pytest.mark.parametrize("kind", ["part", "data"])
def test_a_checkpoint_that_lost_one_ranks_file_is_passed_over_whole(tmp_path: Path, kind: str) -> None:
    write_pair(tmp_path, [1, 2])
    step_file(tmp_path, 2, kind, 1).unlink()
    archive = everstep.open(tmp_path)
    assert archive.plan().step == 1
    assert archive.load()["model.w"].tolist() == [1, 0, 1, 1]
    code, said = cli("verify", tmp_path)
    assert code == 4 and "step 2, rank 1" in said and "missing" in said


def test_a_commit_that_lists_fewer_ranks_is_not_believed(tmp_path: Path) -> None:
    write_pair(tmp_path, [1, 2])
    path = step_file(tmp_path, 2, "commit")
    commit = decode(path.read_bytes(), Commit, tier="disk", file=path.name)
    path.write_bytes(encode(msgspec.structs.replace(commit, parts=commit.parts[:1])))
    assert everstep.open(tmp_path).plan().step == 1, "the parts of one node of two were taken for a checkpoint"
    path.write_bytes(encode(msgspec.structs.replace(commit, parts=commit.parts[:1], world=1)))
    assert everstep.open(tmp_path).plan().step == 1
    assert cli("verify", tmp_path)[0] == 4


def vouch(directory: Path, step: int, rank: int) -> None:
    """Make a step's commit vouch for whatever manifest lies there now."""
    path = step_file(directory, step, "commit")
    commit = decode(path.read_bytes(), Commit, tier="disk", file=path.name)
    part = json.loads(step_file(directory, step, "part", rank).read_bytes())
    parts = [msgspec.structs.replace(p, digest=part["digest"]) if p.rank == rank else p for p in commit.parts]
    path.write_bytes(encode(msgspec.structs.replace(commit, parts=tuple(parts))))


def test_one_ranks_part_of_an_older_step_is_not_mixed_in_even_if_the_commit_vouches_for_it(tmp_path: Path) -> None:
    write_pair(tmp_path, [1, 2])
    for kind in ("part", "data"):
        shutil.copy(step_file(tmp_path, 1, kind, 1), step_file(tmp_path, 2, kind, 1))
    vouch(tmp_path, 2, 1)
    assert everstep.open(tmp_path).plan().step == 1
    with pytest.raises(Damaged):
        everstep.open(tmp_path).load(2)


def test_a_manifest_that_was_written_anew_is_not_the_one_that_was_committed(tmp_path: Path) -> None:
    write_pair(tmp_path, [1, 2])
    forge(step_file(tmp_path, 2, "part", 1), cut_time=3.0)
    assert everstep.open(tmp_path).plan().step == 1
    vouch(tmp_path, 2, 1)
    assert everstep.open(tmp_path).plan().step == 2, "only its digest was wrong"


# -- what is deleted, and what never


def newest_damaged(directory: Path) -> None:
    for step in (4, LAST):
        a_middle_bit(step_file(directory, step, "data"))


def test_retention_never_deletes_the_last_restorable_checkpoint(run: Path, tmp_path: Path) -> None:
    newest_damaged(run)
    code, said = cli("gc", run, "--keep", 1, "--memory", tmp_path)  # other tests have runs between two lives
    assert code == 0, said
    assert everstep.open(run).plan().step == 2
    assert cli("rm", run, 2)[0] == 2
    assert everstep.open(run).load()["step"] == 2


def test_retention_in_mid_run_does_not_count_foreign_and_damaged_commits(run: Path) -> None:
    """A commit with a high number that is none of ours must not make all of ours look old."""
    tier = DiskTier(run)
    shutil.copy(step_file(run, LAST, "commit"), step_file(run, 99, "commit"))
    empty(step_file(run, LAST, "part"))
    gone = flush.retire(tier, KeepPolicy(last=1), run_of(run))
    assert 4 not in gone
    assert everstep.open(run).plan().step == 4


# -- memory


def killed_with_memory(
    directory: Path, memory: Path | None = None, *, checked: bool = True
) -> dict[int, tuple[Arena, int]]:
    """A life killed in step 6, with steps 4 and 5 checksummed in memory and step 2 on disk; slots by step."""
    path = str(memory) if memory else None

    def life() -> dict[str, Any]:
        def die(run: everstep.Run) -> None:
            if run.step == 2:
                run.wait("durable")
            if run.step >= 3 and checked:
                run.wait("sealed")
                arena = run._capture.arena()
                from everstep.keeper.session import check_newest

                check_newest(arena, lambda: False)
            if run.step == 5:
                run.wait("sealed")
                os.kill(os.getpid(), 9)

        return train_tiny(directory, die, tiers=[Disk(every=100), Memory(path=path)])

    assert live(life).killed
    return {
        seal.step: (arena, slot)
        for arena in find_arenas(arena_root(path), run_of(directory))
        for slot, seal in arena.seals().items()
    }


def test_a_flipped_bit_in_shared_memory_is_found_and_the_step_before_it_taken() -> None:
    for place in (0, 8, 300, 4096, 4500, -1):  # length, header, tensors, extras
        with run_directory() as directory:
            slots = killed_with_memory(directory)
            newest = max(slots)
            arena, slot = slots[newest]
            assert arena.checks(slot) is not None and newest - 1 in slots
            arena.slots[slot][place] ^= 4
            no_command_stumbles(directory)
            code, said = cli("verify", directory)
            assert code == 4 and f"step {newest}" in said and "memory" in said
            result = must_finish(lambda: train_tiny(directory))
            assert result["resumed_from"] == newest - 1
            assert result["digest"] == digest_of(LAST)
            assert any(isinstance(e, Rejected) and e.step == newest for e in read_events(directory))


def test_a_flipped_bit_in_the_header_of_a_slot_is_found_before_it_has_checksums() -> None:
    """The bytes of tensors have none until the keeper, or the next life, has made them; what they mean always has."""
    with run_directory() as directory:
        slots = killed_with_memory(directory, checked=False)
        arena, slot = slots[max(slots)]
        arena.set_checks(slot, 0, (0,))
        header = bytes(arena.image(slot)[:4096])
        for offset in range(0, len(header), 61):
            arena.slots[slot][offset] ^= 1 << (offset % 8)
            plan = everstep.open(directory).plan()
            assert plan.step == max(slots) - 1, offset
            arena.slots[slot][offset] ^= 1 << (offset % 8)
        assert everstep.open(directory).plan().step == max(slots)


def test_a_flipped_bit_in_memory_is_not_written_to_disk_under_new_checksums(tmp_path: Path) -> None:
    with run_directory() as directory:
        slots = killed_with_memory(directory, tmp_path)
        newest = max(slots)
        arena, slot = slots[newest]
        arena.slots[slot][5000] ^= 1
        code, said = cli("gc", "--memory", tmp_path)
        assert code == 0, said
        assert everstep.open(directory).plan().step == newest - 1  # gc saved the sound one
        assert cli("verify", directory)[0] == 0


def test_every_byte_of_the_control_page_is_checked_or_harmless() -> None:
    """Header and seals carry checksums. Live state is for people. Checks that are torn are as if not yet made."""
    with run_directory() as directory:
        slots = killed_with_memory(directory)
        newest = max(slots)
        arena, _slot = slots[newest]
        control = Path(arena.place, "control")
        whole = control.read_bytes()
        truth = {s: bytes(a.image(i)) for s, (a, i) in slots.items()}
        for offset in (*range(0, 1024, 3), *range(4096, len(whole), 61)):
            damaged = bytearray(whole)
            damaged[offset] ^= 1 << (offset % 8)
            control.write_bytes(damaged)
            sources = everstep.open(directory)._sources()
            for holding in (h for h in sources.survey().holdings if h.source == "memory"):
                assert bytes(sources.fetch(holding, copy=True)[2]) == truth[holding.step], offset
            sources.close()
        control.write_bytes(whole)


@pytest.mark.parametrize(
    "what", ["header", "seal", "cut off", "cut short", "empty", "no slot", "short slot", "foreign"]
)
def test_a_broken_arena_is_reported_and_the_disk_takes_over(what: str) -> None:
    with run_directory() as directory:
        slots = killed_with_memory(directory)
        arena, _slot = slots[max(slots)]
        folder = Path(arena.place)
        control = folder / "control"
        match what:
            case "header":
                flip(control, 20)
            case "seal":
                for i in range(3):
                    arena.control[512 + 128 * i + 8] ^= 1
            case "cut off":
                os.truncate(control, 5000)
            case "cut short":
                os.truncate(control, 50)
            case "empty":
                os.truncate(control, 0)
            case "no slot":
                (folder / "slot-0.safetensors").unlink()
            case "short slot":
                os.truncate(folder / "slot-1.safetensors", 100)
            case "foreign":
                control.write_bytes(os.urandom(control.stat().st_size))
        no_command_stumbles(directory)
        result = must_finish(lambda: train_tiny(directory))
        durable = result["resumed_from"]
        assert durable is not None and durable < max(slots), "the disk has an older step"
        assert result["digest"] == digest_of(LAST)
        told = [e for e in read_events(directory) if isinstance(e, Rejected) and e.source == "memory"]
        assert told or what == "empty"  # an empty control file is what a crash leaves before anything was sealed


def test_a_broken_arena_with_nothing_on_disk_is_refused() -> None:
    with run_directory() as directory:
        slots = killed_with_memory(directory)
        for path in directory.glob("step-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        arena, _ = slots[max(slots)]
        flip(Path(arena.place, "control"), 20)
        outcome = live(lambda: train_tiny(directory))
        assert "everstep.errors.Damaged" in outcome.error
        assert Path(arena.place).exists()


@pytest.mark.parametrize("content", [b"", b"\0", None])
def test_memory_whose_owner_cannot_be_told_is_kept(content: bytes | None, tmp_path: Path) -> None:
    with run_directory() as directory:
        slots = killed_with_memory(directory, tmp_path)
        arena, _ = slots[max(slots)]
        signature = Path(arena.place).parent / "directory"
        if content is None:
            a_middle_bit(directory / "run.json")
            for commit in directory.glob("step-*.json"):
                a_middle_bit(commit)
        else:
            signature.write_bytes(content)
        code, said = cli("gc", "--json", "--memory", tmp_path)
        assert code == 0, said
        assert Path(arena.place).exists()
        outcome = {m["run"]: m["outcome"] for m in json.loads(said)["memory"]}[arena.run]
        assert outcome.startswith("kept")
        shutil.rmtree(Path(arena.place).parent, ignore_errors=True)


def test_part_manifests_decode_to_what_they_were(run: Path) -> None:
    """The walk above is only worth something if the sound files pass."""
    for commit in run.glob("step-*.json"):
        step = int(commit.name[5:15])
        read_step(run, step)
        path = step_file(run, step, "part")
        assert decode(path.read_bytes(), Part, tier="disk", file=path.name).step == step
    assert cli("verify", run)[0] == 0
