"""FORMAT.md is true: its tables are compared with the code, and its offsets with the bytes of a real arena."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import msgspec
import pytest
import xxhash

from everstep import image, timeline, types
from everstep.capture import arena as arenas
from everstep.capture import extras
from everstep.capture.arena import Arena
from everstep.integrations import dcp_table
from everstep.store import frame as frames
from everstep.store import objects
from everstep.store.gaps import to_gaps
from everstep.store.objects import ObjectTier

TEXT = (Path(__file__).parents[2] / "FORMAT.md").read_text()
RECORDS = [
    types.RunRecord, types.Part, types.Piece, types.Commit, types.PartRef, types.Attempt, types.HaltRecord,
    types.ImageInfo, types.OptimizerInfo, types.Place, types.Frame, types.DatasetRecord, types.TiersRecord,
    types.ParityRecord, types.ParityMember, types.ParityPart, dcp_table.Note,
]  # fmt: skip
TYPES = {"StructType": "Codec",
    "IntType": "integer", "StrType": "string", "LiteralType": "string", "FloatType": "number", "BoolType": "boolean",
    "DictType": "object", "UnionType": "string or null",
}  # fmt: skip


def table(after: str) -> list[list[str]]:
    """The rows of the first checked table after a text, without code quotes."""
    checked = TEXT.index("*checked*", TEXT.index(after))
    lines = TEXT[TEXT.index("\n|", checked) + 1 :].split("\n\n", 1)[0].splitlines()
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    assert set(rows[1][0]) <= set("-:"), f"no table after {after!r}"
    return rows[2:]


def heading(record: type) -> str:
    """Where a record is described: under a heading that names it."""
    found = re.search(rf"^### (.*: )?{record.__name__}\b.*$", TEXT, re.MULTILINE)
    assert found is not None, f"{record.__name__} is not described"
    return found[0]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_field_of_a_record_is_described_in_its_order(record: type[msgspec.Struct]) -> None:
    rows = table(heading(record))
    fields = msgspec.structs.fields(record)
    assert [row[0] for row in rows] == [field.encode_name for field in fields]
    for row, field in zip(rows, fields, strict=True):
        info = msgspec.inspect.type_info(field.type)
        may_be_null = isinstance(info, msgspec.inspect.UnionType)
        kind = type(info.types[0] if isinstance(info, msgspec.inspect.UnionType) else info).__name__
        assert row[1].endswith(" or null") == may_be_null, row
        assert row[1].startswith(TYPES.get(kind, "array of")), (row, kind)


def test_the_constants_are_those_of_the_code() -> None:
    for name, value, *_ in table("## Constants"):
        assert int(value) == next(vars(m)[name] for m in (image, arenas, frames) if name in vars(m)), name


def test_the_tags_of_the_extras_are_those_of_the_code() -> None:
    rows = [(int(tag), kind) for tag, kind, _ in table("### Extras")]
    names = sorted(
        (value, name[1:].lower())
        for name, value in vars(extras).items()
        if re.fullmatch(r"_[A-Z]+", name) and isinstance(value, int)
    )
    assert rows == names


def sizes(form: struct.Struct) -> list[int]:
    return [struct.calcsize("<" + code) for code in re.findall(r"\d*[a-zA-Z]", form.format)]


def with_checksum(form: struct.Struct, begin: int = 0) -> list[tuple[int, int]]:
    """Offset and size of every field of a structure, and of the checksum behind it."""
    spans = []
    for size in [*sizes(form), arenas._SUM.size]:
        spans.append((begin, size))
        begin += size
    return spans


def test_the_offsets_of_the_control_page_are_those_of_the_code() -> None:
    rows = table("### The control page")
    spans = {part: [(int(r[0]), int(r[1])) for r in rows if r[3] == part] for part in ("header", "owner", "live")}
    assert spans["header"] == with_checksum(arenas._HEADER)
    assert spans["owner"] == [(arenas._OWNER_AT, arenas._OWNER.size)]
    assert spans["live"] == with_checksum(arenas._LIVE, arenas._LIVE_AT)
    assert [r[:2] for r in rows if r[3] == "seal"] == [[str(arenas._SEALS_AT), f"{arenas._SEAL_BYTES} each"]]
    assert f"{arenas._SEALS_AT} + {arenas._SEAL_BYTES} * slot" in TEXT


def test_the_offsets_of_seals_and_checks_are_those_of_the_code() -> None:
    assert [(int(r[0]), int(r[1])) for r in table("A seal, from its own beginning")] == with_checksum(arenas._SEAL)
    n = 3
    checks = [[cell.replace("8 n", str(8 * n)) for cell in row[:2]] for row in table("Behind the control page")]
    got = [(sum(map(int, offset.split("+"))), int(size)) for offset, size in checks]
    assert got == [(0, 8), (8, 8), (arenas._CHECKS.size, 8 * n), (arenas._CHECKS.size + 8 * n, arenas._SUM.size)]


def test_a_real_arena_has_its_values_where_the_document_says() -> None:
    info = types.ImageInfo(format=1, run="a" * 32, rank=3, world=5)
    wanted = image.Wanted(name="model.w", dtype="F32", shape=(4,), start=(2,), extent=(2,))
    layout = image.lay_out([wanted], info, 100)
    arena = Arena.create(None, run=info.run, rank=3, world=5, layout=layout, slots=2)
    arena.seal(1, step=7, cut_time=1.5, generation="b" * 32)
    arena.set_live(8, 2.5)
    seal = arena.seals()[1]
    arena.set_checks(1, seal.sequence, (9,))
    control = bytes(arena.control)

    def at(row: list[str], base: int = 0) -> bytes:
        begin = base + int(row[0])
        return control[begin : begin + int(row[1])]

    page = {(row[3], row[2]): row for row in table("### The control page")}
    assert at(page["header", "magic"]) == b"EVERSTEP"
    for field, value in (("rank", 3), ("world", 5), ("slots", 2), ("slot bytes", layout.total_bytes)):
        assert int.from_bytes(at(page["header", field]), "little") == value
    assert int.from_bytes(at(page["header", "layout digest"]), "little") == xxhash.xxh3_64_intdigest(layout.header)
    assert at(page["header", "run"]) == info.run.encode()
    assert int.from_bytes(at(page["live", "step"]), "little") == 8
    begin = int(page["seal", "seals"][0]) + 128
    fields = {row[2]: row for row in table("A seal, from its own beginning")}
    assert int.from_bytes(at(fields["step"], begin), "little") == 7
    assert struct.unpack("<d", at(fields["cut time"], begin)) == (1.5,)
    assert at(fields["generation"], begin) == b"b" * 32
    end = begin + int(fields["checksum"][0])
    assert int.from_bytes(at(fields["checksum"], begin), "little") == xxhash.xxh3_64_intdigest(control[begin:end])
    assert struct.unpack_from("<QQQ", control, image.BLOCK + arenas._checks_bytes(layout.total_bytes)) == (
        seal.sequence, 1, 9
    )  # fmt: skip
    arena.close()


def test_a_record_is_made_as_the_document_says() -> None:
    from everstep.store.manifest import encode

    data = encode(types.RunRecord(format=1, run="a" * 32, created_time=1.0))
    digest = re.search(rb'"digest":"([0-9a-f]{32})"}$', data)
    assert digest is not None
    assert xxhash.xxh3_128_hexdigest(data.replace(digest[1], b"")) == digest[1].decode()


def test_a_real_frame_has_its_values_where_the_document_says() -> None:
    integers = struct.pack("<30i", *range(5, 33), 300, 1000)
    gaps = to_gaps(memoryview(integers), 4)
    assert gaps == struct.pack("<QQ", 5, 1) + bytes(27) + bytes([255, 12, 255, 255, 189]) and "`255, 12`" in TEXT
    frame = types.Frame(
        format=2, run="a" * 32, generation="b" * 32, step=7, rank=3, world=5, cut_time=1.5, kind="record", layout=9,
        ranges=((0, 4), (8, 120)), gaps=((8, 4, len(gaps)),),
    )  # fmt: skip
    data = b"".join(frames.encode_frame(frame, [memoryview(b"four"), memoryview(gaps)], synced=4096))
    rows = table("The prologue, from the beginning of its frame")
    assert [(int(r[0]), int(r[1])) for r in rows] == with_checksum(frames._PROLOGUE)
    at = {row[2]: data[int(row[0]) : int(row[0]) + int(row[1])] for row in rows}
    assert at["magic"] == b"EVERSLOG" and at["magic"].decode() in TEXT
    number = {field: int.from_bytes(value, "little") for field, value in at.items()}
    header = data[48 : 48 + number["header bytes"]]
    fields = [row[0] for row in table("### The header of a frame: Frame")]
    assert list(msgspec.msgpack.decode(header)) == fields
    without = msgspec.structs.replace(frame, format=1, gaps=())
    assert list(msgspec.msgpack.decode(msgspec.msgpack.encode(without))) == fields[:-1]
    assert (number["payload bytes"], number["synced bytes"]) == (4 + len(gaps), 4096)
    assert data[48 + len(header) : 4096].strip(b"\0") == b"" and data[4096:].rstrip(b"\0") == b"four" + gaps
    assert len(data) == 8192
    assert number["payload checksum"] == xxhash.xxh3_64_intdigest(b"four" + gaps)
    assert number["checksum"] == xxhash.xxh3_64_intdigest(data[:40] + header)


def test_a_large_blob_in_an_object_store_is_where_the_document_says() -> None:
    tier, data = ObjectTier("memory://"), bytes(9 << 20)
    tier.put("step-0000001200/rank-00000.safetensors", memoryview(data))
    keys = sorted(tier._objects(None))
    token = re.fullmatch(r"step-0000001200/\.data-([0-9a-f]{32})-rank-00000\.safetensors", keys[0])
    assert token is not None and keys[1:] == ["step-0000001200/rank-00000.safetensors"]
    pointer = bytes(objects.obstore.get(tier._store, keys[1]).bytes())
    assert pointer == f"everstep-object {token[1]}\n".encode() and len(pointer) == objects._POINTER_BYTES == 49
    assert "`everstep-object <32 hex>` and a newline, 49 bytes" in TEXT
    assert bytes(objects.obstore.get(tier._store, keys[0]).bytes()) == data


def test_the_timeline_is_laid_out_as_the_document_says(tmp_path: Path) -> None:
    def spans_of(form: struct.Struct) -> list[tuple[int, int]]:
        found, at = [], 0
        for size in sizes(form):
            found.append((at, size))
            at += size
        return found

    block, span = table("## The timeline"), table("A span, from its own beginning")
    assert [(int(row[0]), int(row[1])) for row in block] == spans_of(timeline._BLOCK)
    assert [(int(row[0]), int(row[1])) for row in span] == spans_of(timeline._SPAN)
    assert [(int(n), kind) for n, kind, _ in table("Kinds of spans")] == [(k, k.name.lower()) for k in timeline.Kind]
    one = timeline.Timeline(timeline.timeline_of_rank(tmp_path, 0))
    one.mark(timeline.Kind.PERSIST, 7, 0.0, 1.5, 3)
    one.close()
    data = one.path.read_bytes()
    at = {row[2]: data[int(row[0]) : int(row[0]) + int(row[1])] for row in block}
    inside = {row[2]: data[24 + int(row[0]) : 24 + int(row[0]) + int(row[1])] for row in span}
    number = {name: int.from_bytes(value, "little") for name, value in (at | inside).items()}
    assert at["magic"] == b"EVTL" and struct.unpack("<f", inside["seconds"]) == (1.5,)
    assert (number["version"], number["span bytes"], number["spans"]) == (1, 24, 1)
    assert (number["kind"], number["part"], number["step"]) == (20, 3, 7)
    assert number["checksum"] == xxhash.xxh3_64_intdigest(data[24:])
    assert timeline.LIMIT_BYTES == 4 << 20 and "4 MiB" in TEXT[TEXT.index("## The timeline") :]
