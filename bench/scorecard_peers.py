"""How each peer saves a state and gets it back, as its documentation says; one process does one of them and ends.

    python bench/scorecard_peers.py PEER save FOLDER STEP... [--die-after SECONDS | --die-at-return]
    python bench/scorecard_peers.py PEER load FOLDER

The state of a step is made from its number, so that whoever loads knows what it should be. `save` prints how long each
step took; it dies in the last one. `load` prints which step the tensors are of, `mixed` if they are of none, or the
error.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

TENSORS, ELEMENTS = 16, 1 << 20  # 64 MB
Tree = dict[str, Any]  # of trees, lists, tensors, numbers and words


def state_of(step: int) -> Tree:
    generator = torch.Generator().manual_seed(step)
    return {f"t{i:02d}": torch.randn(ELEMENTS, generator=generator) for i in range(TENSORS)}


def empty() -> Tree:
    return {f"t{i:02d}": torch.zeros(ELEMENTS) for i in range(TENSORS)}


class Peer:
    """`save` returns when the loop would go on, `finish` when it says that all is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take(self, tree: Tree) -> None:
        """What is to be saved next; all that is done once, too. Not timed."""
        self.tree = tree

    def save(self, step: int) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Nothing is left to do."""

    def load(self, like: Tree) -> Tree:
        """The newest that a user would find. `like`: of the same shape, for those who load into what is there."""
        raise NotImplementedError


class TorchSave(Peer):
    """One file, over the one before."""

    def save(self, step: int) -> None:
        torch.save(self.tree, self.folder / "state.pt")

    def load(self, like: Tree) -> Tree:
        found: Tree = torch.load(self.folder / "state.pt", weights_only=True)
        return found


class Safetensors(Peer):
    """One file, over the one before. It keeps tensors by name: whatever else a state has stands in its header."""

    def take(self, tree: Tree) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.rest = json.dumps(packed(tree, self.tensors))

    def save(self, step: int) -> None:
        from safetensors.torch import save_file

        save_file(self.tensors, self.folder / "state.safetensors", metadata={"rest": self.rest})

    def load(self, like: Tree) -> Tree:
        from safetensors import safe_open

        with safe_open(self.folder / "state.safetensors", framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            found: Tree = unpacked(json.loads(file.metadata()["rest"]), tensors)
            return found


class Dcp(Peer):
    """One folder, over the one before, as most examples have it."""

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.tree, checkpoint_id=self.folder / "dcp", no_dist=True)

    def load(self, like: Tree) -> Tree:
        import torch.distributed.checkpoint as dcp

        dcp.load(like, checkpoint_id=self.folder / "dcp", no_dist=True)
        return like


class DcpAsync(Dcp):
    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.saving = dcp.async_save(self.tree, checkpoint_id=self.folder / "dcp", no_dist=True)

    def finish(self) -> None:
        self.saving.result()


class Torchsnapshot(Peer):
    """One folder, over the one before."""

    def save(self, step: int) -> None:
        from torchsnapshot import Snapshot, StateDict

        Snapshot.take(str(self.folder / "snapshot"), {"state": StateDict(**self.tree)})

    def load(self, like: Tree) -> Tree:
        from torchsnapshot import Snapshot, StateDict

        found = StateDict(**like)
        Snapshot(str(self.folder / "snapshot")).restore({"state": found})
        return dict(found)


class Orbax(Peer):
    """Its CheckpointManager. It is of JAX: tensors are handed over as arrays, whatever else there is as JSON."""

    manager: Any = None

    def take(self, tree: Tree) -> None:
        tensors: dict[str, Tensor] = {}
        self.rest = packed(tree, tensors)
        self.arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        self.manager = self.manager or self._manager()

    def _manager(self) -> Any:
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        return ocp.CheckpointManager((self.folder / "orbax").absolute(), options=options)

    def save(self, step: int) -> None:
        import orbax.checkpoint as ocp

        arrays, rest = ocp.args.StandardSave(self.arrays), ocp.args.JsonSave(self.rest)
        self.manager.save(step, args=ocp.args.Composite(arrays=arrays, rest=rest))

    def finish(self) -> None:
        self.manager.wait_until_finished()

    def load(self, like: Tree) -> Tree:
        import orbax.checkpoint as ocp

        manager = self._manager()
        both = ocp.args.Composite(arrays=ocp.args.StandardRestore(), rest=ocp.args.JsonRestore())
        found = manager.restore(manager.latest_step(), args=both)
        tree: Tree = unpacked(found["rest"], {name: torch.tensor(array) for name, array in found["arrays"].items()})
        return tree


class NvrxLocal(Peer):
    """nvidia-resiliency-ext's LocalCheckpointManager, as in its example."""

    def __init__(self, folder: Path) -> None:
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

        super().__init__(folder)
        alone()
        self.manager = LocalCheckpointManager(folder)

    def wrapped(self, tree: Tree) -> Any:
        from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict

        return BasicTensorAwareStateDict(tree)

    def save(self, step: int) -> None:
        self.manager.find_latest()
        self.manager.save(self.wrapped(self.tree), step)

    def load(self, like: Tree) -> Tree:
        self.manager.find_latest()
        found: Tree = self.manager.load()[0].state_dict
        return found


