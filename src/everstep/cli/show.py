"""`everstep show`: what one step on disk is made of, or what the log has."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from everstep.archive import open
from everstep.cli.output import Directory, Json, MemoryPath, Step, ago, human_bytes, note, print_json, print_table
from everstep.recover.records import Entry


def command(
    directory: Directory,
    step: Step = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    log: Annotated[bool, typer.Option("--log", help="Show the records of the log, all or those of --step.")] = False,
    json: Json = False,
    memory: MemoryPath = None,
) -> None:
    """Show the parts of one step on disk, with --tensors every tensor in them; or with --log the records."""
    if log:
        _show_log(directory, step, json, memory)
        return
    commit, parts = open(directory).manifest(step)
    if json:
        print_json({"commit": commit, "parts": parts})
        return
    label = note(next((p.replica for p in parts if p.replica), ""))
    print(f"step {commit.step} of run {commit.run}, taken {ago(commit.cut_time)} by {commit.world} rank(s){label}")
    rows = [
        [str(p.rank), human_bytes(p.bytes), str(len(p.pieces)), str(len(p.chunks)), p.torch or "unknown"] for p in parts
    ]
    print_table(["rank", "size", "tensors", "checksums", "torch"], rows)
    if tensors:
        listed = [
            [
                str(p.rank),
                x.name,
                x.dtype,
                str(list(x.shape)),
                "" if x.whole else f"rows {x.start[0]} to {x.start[0] + x.extent[0]}",
            ]
            for p in parts
            for x in p.pieces
        ]
        print_table(["rank", "name", "dtype", "shape", "part"], listed)


def _show_log(directory: Directory, step: int | None, json: bool, memory: str | None) -> None:
    records, problems = open(directory, memory=memory).log(step)
    if json:
        print_json({"records": records, "problems": problems})
        return
    rows = [
        [
            str(r.step),
            str(r.rank),
            human_bytes(r.bytes),
            r.codec,
            _scalars(r),
            str(r.absent),
            "yes" if r.digested else "no",
            r.checksum or "in the ring",
        ]
        for r in records
    ]
    if rows:
        print_table(["step", "rank", "size", "codec", "scalars", "absent", "digest", "checksum"], rows)
    else:
        print(f"{directory} has no records")
    for problem in problems:
        print(problem)


def _scalars(record: Entry) -> str:
    """The numbers of every group; groups that have the same are told once."""
    told = dict.fromkeys(_numbers(group) for call in record.groups for group in call)
    return "; ".join(told)


def _numbers(group: dict[str, Any]) -> str:
    shown = {key: value for key, value in group.items() if _is_number(value)}
    return ", ".join(f"{key} {_short(value)}" for key, value in shown.items())


def _is_number(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    return " ".join(map(_short, value)) if isinstance(value, list) else f"{value:.6g}"
