"""Trains under Ray Train, and the same without it first, to compare: ray_driver.py DIR STEPS KILL_AT ..."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch.distributed as dist
from killed import example

train_ray = example("train_ray")
train = train_ray.train


def train_from_the_same_start(config: dict[str, Any]) -> dict[str, Any]:
    random.seed(1)  # the example needs neither; each checkpoint has both
    np.random.seed(1)
    return train(config)


def train_without_ray(directory: Path, steps: int) -> None:
    meeting = directory.with_name("meeting")
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            dist.init_process_group("gloo", store=dist.FileStore(str(meeting), 2), rank=rank, world_size=2)
            train_from_the_same_start({"dir": str(directory), "steps": steps, "kill_at": None})
            os._exit(0)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in ranks)


def main() -> None:
    """A KILL_AT of 0: nobody dies; of "without": Ray is left out."""
    runs = list(zip(*[iter(sys.argv[1:])] * 3, strict=True))
    for directory, steps, kill_at in runs:
        if kill_at == "without":
            train_without_ray(Path(directory), int(steps))
    train_ray.train = train_from_the_same_start
    ray.cloudpickle.register_pickle_by_value(train_ray)  # workers do not find it by its name
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
    print(ray.nodes()[0]["NodeManagerAddress"], flush=True)
    for directory, steps, kill_at in runs:
        if kill_at != "without":
            ended = train_ray.fit(Path(directory), int(steps), int(kill_at) or None).return_value
            print("ended", ended["step"], ended["losses"], flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