class NvrxLocalCpu(NvrxLocal):
    """The same with a state dict that does not ask for CUDA, which its documentation leaves to its users."""

    def wrapped(self, tree: Tree) -> Any:
        return on_cpu()(tree)

    def load(self, like: Tree) -> Tree:
        on_cpu()
        return super().load(like)


def on_cpu() -> Any:
    """Where pickle finds it: in this module, by its name."""
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict

    class OnCpu(BasicTensorAwareStateDict):  # type: ignore[misc]
        def __init__(self, tree: Tree) -> None:
            super().__init__({})
            self.state_dict = tree

        def restore_tensor_device(self, non_blocking: bool = True) -> None:
            """It is there."""

    OnCpu.__qualname__ = "OnCpu"
    globals()["OnCpu"] = OnCpu
    return OnCpu


class NvrxAsync(Peer):
    """nvidia-resiliency-ext's asynchronous torch.save."""

    def take(self, tree: Tree) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        super().take(tree)
        self.saving = TorchAsyncCheckpoint()

    def save(self, step: int) -> None:
        self.saving.async_save(self.tree, self.folder / "state.pt")

    def finish(self) -> None:
        self.saving.finalize_async_save(blocking=True)

    def load(self, like: Tree) -> Tree:
        found: Tree = torch.load(self.folder / "state.pt", weights_only=True)
        return found


class DeepSpeed(Peer):
    """The engine's save_checkpoint, without ZeRO: a folder for each step, and a file that names the latest."""

    engine: Any = None

    def take(self, tree: Tree) -> None:
        if self.engine is None:
            model = model_of(tree)
            self.engine = engine_of(model, torch.optim.SGD(model.parameters(), lr=0.0))
        fill(self.engine.module, tree)

    def save(self, step: int) -> None:
        self.engine.save_checkpoint(str(self.folder), tag=f"step-{step}")

    def load(self, like: Tree) -> Tree:
        self.take(like)
        path, _ = self.engine.load_checkpoint(str(self.folder))
        if path is None:
            raise FileNotFoundError("load_checkpoint found nothing")
        found: Tree = self.engine.module.state_dict()
        return found


class Everstep(Peer):
    """One step of a guarded loop. It would go on at once: it waits until the step is whole in memory."""

    run: Any = None

    def take(self, tree: Tree) -> None:
        import everstep

        if self.run is None:
            self.model = model_of(tree)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
            where, tiers = self.folder / "run", [everstep.Disk(every=1)]
            self.run = everstep.guard(self.model, self.optimizer, dir=where, tiers=tiers)
        fill(self.model, tree)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def save(self, step: int) -> None:
        self.optimizer.step()
        self.run.done()
        self.run.wait("sealed")

    def finish(self) -> None:
        self.run.wait("durable")

    def load(self, like: Tree) -> Tree:
        import everstep

        found = everstep.open(self.folder / "run").load()
        return {name.removeprefix("model."): value for name, value in found.items() if name.startswith("model.")}


