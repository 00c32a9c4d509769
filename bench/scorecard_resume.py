"""Whether a training that was saved goes on as if nothing had happened: one life of it, with one of the peers.

    python bench/scorecard_resume.py PEER FOLDER undisturbed|begin|resume [--by-hand]

A classifier with dropout, Adam and a scheduler, on data that is shuffled anew in each epoch. `undisturbed` trains for
20 steps; `begin` saves after 10, in the middle of an epoch, and ends; `resume` loads in a new process and goes on. Each
prints what it has at step 20. Peers are handed model.state_dict(), optimizer.state_dict(), scheduler.state_dict() and
the step; --by-hand: the random state and the place in the data, too, as far as a user sees to it. DeepSpeed's engine
and Everstep are handed the objects.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from scorecard_peers import PEERS, Dcp, Tree, engine_of, said_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, SAVED_AT, SAMPLES, BATCH = 20, 10, 56, 8  # seven batches in an epoch


class Training:
    """Any loop; whoever saves it is handed its state."""

    def __init__(self, peer: str, folder: Path) -> None:
        torch.manual_seed(0)
        self.peer, self.folder = peer, folder
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=2 * STEPS)
        x = torch.randn(SAMPLES, 16)
        data = TensorDataset(x, (x[:, :4] * x[:, 4:8]).argmax(dim=1))
        self.loader = DataLoader(data, batch_size=BATCH, shuffle=True)
        self.step, self.place = 0, 0  # place: batches of this epoch that were taken
        self.random_at_epoch = torch.get_rng_state()
        self.losses: list[float] = []

    def batches(self, from_hand: Tree | None) -> Iterator[Any]:
        while True:
            if from_hand is None:
                self.random_at_epoch, self.place = torch.get_rng_state(), 0
                epoch = iter(self.loader)
            else:
                self.random_at_epoch, self.place = from_hand["random_at_epoch"], from_hand["place"]
                torch.set_rng_state(self.random_at_epoch)
                epoch = iter(self.loader)
                for _ in range(self.place):
                    next(epoch)
                torch.set_rng_state(from_hand["random"])
                from_hand = None
            for batch in epoch:
                self.place += 1
                yield batch

    def train(self, until: int, from_hand: Tree | None = None) -> None:
        for x, y in self.batches(from_hand):
            self.losses.append(self.learn(x, y))
            self.step += 1
            if self.step == until:
                return

    def learn(self, x: Tensor, y: Tensor) -> float:
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def by_hand(self) -> Tree:
        return {"random": torch.get_rng_state(), "random_at_epoch": self.random_at_epoch, "place": self.place}

    def save(self, by_hand: Tree | None) -> None:
        peer = PEERS[self.peer](self.folder)
        peer.take({**self.parts(), "step": self.step, "by_hand": by_hand or {}})
        peer.save(self.step)
        peer.finish()

    def load(self, *, by_hand: bool) -> Tree:
        like = {**self.parts(), "step": 0, "by_hand": self.by_hand() if by_hand else {}}
        found = PEERS[self.peer](self.folder).load(like)
        self.put(found)
        self.step = int(found["step"])
        from_hand: Tree = found["by_hand"]
        return from_hand

    def parts(self) -> Tree:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def put(self, found: Tree) -> None:
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.scheduler.load_state_dict(found["scheduler"])

    def found(self) -> Tree:
        """Everything that should be as it is without a disturbance."""
        return {
            "weights": digest(self.model.state_dict()),
            "optimizer": digest(self.optimizer.state_dict()["state"]),
            "learning rate": self.scheduler.get_last_lr(),
            "losses": self.losses[-(STEPS - SAVED_AT) :],
        }


class DcpTraining(Training):
    """With DCP's own state dicts, whose optimizer has room for what will be loaded."""

    def parts(self) -> Tree:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def put(self, found: Tree) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(
            self.model, self.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )  # fmt: skip
        self.scheduler.load_state_dict(found["scheduler"])


class DeepSpeedTraining(Training):
    """The engine has model, optimizer and scheduler; the rest is its client_state."""

    def __init__(self, peer: str, folder: Path) -> None:
        super().__init__(peer, folder)
        self.engine = engine_of(self.model, self.optimizer, self.scheduler)

    def learn(self, x: Tensor, y: Tensor) -> float:
        loss = nn.functional.cross_entropy(self.engine(x), y)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def save(self, by_hand: Tree | None) -> None:
        self.engine.save_checkpoint(str(self.folder), client_state={"step": self.step, "by_hand": by_hand or {}})

    def load(self, *, by_hand: bool) -> Tree:
        _, client_state = self.engine.load_checkpoint(str(self.folder))
        self.step = client_state["step"]
        from_hand: Tree = client_state["by_hand"]
        return from_hand


class EverstepTraining(Training):
    """The loop is the run; it has seen to everything."""

    def train(self, until: int, from_hand: Tree | None = None) -> None:
        import everstep

        self.run = everstep.guard(
            self.model, self.optimizer, self.loader, dir=self.folder / "run", scheduler=self.scheduler, epochs=None,
            steps=STEPS, tiers=[everstep.Disk(every=1)],
        )  # fmt: skip
        for x, y in self.run:
            if self.run.step == until:
                break
            self.losses.append(self.learn(x, y))

    def save(self, by_hand: Tree | None) -> None:
        self.run.wait("durable")

    def load(self, *, by_hand: bool) -> Tree:
        return {}


def digest(tree: Any) -> str:
    """Of all that a tree has, bit for bit."""
    if isinstance(tree, Tensor):
        words = f"{tree.dtype}{tuple(tree.shape)}".encode() + tree.detach().contiguous().numpy().tobytes()
    elif isinstance(tree, dict):
        words = repr([(key, digest(value)) for key, value in tree.items()]).encode()
    else:
        words = repr(tree).encode()
    return hashlib.sha256(words).hexdigest()


def training_of(peer: str, folder: Path) -> Training:
    if peer in ("Everstep", "DeepSpeed"):
        return (EverstepTraining if peer == "Everstep" else DeepSpeedTraining)(peer, folder)
    is_dcp = isinstance(PEERS[peer], type) and issubclass(PEERS[peer], Dcp)
    return (DcpTraining if is_dcp else Training)(peer, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("life", choices=("undisturbed", "begin", "resume"))
    parser.add_argument("--by-hand", action="store_true")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    try:
        training = training_of(given.peer, given.folder)
        if given.life == "begin":
            training.train(SAVED_AT)
            training.save(training.by_hand() if given.by_hand else None)
            print("saved", flush=True)
        else:
            from_hand = training.load(by_hand=given.by_hand) if given.life == "resume" else {}
            training.train(STEPS, from_hand or None)
            print(f"trained {json.dumps(training.found())}", flush=True)
    except BaseException as error:
        print(f"refused {said_of(error)}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
