"""What is trained on a CUDA device: the six models of the LightCheck table, with state near its sizes, and a large one.

Random weights and inputs; nothing is downloaded.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from common import timed
from torch import Tensor, nn

DEVICE = "cuda"  # "cpu": stand-ins, to walk through a bench where no device is


@dataclass
class Case:
    title: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[], Tensor]
    lead: int = 3  # steps at the beginning of a block that nobody times: they fill the queue of the device
    timed: tuple[float, float] = (0.0, 0.0)  # when the last block that was timed began and ended

    def step(self) -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _vision(title: str, model: nn.Module, batch: int, size: int) -> Case:
    model = model.to(DEVICE, memory_format=torch.channels_last).train()
    images = torch.randn(batch, 3, size, size, device=DEVICE).to(memory_format=torch.channels_last)

    def loss() -> Tensor:
        labels = torch.randint(0, 1000, (batch,), device=DEVICE)
        return nn.functional.cross_entropy(model(images), labels)

    return Case(title, model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), loss)


def _language(title: str, model: nn.Module, batch: int, length: int, vocab: int) -> Case:
    model = model.to(DEVICE).train()

    def loss() -> Tensor:
        tokens = torch.randint(0, vocab, (batch, length), device=DEVICE)
        return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]

    title = f"{title}, {batch} x {length}"
    return Case(title, model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), loss)


class Bert(nn.Module):
    """BERT-large by torch's own layers: those of transformers keep the host busier than the device."""

    def __init__(self, vocab: int = 30522, width: int = 1024, layers: int = 24, length: int = 512) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.bias = nn.LayerNorm(width), nn.Parameter(torch.zeros(vocab))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        found = self.norm(self.layers(self.tokens(input_ids) + self.places(places)))
        scores = nn.functional.linear(found, self.tokens.weight, self.bias)
        return SimpleNamespace(loss=nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()))


BATCHES = {"gpt2": (32, 1024), "bert": (16, 512), "gpt2-xl": (8, 1024)}


def _transformer(name: str, batch: int, length: int) -> Case:
    import transformers

    with torch.device(DEVICE):  # weights are made there: on the host that takes long
        if name == "bert":
            return _language("BERT-large, AdamW", Bert(), batch, length, 30522)
        if name == "gpt2":
            gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))
            return _language("GPT-2 124M, AdamW", gpt, batch, length, 50257)
        config = transformers.GPT2Config(use_cache=False, n_embd=1600, n_layer=48, n_head=25)
        return _language("GPT-2 XL 1.6B, AdamW", transformers.GPT2LMHeadModel(config), batch, length, 50257)


def _stand_in(name: str) -> Case:
    from cpu import Gpt

    model = Gpt(vocab=64, width=32, layers=2, heads=2, length=16)

    def loss() -> Tensor:
        tokens = torch.randint(0, 64, (4, 17))
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return Case(f"stand-in for {name}", model, torch.optim.AdamW(model.parameters(), lr=1e-4), loss)


def make_case(name: str, *, light: bool = False) -> Case:
    """`light`: few tokens, where only the state matters."""
    torch.manual_seed(0)
    if DEVICE != "cuda":
        return _stand_in(name)
    if name in BATCHES:
        return _transformer(name, *((1, 64) if light else BATCHES[name]))
    import torchvision.models as vision

    with torch.device(DEVICE):
        match name:
            case "resnet18":
                return _vision("ResNet-18, SGD momentum, 256", vision.resnet18(), 256, 224)
            case "vgg16":
                return _vision("VGG-16, SGD momentum, 128", vision.vgg16(init_weights=False), 128, 224)
            case "inception":
                model = vision.inception_v3(aux_logits=False, init_weights=False)
                return _vision("Inception-V3, SGD momentum, 128", model, 128, 299)
            case "alexnet":
                return _vision("AlexNet, SGD momentum, 1024", vision.alexnet(), 1024, 224)
    raise ValueError(f"no model is called {name}")


CASES = ("resnet18", "vgg16", "inception", "alexnet", "gpt2", "bert", "gpt2-xl")


def link_bytes_s(*, back: bool = False) -> float:
    """Device to pinned host memory, as fast as it goes; or the other way."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    if back:
        source, target = target, source
    rates = []
    for _ in range(4):
        torch.cuda.synchronize()
        with timed() as timer:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
        rates.append(source.nbytes / timer.seconds)
    return max(rates)


def let_go() -> None:
    """Memory that nobody uses any more, of the device and pinned: the next method may need all of it."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()


def sync() -> None:
    """Only the stream of training is waited for: copies to the host are not a part of a step."""
    if DEVICE == "cuda":
        torch.cuda.current_stream().synchronize()
