"""guard() in a notebook: a real kernel, whose cells fail, are interrupted, left and run again, and which is killed."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lives import end_keeper, forget_memory

import everstep
from everstep.keeper.process import environment

why = "pip install ipykernel (or everstep[dev]): cells are run by a real kernel"
pytest.importorskip("ipykernel", reason=why)
manager = pytest.importorskip("jupyter_client.manager", reason=why)
kernelspec = pytest.importorskip("jupyter_client.kernelspec", reason=why)

MODEL = """
import os, time
import torch
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
import everstep

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters())
data = TensorDataset(torch.randn(80, 4), torch.randn(80, 1))
loader = DataLoader(data, batch_size=4, shuffle=True)
losses = []
"""
LOOP = """
run = everstep.guard(model, optimizer, loader, dir={directory!r}, extra={{"losses": losses}})
print("goes on from", run.resumed_from)
for x, y in run:
    loss = (model(x) - y).square().mean()
    loss.backward()
    if run.step == 4 and {act!r} == "fail":
        raise ValueError("a slip of the pen")
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if run.step == 8 and {act!r} == "wait":
        Path({directory!r}, "waits").touch()
        while not Path({directory!r}, "goes").exists():
            time.sleep(0.005)
    if run.step == 11 and {act!r} == "leave":
        break
    if run.step == 14 and {act!r} == "die":
        os.kill(os.getpid(), 9)
"""
RESULT = """
print(run.step, losses, [p.tolist() for p in model.parameters()], torch.rand(1).item())
"""


class Notebook:
    """A kernel, and what its cells print."""

    def __init__(self) -> None:
        self._kernel: Any = None
        self.restart()

    def restart(self) -> None:
        self.close()
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self._kernel = manager.KernelManager()
        self._kernel._kernel_spec = kernelspec.KernelSpec(argv=argv, display_name="Python", language="python")
        self._kernel.start_kernel(env=environment())
        self._client = self._kernel.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(60)

    def interrupt(self) -> None:
        self._kernel.interrupt_kernel()

    def run(self, cell: str) -> str:
        """What it says, with the error that ends it; "dead" if the kernel has died in it."""
        said: list[str] = []
        asked, deadline = self._client.execute(cell), time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                message = self._client.get_iopub_msg(timeout=0.2)
            except queue.Empty:
                if self._kernel.is_alive():
                    continue
                return "".join([*said, "dead"])
            content, kind = message["content"], message["msg_type"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            if kind == "stream":
                said.append(content["text"])
            elif kind == "error":
                said.append(f"{content['ename']}: {content['evalue']}\n")
            elif kind == "status" and content["execution_state"] == "idle":
                return "".join(said)
        raise AssertionError(f"a cell did not end: {said}")

    def close(self) -> None:
        if self._kernel is not None:
            self._client.stop_channels()
            self._kernel.shutdown_kernel(now=True)


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    made = Notebook()
    yield made
    made.close()


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Callable[..., str]]:
    yield lambda name, act="": LOOP.format(directory=str(tmp_path / name), act=act)
    for record in tmp_path.rglob("run.json"):
        end_keeper(record.parent)
        forget_memory(record.parent)


@pytest.mark.soak
def test_cells_that_break_off_in_every_way_end_with_the_same_bits(
    notebook: Notebook, loop: Callable[..., str], tmp_path: Path
) -> None:
    assert "goes on from None" in notebook.run(MODEL + loop("whole"))
    whole = notebook.run(RESULT)
    assert whole.startswith("20 [")
    notebook.run(MODEL)
    left = f"the run in {tmp_path / 'run'} was left in the middle; guard() goes on from its last step"
    said = notebook.run(loop("run", "fail"))  # in the middle of a step, with its gradients
    assert "a slip of the pen" in said and left in said
    began = time.monotonic()
    interrupting = threading.Timer(0.2, notebook.interrupt)
    interrupting.start()
    assert "KeyboardInterrupt" in notebook.run("time.sleep(20)")  # keys mean again what they meant before
    assert time.monotonic() - began < 10

    def interrupt_when_it_waits() -> None:
        while not (tmp_path / "run/waits").exists():
            time.sleep(0.01)
        notebook.interrupt()
        time.sleep(0.2)
        (tmp_path / "run/goes").touch()

    interrupting = threading.Timer(0, interrupt_when_it_waits)
    interrupting.start()
    said = notebook.run(loop("run", "wait"))
    assert "goes on from 4" in said and "finishing the step, then saving and leaving" in said
    assert "KeyboardInterrupt" in said and "RunHeld" not in said
    said = notebook.run(loop("run", "leave"))
    assert "goes on from 9" in said and left not in said
    assert left in (said := notebook.run(loop("run", "die"))) and said.endswith("dead")  # of the cell that was left
    notebook.restart()
    narrow = MODEL.replace("16", "8")
    assert "Mismatch: " in notebook.run(narrow + loop("run"))  # a cell that is refused is in nobody's way
    said = notebook.run(MODEL + loop("run"))
    assert "goes on from 14" in said or "goes on from 15" in said, said
    assert notebook.run(RESULT) == whole
    assert everstep.open(tmp_path / "run").latest() == 20
