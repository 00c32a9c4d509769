"""Everstep keeps PyTorch training alive: every step survives, and a resumed run continues bit for bit.

run.py          guard(), Run: the door a training loop walks in by
archive.py      open(), Archive: the door for people and tools who read
# ground: imports nothing of ours but ground
types errors events timeline cadence checked tiers config image mapped launch wires topology signals halt notebook
# decisions: pure, and anybody on the road may ask for one
tune/           how often, and which way                models strategy controller
tune/           by the rules of others, and offline     classics levels machine
# the road out: a byte leaves the model
capture/        which part of a tensor is whose         collector sharded watch layout shares buckets
capture/        memory that outlives the trainer        host taken arena reserve
capture/        off the device, without stopping it     pinned life copier hooks shape snapshot extras
capture/        where the data stands                   drawn stream position
capture/        in which order DDP adds gradients up    reductions
capture/        what the optimizers consumed            bits digest update stepped purity sheet form tap room
capture/        a record per step                       gradients
capture/        what it costs, and which way to go on   moments steering
capture/        and smaller, if training wants it so    compressor powersgd compress compression
store/          onto a medium, all or nothing           tier blocks disk memory manifest frame gaps log retain
store/          an object store                         bucket objects
store/          where it lies, and whose it is          places claim halts rewinds
protect/        across nodes: who, where, and how       groups stripes xor reed_solomon coder parity
keeper/         out of the trainer's way                protocol session roster flush book logbook pace scavenge process
keeper/         one a node, with an eye and two hands   keeper halting base_writer record_writer
keeper/         and in numbers, for Prometheus          metrics scrape
keeper/         and how busy the accelerators are       devices
keeper/         who goes on after a loss                lines views assembly council embassy
keeper/         and with those of other nodes           rate wire peers peer_server rounds exchange note seals fleet
keeper/         beyond this node, a lane each           lane transit deeper partners parity_work copies guests
keeper/         and records and values behind them      sinking sunk_values
keeper/         and as new as the trainer               replica replica_image replica_records replica_rank
keeper/         in a process of its own                 replica_process
keeper/         and its end in the trainer              client arrival keeping
# the road home: a byte returns
recover/        which bytes a rank needs                needs
recover/        back to the same step on every rank     shelf survey plan assemble carry make_good chain load
recover/        into the objects that go on             restore state
recover/        by repeating what followed a base       gather replay resume export
recover/        for people and tools who read          others reach times audit inquiry salvage records rebuild retrieve
live/           without leaving the loop                line watch meeting presence replicas regroup course forward loop
live/           those who train, started and replaced   crew
# beside the road
testing.py      the promises of a tier, as a suite that anybody can run
lab/            what if: who fails when                 scenario trace failures
lab/            and what a real run would decide then   rhythm holdings lifetime simulation outcome picture
lab/            and what losses do to a model           mishaps trial lessons workers accuracy curves
lab/            the same on real processes              injections processes watching injector verdict
lab/            what is done to them                    damage connections
lab/            both ways, side by side                 agreement
integrations/   checkpoints that a program hands over   slots
integrations/   programs written for SCR                scr scr_settings scr_meeting scr_job scr_life
integrations/   their files, there and back             scr_files scr_restart scr_index scr_outbox scr_pace
integrations/   checkpoints of other tools              given inert dcp_files foreign parts adopt
integrations/   the loops of training frameworks        versions lightning lightning_loops transformers
integrations/   and calls for those without loops       accelerate deepspeed
integrations/   torch.distributed.checkpoint            dcp dcp_life dcp_search dcp_table
report/         a run for people who look at it         story rows trace whole series now
report/         drawn, on one page                      markup figures page
report/         and what a simulation has written       outcomes simulated
cli/            one file a command
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "guard": "everstep.run",
    "Run": "everstep.run",
    "open": "everstep.archive",
    "Archive": "everstep.archive",
    "init_process_group": "everstep.topology",
    "Memory": "everstep.tiers",
    "Disk": "everstep.tiers",
    "Partner": "everstep.tiers",
    "Parity": "everstep.tiers",
    "Shared": "everstep.tiers",
    "Objects": "everstep.tiers",
    "Keep": "everstep.config",
    "EverstepError": "everstep.errors",
}

__all__ = [
    "Archive",
    "Disk",
    "EverstepError",
    "Keep",
    "Memory",
    "Objects",
    "Parity",
    "Partner",
    "Run",
    "Shared",
    "guard",
    "init_process_group",
    "open",
]

if TYPE_CHECKING:
    from everstep.archive import Archive, open
    from everstep.config import Keep
    from everstep.errors import EverstepError
    from everstep.run import Run, guard
    from everstep.tiers import Disk, Memory, Objects, Parity, Partner, Shared
    from everstep.topology import init_process_group


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that reading commands never pay for torch."""
    if name == "compress":
        return import_module("everstep.capture.compress")
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'everstep' has no attribute {name!r}")
