"""What other nodes entrusted to this one, and its parity: kept in memory, and let go when nothing needs it any more."""

from __future__ import annotations

from everstep.errors import Damaged
from everstep.keeper.flush import disown_values
from everstep.keeper.protocol import Hello
from everstep.store.log import cut_after, ranks_of
from everstep.store.manifest import parity_folder, parity_steps, read_record, step_folder, step_folders
from everstep.store.memory import MemoryTier
from everstep.types import ParityRecord, Part


def forget_passed_over(guests: MemoryTier, hello: Hello) -> None:
    """What others entrusted to this node in lives that went another way than the present one makes room."""
    after = -1 if hello.resumed_from is None else hello.resumed_from
    for step in step_folders(guests):
        if step > after and not _is_of(guests, step_folder(step), Part, hello):
            guests.delete_folder(step_folder(step))
    for step in parity_steps(guests):
        if step > after and not _is_of(guests, parity_folder(step), ParityRecord, hello):
            guests.delete_folder(parity_folder(step))
    disown_values(guests, hello.resumed_from, hello.generation)
    cut_after(guests, hello.resumed_from, ranks_of(guests), hello.run, hello.generation)


def _is_of(guests: MemoryTier, folder: str, kind: type[Part] | type[ParityRecord], hello: Hello) -> bool:
    """Whether something in a folder is of the present life, which may only have lost its keeper."""
    for name in guests.names(folder):
        try:
            if not name.endswith(".json"):
                continue
            record = read_record(guests, name, Part) if kind is Part else read_record(guests, name, ParityRecord)
            if record.generation == hello.generation:
                return True
        except (Damaged, OSError):
            continue
    return False


def forget_before(guests: MemoryTier, step: int) -> None:
    """Copies and parity of steps before one that all nodes have protected go, whichever scheme they are of."""
    for old in (one for one in step_folders(guests) if one < step):
        guests.delete_folder(step_folder(old))
    for old in (one for one in parity_steps(guests) if one < step):
        guests.delete_folder(parity_folder(old))