PEERS: dict[str, Callable[[Path], Peer]] = {
    "torch.save": TorchSave, "safetensors": Safetensors, "DCP save": Dcp, "DCP async_save": DcpAsync,
    "torchsnapshot": Torchsnapshot, "Orbax": Orbax, "DeepSpeed": DeepSpeed, "NVRx local": NvrxLocal,
    "NVRx local, state dict for CPUs": NvrxLocalCpu, "NVRx async": NvrxAsync, "Everstep": Everstep,
}  # fmt: skip
PACKAGES = (
    "torch",
    "safetensors",
    "torchsnapshot",
    "orbax-checkpoint",
    "deepspeed",
    "nvidia-resiliency-ext",
    "torchft",
)


# -- what they share


def packed(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """A tree as JSON, whose tensors are put among `tensors`."""
    if isinstance(tree, Tensor):
        name = f"tensor{len(tensors)}"
        tensors[name] = tree.detach()
        return {"tensor": name}
    if isinstance(tree, dict):
        return {"items": [[key, packed(value, tensors)] for key, value in tree.items()]}
    return [packed(value, tensors) for value in tree] if isinstance(tree, list | tuple) else tree


def unpacked(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        if "tensor" in tree:
            return tensors[tree["tensor"]]
        return {key: unpacked(value, tensors) for key, value in tree["items"]}
    return [unpacked(value, tensors) for value in tree] if isinstance(tree, list) else tree


def model_of(tree: Tree) -> nn.Module:
    model = nn.Module()
    for name, tensor in tree.items():
        model.register_parameter(name, nn.Parameter(torch.zeros_like(tensor)))
    return model


@torch.no_grad()
def fill(model: nn.Module, tree: Tree) -> None:
    for name, tensor in tree.items():
        model.get_parameter(name).copy_(tensor)


def alone() -> None:
    """A group of one, for those who want a group."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def engine_of(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> Any:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
    import deepspeed

    # It would compile an all-reduce for CPUs first, for a minute or more; with one rank there is nobody to reduce with.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    alone()
    deepspeed.init_distributed("gloo")
    config = {"train_micro_batch_size_per_gpu": 8}
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def said_of(error: BaseException) -> str:
    """What an error says; for one that says nothing, the line that raised it."""
    text = str(error).strip() or (traceback.extract_tb(error.__traceback__)[-1].line or "")
    return f"{type(error).__name__}: {text.splitlines()[0][:150] if text else ''}"


def save(peer: Peer, steps: list[int], *, die_after: float | None, die_at_return: bool) -> None:
    for step in steps:
        is_last = step == steps[-1]
        peer.take(state_of(step))
        began = time.monotonic()
        if is_last and die_after is not None:
            threading.Timer(die_after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        peer.save(step)
        returned = time.monotonic() - began
        if is_last and die_at_return:
            os.kill(os.getpid(), signal.SIGKILL)
        peer.finish()
        print(f"saved {returned:.4f} {time.monotonic() - began:.4f}", flush=True)
    if die_after is not None:  # it was done before its time
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("what", choices=("save", "load"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int, nargs="*")
    parser.add_argument("--die-after", type=float, default=None, help="seconds after save() was called")
    parser.add_argument("--die-at-return", action="store_true", help="of save(), whatever is still in flight")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    try:
        peer = PEERS[given.peer](given.folder)
        if given.what == "save":
            save(peer, given.steps, die_after=given.die_after, die_at_return=given.die_at_return)
        else:
            found = peer.load(empty())
            steps = [step for step in (1, 2) if all(torch.equal(found[k], v) for k, v in state_of(step).items())]
            print(f"step {steps[0]}" if steps else "mixed", flush=True)
    except BaseException as error:
        print(f"refused {said_of(error)}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
