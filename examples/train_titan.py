"""A loop in the manner of torchtitan: run.done() after every step, in the place of a CheckpointManager now and then."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader

import everstep


@dataclass
class TrainState:
    step: int = 0
    tokens_seen: int = 0
    losses: list[float] = field(default_factory=list)

    def state_dict(self) -> dict[str, object]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, object]) -> None:
        vars(self).update(state)


class Stream(torch.utils.data.IterableDataset):
    """Endless sequences that count on, each from a start of its own; knows where it stands."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield (torch.randint(0, 64, (1,), generator=self.generator) + torch.arange(17)) % 64

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["generator"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    model_parts = [nn.Embedding(64, 32), nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 64))]
    optimizers = [torch.optim.AdamW(part.parameters(), lr=3e-3, foreach=True) for part in model_parts]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: min(1.0, (step + 1) / 10)) for one in optimizers]
    loader = StatefulDataLoader(Stream(), batch_size=8, generator=torch.Generator())
    train = TrainState()
    kept = {"train": train, "loader": loader}
    run = everstep.guard(model_parts, optimizers, dir=arguments.dir, scheduler=schedulers, extra=kept)
    batches = iter(loader)
    while train.step < arguments.steps:
        for batch in (next(batches), next(batches)):  # microbatches
            logits = model_parts[1](model_parts[0](batch[:, :-1]))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / 2
            loss.backward()
            train.tokens_seen += batch[:, 1:].numel()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        train.step += 1
        train.losses.append(loss.item())
        print(f"step {train.step}, loss {train.losses[-1]:.4f}", flush=True)
        run.done()
    run.finish()
    print(f"resumed from {run.resumed_from}, now at step {train.step}, {train.tokens_seen} tokens")


if __name__ == "__main__":
    main()
