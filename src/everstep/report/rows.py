"""In which row of a process a span is shown, and how it is called. What a later version marks has a row, too."""

from __future__ import annotations

from everstep.timeline import Kind, Span

STEPS, TRAINING, REDUCING, COPYING = "steps", "training", "communication", "copies"
DISK, LOG, NODES, DEEPER, HOME, OTHER = "disk", "log", "other nodes", "deeper tiers", "recovery", "other"
ROWS = (HOME, STEPS, TRAINING, REDUCING, COPYING, DISK, LOG, NODES, DEEPER, OTHER)  # from top to bottom

_ROW = {
    Kind.STEP: STEPS,
    Kind.COMMUNICATION: REDUCING,
    Kind.COPY: COPYING,
    Kind.BUCKET: COPYING,
    Kind.DRAIN: COPYING,
    Kind.PERSIST: DISK,
    Kind.APPEND: LOG,
    Kind.PROTECT: NODES,
    Kind.FLUSH: DEEPER,
    Kind.RECOVERY: HOME,
    Kind.LOAD: HOME,
    Kind.REPLAY: HOME,
}
_CALLED = {
    Kind.DATA: "data",
    Kind.COMPUTE: "forward and backward",
    Kind.GATE: "wait at the gate",
    Kind.RECORD: "gradients into the record",
    Kind.CUT: "cut",
    Kind.COPY: "base",
    Kind.BUCKET: "bucket",
    Kind.DRAIN: "record leaves the device",
    Kind.APPEND: "records to the log",
}


def row_of(span: Span) -> str:
    if span.kind not in set(Kind):
        return OTHER
    return _ROW.get(Kind(span.kind), TRAINING)


def called(kind: int) -> str:
    if kind not in set(Kind):
        return f"kind {kind}"
    return _CALLED.get(Kind(kind), Kind(kind).name.lower())
