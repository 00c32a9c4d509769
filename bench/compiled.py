"""Whether torch.compile makes the same bits in every process, on one GPU; Everstep has no part in it.

    python bench/compiled.py 2> /dev/null

A small network is compiled and trained for eight steps by eight processes at once, each with compile caches of its own.
Processes that differ here cannot be resumed bit for bit by anybody.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

PROCESSES, ROUNDS, STEPS = 8, 2, 8
WAYS = ("as it is", "cudnn.deterministic", "use_deterministic_algorithms")


def train(way: str) -> str:
    import torch
    import torch._inductor.config as inductor
    from torch import nn

    torch.backends.cudnn.deterministic = way == WAYS[1]
    torch.use_deterministic_algorithms(way == WAYS[2])
    inductor.deterministic = way == WAYS[2]
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(32 * 36, 10)
    ).cuda()  # fmt: skip
    model = torch.compile(network)
    optimizer = torch.optim.Adam(network.parameters())
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 3, 8, 8, generator=generator), torch.randint(0, 10, (16,), generator=generator)
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for tensor in network.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def processes(way: str, scratch: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for turn in range(ROUNDS):
        started = []
        for number in range(PROCESSES):
            caches = scratch / f"{WAYS.index(way)}-{turn}-{number}"
            environment = os.environ | {
                "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton",
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            }  # fmt: skip
            started.append(
                subprocess.Popen([sys.executable, __file__, way], stdout=subprocess.PIPE, text=True, env=environment)
            )
        found.update(process.communicate()[0].split()[-1] for process in started)
    return found


def main() -> None:
    if len(sys.argv) > 1:
        print(train(sys.argv[1]))
        return
    print(f"{PROCESSES * ROUNDS} processes, {PROCESSES} at a time: how many have each of the results")
    with tempfile.TemporaryDirectory() as scratch:
        for way in WAYS:
            counts = sorted(processes(way, Path(scratch)).values(), reverse=True)
            print(f"{way:<30}", ", ".join(map(str, counts)), flush=True)


if __name__ == "__main__":
    main()
