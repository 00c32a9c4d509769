"""One life of a training that is killed: it resumes, makes its first step, trains on, and waits for its end.

Started by bench/gpu_recovery.py. Says when each part of its beginning was over, in one line of JSON, and `ready`.
"""

from __future__ import annotations

import time

MOMENTS = {"process": time.time()}

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import gpu_models  # noqa: E402
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from log_peers import tensors_of  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402

import everstep  # noqa: E402
from everstep.capture.steering import Steering  # noqa: E402
from everstep.events import Replayed, read_events  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("how", choices=("bases", "log", "torch.load", "dcp.load"))
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--peers", type=Path, required=True, help="where the files of torch.save and DCP are")
    parser.add_argument("--device", required=True)
    parser.add_argument("--steps", type=int, default=0, help="to train after the first, before it is ready")
    parser.add_argument("--slots", type=int, default=None, help="of memory, if not as many as Everstep takes by itself")
    parser.add_argument("--keep", action="store_true", help="be ready only when all is durable, or protected")
    parser.add_argument("--save", action="append", default=[], help="leave a file for torch.load, dcp.load")
    given = parser.parse_args()
    gpu_models.DEVICE = given.device
    if "WORLD_SIZE" in os.environ:
        everstep.init_process_group("gloo")
    if given.device == "cuda":
        torch.zeros(1, device="cuda")  # the context: it is made in every life, whatever is loaded
    mark("imports and device")
    case = gpu_models.make_case(given.model, light=True)
    model: Any = case.model
    if "WORLD_SIZE" in os.environ:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    mark("model")
    run, said = None, {"resumed_from": None}
    if given.how in ("bases", "log"):
        run, said = guard(case, model, given)
    else:
        load(case, given)
    gpu_models.sync()
    mark("load")
    train(case, run, 1)
    mark("first step")
    size = sum(tensor.nbytes for tensor in tensors_of(case.model, case.optimizer))
    print(json.dumps({"moments": MOMENTS, **said, "state_bytes": size}), flush=True)
    train(case, run, given.steps)
    if run is not None and given.keep:
        run.wait("protected" if "EVERSTEP_TIERS" in os.environ else "durable")
    given.peers.mkdir(parents=True, exist_ok=True)
    for how in given.save:
        save(case, how, given.peers)
    print("ready", flush=True)
    time.sleep(3600)


def mark(what: str) -> None:
    MOMENTS[what] = time.time()


def train(case: gpu_models.Case, run: everstep.Run | None, steps: int) -> None:
    for _ in range(steps):
        case.step()
        if run is not None:
            run.done()
            if run._keeping.recorder is not None and run.step % 4 == 0:
                run.wait("durable")  # so that the ring is never full, whatever the disk
    gpu_models.sync()


def guard(case: gpu_models.Case, model: Any, given: argparse.Namespace) -> tuple[everstep.Run, dict[str, Any]]:
    options: dict[str, Any] = {"strategy": "snapshot"}
    if given.how == "log":
        Steering.steps_per_base = 10_000  # type: ignore[method-assign,assignment]
        options = {"strategy": "log", "compress": everstep.compress.TopK(0.01)}
    if "EVERSTEP_TIERS" not in os.environ:
        memory = [everstep.Memory(slots=given.slots)] if given.slots else []
        options["tiers"] = [*memory, everstep.Disk(every="1h")]
    run = everstep.guard(model, case.optimizer, dir=given.dir, linger="300s", keep=1, **options)
    replayed = [event for event in read_events(given.dir) if isinstance(event, Replayed)]
    said: dict[str, Any] = {"resumed_from": run.resumed_from}
    if replayed and run.resumed_from is not None:
        said |= {"replay": replayed[-1].seconds, "replayed": replayed[-1].steps}
    return run, said


def save(case: gpu_models.Case, how: str, folder: Path) -> None:
    if how == "torch.load":
        torch.save([case.model.state_dict(), case.optimizer.state_dict()], folder / "state.pt")
        return
    model, optimizer = get_state_dict(case.model, case.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "dcp", no_dist=True)


def load(case: gpu_models.Case, given: argparse.Namespace) -> None:
    """As the documentation of each says."""
    if given.how == "torch.load":
        model, optimizer = torch.load(given.peers / "state.pt", map_location=given.device, weights_only=True)
        case.model.load_state_dict(model)
        case.optimizer.load_state_dict(optimizer)
        return
    model, optimizer = get_state_dict(case.model, case.optimizer)
    whole = {"model": model, "optimizer": optimizer}
    dcp.load(whole, checkpoint_id=given.peers / "dcp", no_dist=True)
    set_state_dict(
        case.model, case.optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"]
    )  # fmt: skip


if __name__ == "__main__":
    main()
