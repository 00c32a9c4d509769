"""Trains a small transformer whose parameters FSDP2 shards over the ranks; killed, it goes on with the same bits.

    torchrun --nproc-per-node 2 examples/train_fsdp.py --dir runs/fsdp

Started again, also with another number of ranks or another --layout, it goes on from where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep


class Model(nn.Module):
    def __init__(self, words: int = 64, width: int = 48) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def laid_out(model: Model, layout: str) -> nn.Module:
    if layout == "fsdp":
        for module in (*model.layers, model):
            fully_shard(module)
    return DistributedDataParallel(model) if layout == "ddp" else model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layout", choices=["fsdp", "ddp", "single"], default="fsdp")
    parser.add_argument("--kill-at", type=int, help="in its first life the last rank kills itself after this step")
    arguments = parser.parse_args()

    torch.manual_seed(1)
    torch.set_num_threads(1)
    if arguments.layout != "single":
        everstep.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    data = TensorDataset(torch.randint(0, 64, (256, 12)))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, num_replicas=world, rank=rank, seed=1))
    model = laid_out(Model(), arguments.layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = everstep.guard(model, optimizer, loader, dir=arguments.dir, epochs=None, steps=arguments.steps)
    print(f"rank {rank} of {world}, {arguments.layout}: goes on from step {run.resumed_from}", flush=True)
    for (tokens,) in run:
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.resumed_from is None and run.step == arguments.kill_at and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    state = everstep.open(arguments.dir).load()  # whole tensors, wherever they were
    tensors = [state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)]
    bits = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]
    print(f"rank {rank}: step {run.step}, {len(tensors)} tensors, bits {bits}", flush=True)


if __name__ == "__main__":
    main()
