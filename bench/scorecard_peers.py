"""How each peer saves a state and gets it back, as its documentation says; one process does one of them and ends.

    python bench/scorecard_peers.py PEER save|load FOLDER STEP [--die-after SECONDS | --die-at-return]

The state of a step is made from its number, so that whoever loads knows what it should be. `load` prints which step
the tensors are of, `mixed` if they are of none, or the error.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TENSORS, ELEMENTS = 16, 1 << 20  # 64 MB
State = dict[str, Tensor]


def state_of(step: int) -> State:
    generator = torch.Generator().manual_seed(step)
    return {f"t{i:02d}": torch.randn(ELEMENTS, generator=generator) for i in range(TENSORS)}


def empty() -> State:
    return {f"t{i:02d}": torch.zeros(ELEMENTS) for i in range(TENSORS)}


# -- the peers: where a step goes, save, load. `there` is where a user would look for the newest


class TorchSave:
    """One file, over the one before."""

    def save(self, folder: Path, step: int) -> None:
        torch.save(state_of(step), folder / "state.pt")

    def load(self, folder: Path) -> State:
        found: State = torch.load(folder / "state.pt", weights_only=True)
        return found


class Safetensors:
    def save(self, folder: Path, step: int) -> None:
        from safetensors.torch import save_file

        save_file(state_of(step), folder / "state.safetensors")

    def load(self, folder: Path) -> State:
        from safetensors.torch import load_file

        return load_file(folder / "state.safetensors")


class Dcp:
    """One folder, over the one before, as most examples have it."""

    def save(self, folder: Path, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(state_of(step), checkpoint_id=folder / "dcp", no_dist=True)

    def load(self, folder: Path) -> State:
        import torch.distributed.checkpoint as dcp

        found = empty()
        dcp.load(found, checkpoint_id=folder / "dcp", no_dist=True)
        return found


class DcpAsync(Dcp):
    def save(self, folder: Path, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.saving = dcp.async_save(state_of(step), checkpoint_id=folder / "dcp", no_dist=True)

    def finish(self) -> None:
        self.saving.result()


class Torchsnapshot:
    """One folder, over the one before."""

    def save(self, folder: Path, step: int) -> None:
        from torchsnapshot import Snapshot, StateDict

        Snapshot.take(str(folder / "snapshot"), {"state": StateDict(**state_of(step))})

    def load(self, folder: Path) -> State:
        from torchsnapshot import Snapshot, StateDict

        found = StateDict(**empty())
        Snapshot(str(folder / "snapshot")).restore({"state": found})
        return dict(found)


class Orbax:
    """Its CheckpointManager, of JAX."""

    def _manager(self, folder: Path) -> Any:
        import orbax.checkpoint as ocp

        return ocp.CheckpointManager((folder / "orbax").absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2))

    def save(self, folder: Path, step: int) -> None:
        import orbax.checkpoint as ocp

        self.manager = self._manager(folder)
        tree = {name: tensor.numpy() for name, tensor in state_of(step).items()}
        self.manager.save(step, args=ocp.args.StandardSave(tree))

    def finish(self) -> None:
        self.manager.wait_until_finished()

    def load(self, folder: Path) -> State:
        import orbax.checkpoint as ocp

        manager = self._manager(folder)
        tree = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore())
        return {name: torch.tensor(array) for name, array in tree.items()}


class Everstep:
    """One step of a guarded loop; an inline keeper, so that nothing outlives the process but what it left behind."""

    def _guarded(self, folder: Path, step: int) -> tuple[nn.Module, Any, Any]:
        import everstep

        model = nn.Module()
        for name, tensor in (state_of(step) if step else empty()).items():
            model.register_parameter(name, nn.Parameter(tensor))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return model, optimizer, everstep.guard(model, optimizer, dir=folder / "run", tiers=[everstep.Disk(every=1)])

    def save(self, folder: Path, step: int) -> None:
        model, optimizer, self.run = self._guarded(folder, step)
        with torch.no_grad():
            for name, tensor in state_of(step).items():
                model.get_parameter(name).copy_(tensor)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        self.run.done()
        self.run.wait("sealed")

    def finish(self) -> None:
        self.run.wait("durable")

    def load(self, folder: Path) -> State:
        import everstep

        found = everstep.open(folder / "run").load()
        return {name.removeprefix("model."): value for name, value in found.items() if name.startswith("model.")}


PEERS: dict[str, Callable[[], Any]] = {
    "torch.save": TorchSave, "safetensors": Safetensors, "DCP save": Dcp, "DCP async_save": DcpAsync,
    "torchsnapshot": Torchsnapshot, "Orbax": Orbax, "Everstep": Everstep,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("what", choices=("save", "load"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("step", type=int, nargs="?", default=0)
    parser.add_argument("--die-after", type=float, default=None, help="seconds after save() was called")
    parser.add_argument("--die-at-return", action="store_true", help="of save(), whatever is still in flight")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    peer = PEERS[given.peer]()
    if given.what == "save":
        state_of(given.step)
        began = time.monotonic()
        if given.die_after is not None:
            threading.Timer(given.die_after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        peer.save(given.folder, given.step)
        returned = time.monotonic() - began
        if given.die_at_return:
            os.kill(os.getpid(), signal.SIGKILL)
        if hasattr(peer, "finish"):
            peer.finish()
        print(f"saved {returned:.4f} {time.monotonic() - began:.4f}", flush=True)
        os._exit(0)
    try:
        found = peer.load(given.folder)
        steps = [step for step in (1, 2, 3) if all(torch.equal(found[k], v) for k, v in state_of(step).items())]
        print(f"step {steps[0]}" if steps else "mixed", flush=True)
    except BaseException as error:
        print(f"refused {type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}", flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
