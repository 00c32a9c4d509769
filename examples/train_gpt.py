"""Trains a small GPT on generated text with DDP. Start it with torchrun; kill it whenever you like; start it again."""

from __future__ import annotations

import argparse
import random

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep

CONTEXT = 64
NOUNS, VERBS = ["cat", "dog", "bird", "fish", "child"], ["sees", "likes", "follows", "hears", "finds"]


def generated_text(sentences: int) -> Tensor:
    """Sentences of a tiny grammar, as bytes: enough structure to learn, nothing to download."""
    rng = random.Random(7)
    lines = [f"the {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)}." for _ in range(sentences)]
    return torch.frombuffer(bytearray(" ".join(lines).encode()), dtype=torch.uint8).long()


class GPT(nn.Module):
    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, width), nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        places = self.places(torch.arange(x.shape[1]))
        return self.head(self.blocks(self.tokens(x) + places, mask=mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--strategy", default="snapshot", choices=["auto", "snapshot", "log", "replica"])
    parser.add_argument("--steps", type=int, default=240)
    arguments = parser.parse_args()

    torch.manual_seed(1)
    torch.set_num_threads(1)
    everstep.init_process_group("gloo")
    text = generated_text(20_000)
    windows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    data = TensorDataset(windows)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=1))
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=arguments.steps)
    losses: list[float] = []

    run = everstep.guard(
        model, optimizer, loader, dir=arguments.dir, scheduler=scheduler,
        extra={"losses": losses}, epochs=None, steps=arguments.steps, strategy=arguments.strategy,
    )  # fmt: skip
    for (batch,) in run:
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
