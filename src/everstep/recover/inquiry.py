"""Whether what other nodes have is sound: their disks and what they hold for others, read through their keepers.

Their memory is not read: a keeper brings it to its disk. Which nodes could not be asked is said of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from everstep.errors import EverstepError
from everstep.keeper.exchange import ANSWERS
from everstep.keeper.note import FleetNote
from everstep.keeper.peers import Peer
from everstep.recover.audit import VALUES_NOTE, Check, Finding, check_log, log_files, not_asked
from everstep.recover.others import PATIENCE_S, remote_shelf
from everstep.recover.shelf import Shelf
from everstep.store.log import log_name
from everstep.types import Holding, ParityHolding, Rejection


@contextmanager
def inquiry(run: str, node: str, note: FleetNote, step: int | None) -> Iterator[tuple[list[Check], list[Finding]]]:
    """What there is to be read of all other nodes, or what of it is of a step; and what is known without reading."""
    checks: list[Check] = []
    found: list[Finding] = []
    with ExitStack() as stack:
        for member in (one for one in note.members if one.node != node):
            peer = Peer(member.node, member.address, note.secret, ANSWERS, encrypt=note.encrypt, timeout_s=PATIENCE_S)
            stack.enter_context(peer)
            try:
                for source in ("disk", "partner"):
                    _look(remote_shelf(peer, run, source), member.node, step, checks, found)
            except (EverstepError, OSError) as error:
                found.append(not_asked(member.node, str(error)))
        yield checks, found


def _look(shelf: Shelf, node: str, step: int | None, checks: list[Check], found: list[Finding]) -> None:
    rejections: list[Rejection] = []
    for part in shelf.holdings(rejections):
        if step in (None, part.step):
            checks.append((part.bytes, partial(_read_part, shelf, node, part)))
    for values in shelf.values(rejections):
        if step in (None, values.step):
            checks.append((values.bytes, partial(_read_values, shelf, node, values)))
    for parity in shelf.parities(rejections) if shelf.source == "partner" else ():
        if step in (None, parity.record.step):
            checks.append((parity.record.bytes, partial(_read_parity, shelf, node, parity)))
    files = log_files(shelf.tier)
    for start, rank in files:
        is_wanted = step is None or start < step <= min((s for s, r in files if r == rank and s > start), default=step)
        if is_wanted:
            size = shelf.tier.size(log_name(start, rank))
            checks.append((size, partial(_read_log, shelf, node, start, rank, step)))
    found += [
        Finding(step=one.step, source=shelf.source, rank=-1, bytes=0, problem=one.reason, node=node)
        for one in rejections
        if step in (None, one.step)
    ]


def _read_log(shelf: Shelf, node: str, start: int, rank: int, limit: int | None) -> Finding:
    return replace(check_log(shelf, start, rank, limit), node=node)


def _read_part(shelf: Shelf, node: str, part: Holding) -> Finding:
    return _checked(
        lambda: shelf.image(part),
        Finding(step=part.step, source=shelf.source, rank=part.rank, bytes=part.bytes, problem="", node=node),
    )


def _read_values(shelf: Shelf, node: str, values: Holding) -> Finding:
    return _checked(
        lambda: shelf.values_image(values),
        Finding(
            step=values.step, source=shelf.source, rank=values.rank, bytes=values.bytes, problem="", node=node,
            note=VALUES_NOTE,
        ),
    )  # fmt: skip


def _read_parity(shelf: Shelf, node: str, parity: ParityHolding) -> Finding:
    record = parity.record
    return _checked(
        lambda: shelf.parity(parity),
        Finding(step=record.step, source="parity", rank=-1, bytes=record.bytes, problem="", node=node),
    )


def _checked(read: Callable[[], object], finding: Finding) -> Finding:
    try:
        read()
    except (EverstepError, OSError) as error:
        return replace(finding, problem=str(error))
    return finding
