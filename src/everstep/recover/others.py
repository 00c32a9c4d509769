"""What other nodes still have, for people and tools: asked of their keepers, while those live.

How to ask them is said in the note that the keeper of this node left.
"""

from __future__ import annotations

from everstep.errors import EverstepError
from everstep.keeper.exchange import ANSWERS, AnyAnswer, AskSeals, RemoteTier, Seals
from everstep.keeper.note import FleetNote
from everstep.keeper.peers import Peer
from everstep.recover.shelf import Shelf
from everstep.types import Holding, Records, Rejection, Survey, Survives

PATIENCE_S = 3.0


def surveys(run: str, node: str, note: FleetNote) -> list[Survey]:
    """One of every other node; of one that does not answer, only that it does not."""
    return [_survey(run, note, at) for at, member in enumerate(note.members) if member.node != node]


def _survey(run: str, note: FleetNote, at: int) -> Survey:
    member = note.members[at]
    rejections: list[Rejection] = []
    with Peer(
        member.node, member.address, note.secret, ANSWERS, encrypt=note.encrypt, timeout_s=PATIENCE_S
    ) as peer:  # fmt: skip
        try:
            answer = peer.ask(AskSeals()).answer
            assert isinstance(answer, Seals)
            shelves = [remote_shelf(peer, run, source) for source in ("disk", "partner")]
            holdings: list[Holding] = [*answer.bases]
            records: list[Records] = [*answer.records]
            values: list[Holding] = [*answer.values]
            for shelf in shelves:
                holdings += shelf.holdings(rejections)
                records += shelf.records(rejections)
                values += shelf.values(rejections)
            parities = tuple(shelves[1].parities(rejections))
        except (EverstepError, OSError) as error:
            reason = f"what node {member.node} has cannot be told: {error}"
            return Survey(holdings=(), rejections=(Rejection(step=0, source="any", reason=reason, certain=False),))
    return Survey(
        holdings=tuple(holdings), records=tuple(records), values=tuple(values), parities=parities,
        rejections=tuple(rejections),
    )  # fmt: skip


def remote_shelf(peer: Peer[AnyAnswer], run: str, source: str) -> Shelf:
    """What another node has on its disk, or holds for others."""
    if source == "disk":
        return Shelf(RemoteTier(peer, "disk", Survives.REBOOT), run, source="disk", node=peer.node)
    guests = RemoteTier(peer, "guests", Survives.PROCESS)
    return Shelf(guests, run, source="partner", node=peer.node, commits=False)
