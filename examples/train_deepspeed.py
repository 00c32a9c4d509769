"""Trains a small network with DeepSpeed's ZeRO, guarded by one call. Kill it whenever you like; start it again.

    torchrun --nproc-per-node 2 examples/train_deepspeed.py --dir runs/deepspeed

Started again it goes on, with as many ranks.
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep
from everstep.integrations.deepspeed import guard


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stage", type=int, choices=[1, 2], default=2)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()

    torch.manual_seed(1)
    torch.set_num_threads(1)
    everstep.init_process_group("gloo")
    deepspeed.init_distributed("gloo")
    x = torch.randn(320, 16)
    data = TensorDataset(x, (x[:, :4] * x[:, 4:8]).argmax(dim=1))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=1))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": arguments.stage},
            "bf16": {"enabled": arguments.bf16},
        },
    )
    losses: list[float] = []
    run = guard(engine, loader, dir=arguments.dir, extra={"losses": losses}, epochs=arguments.epochs)
    for features, labels in run:
        logits = engine(features.to(next(model.parameters()).dtype))
        loss = nn.functional.cross_entropy(logits.float(), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {engine.global_steps}, loss {losses[-1]:.4f}", flush=True)
    print(f"rank {dist.get_rank()}: resumed from {run.resumed_from}, now at step {run.step}, {len(losses)} losses")


if __name__ == "__main__":
    main()
