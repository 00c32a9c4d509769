"""Whether a killed run ends with the same bits on a CUDA device. The door is bench/gpu.py exact."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_models
import torch
from common import Report, Table, Target
from torch import Tensor, nn

import everstep

STEPS, KILLED_IN = 20, 13


class Examples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, vision: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        shape, count = ((3, 224, 224), 64) if vision else ((64,), 256)
        self.inputs = (
            torch.randn(count, *shape, generator=generator)
            if vision
            else torch.randint(0, 1000, (count, *shape), generator=generator)
        )
        self.labels = torch.randint(0, 1000, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


def _small(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Small enough for seconds; dropout is on, so that random state counts."""
    if name in ("gpt2", "bert"):
        import transformers

        config: Any
        if name == "gpt2":
            config = transformers.GPT2Config(
                vocab_size=1000, n_embd=256, n_layer=4, n_head=4, n_positions=64, use_cache=False
            )
            config._attn_implementation = "eager"
            model: nn.Module = transformers.GPT2LMHeadModel(config)
        else:
            config = transformers.BertConfig(
                vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
            )
            config._attn_implementation = "eager"
            model = transformers.BertForMaskedLM(config)
        model = model.to(gpu_models.DEVICE).train()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=name == "bert")
    import torchvision.models as vision

    model = vision.resnet18() if name == "resnet18" else vision.alexnet()
    if name == "alexnet":
        model.avgpool = nn.Identity()  # it pools 6 x 6 to 6 x 6, with a backward that has no deterministic form
    model = model.to(gpu_models.DEVICE).train()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


EXACT = ("resnet18", "alexnet", "gpt2", "bert")


def exact_child(name: str, directory: Path, kill: bool) -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.manual_seed(0)
    model, optimizer = _small(name)
    vision = name in ("resnet18", "alexnet")
    loader = torch.utils.data.DataLoader(
        Examples(vision), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(2)
    )
    run = everstep.guard(model, optimizer, loader, dir=directory, steps=STEPS, epochs=None, linger="30s")
    losses = {}
    for inputs, labels in run:
        inputs, labels = inputs.to(gpu_models.DEVICE), labels.to(gpu_models.DEVICE)
        with torch.autocast(gpu_models.DEVICE, torch.bfloat16):
            loss = (
                nn.functional.cross_entropy(model(inputs), labels)
                if vision
                else model(input_ids=inputs, labels=inputs).loss
            )
        loss.backward()
        if kill and run.step == KILLED_IN - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        losses[run.step + 1] = loss.item().hex()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print("result " + json.dumps({"from": run.resumed_from, "losses": losses, "digest": _digest(model, optimizer)}))


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    total = hashlib.sha256()
    state = [*model.state_dict().items()]
    state += [(key, value) for p in model.parameters() for key, value in sorted(optimizer.state[p].items())]
    for key, value in state:
        total.update(key.encode())
        if isinstance(value, Tensor):
            total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _start(name: str, directory: Path, *, kill: bool) -> subprocess.Popen[str]:
    arguments = ["exact", "--exact-child", name, "--scratch", str(directory), "--device", gpu_models.DEVICE]
    arguments += ["--kill"] if kill else []
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("gpu.py")), *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _answer(child: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = child.communicate(timeout=240)
    lines = [line.removeprefix("result ") for line in out.splitlines() if line.startswith("result ")]
    return json.loads(lines[0]) if lines else {"code": child.returncode, "error": err.strip()[-1500:]}


def bench_exact(names: list[str], scratch: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """All models at once: the uninterrupted run beside the one that is killed, then the one that goes on."""
    whole = {name: _start(name, scratch / f"{name}-whole", kill=False) for name in names}
    killed = {name: _start(name, scratch / f"{name}-cut", kill=True) for name in names}
    deaths = {name: _answer(child) for name, child in killed.items()}
    resumed = {name: _start(name, scratch / f"{name}-cut", kill=False) for name in names}
    for name in names:
        a, b = _answer(whole[name]), _answer(resumed[name])
        entry = {"whole": a, "resumed": b, "died": deaths[name].get("code") == -signal.SIGKILL}
        entry["exact"] = (
            entry["died"] and "error" not in a and "error" not in b
            and b["from"] in (KILLED_IN - 2, KILLED_IN - 1)
            and a["digest"] == b["digest"]
            and all(a["losses"][step] == loss for step, loss in b["losses"].items())
        )  # fmt: skip
        problem = "" if entry["exact"] else json.dumps([a, b, deaths[name]])[:3000]
        print(
            f"{name:10} resumed from {b.get('from')}: {'the same bits' if entry['exact'] else 'NOT EXACT'} {problem}",
            flush=True,
        )
        yield name, entry


def exact_report(report: Report, models: dict[str, Any]) -> None:
    found = {name: entry for name, entry in models.items() if "exact" in entry}
    rows = [
        [
            name,
            f"in step {KILLED_IN}",
            str(entry["resumed"].get("from")),
            "the same bits" if entry["exact"] else "not exact",
        ]
        for name, entry in found.items()
    ]
    note = (
        f"{STEPS} steps, dropout and shuffled data, SIGKILL after a backward pass; weights, optimizer state and losses."
    )
    report.tables.append(
        Table("Killed and resumed", ["model", "killed", "resumed from", "against the uninterrupted run"], rows, note)
    )
    report.targets += [
        Target(f"{name} after kill -9", "the same bits", row[3], row[3] == "the same bits")
        for name, row in zip(found, rows, strict=True)
    ]
