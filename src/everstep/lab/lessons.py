"""What virtual workers learn: three small models, and data that are made up but can be learnt.

A batch is a function of (seed, step), so a step that is done again sees the same samples. The gradients of all workers
are computed at once, each with the weights that this worker has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional

_CLASSES, _SIDE, _WAYS, _NOISE = 10, 28, 3, 4.0  # of images; each class has so many ways to look
_SYMBOLS, _CONTEXT, _WIDTH, _HEADS = 24, 16, 32, 2  # of sequences
_EXAM, _WORLD = 1 << 40, (1 << 40) + 1  # steps that no training comes to: what is examined is nowhere trained on

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    model: Callable[[], nn.Sequential]
    data: Callable[[torch.Generator], Callable[[int, torch.Generator], Batch]]  # what is to be learnt; samples of it
    rate: float
    exam: int  # samples


@contextmanager
def one_thread() -> Iterator[None]:
    """So that sums are made in the same order on any number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Lesson:
    def __init__(self, kind: str, *, workers: int, samples: int, seed: int) -> None:
        """`samples`: of each worker in a step."""
        chosen = _KINDS[kind]
        self.rate, self.momentum = chosen.rate, 0.9
        self._shape, self._seed = (workers, samples), seed
        self._data = chosen.data(self._generator(_WORLD))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model = chosen.model()
        self._places, self.layers = _places(self._model)
        self._all = vmap(grad_and_value(self._loss))
        self._exam = self._data(chosen.exam, self._generator(_EXAM))

    def start(self) -> Tensor:
        """All weights, one after the other."""
        return torch.cat([parameter.detach().flatten() for parameter in self._model.parameters()])

    def gradients(self, weights: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Of each worker for its samples of a step, and its loss. `weights`: a row for each worker."""
        workers, samples = self._shape
        inputs, targets = self._data(workers * samples, self._generator(step))
        gradients, losses = self._all(weights, *(one.unflatten(0, self._shape) for one in (inputs, targets)))
        return gradients, losses

    def examine(self, weights: Tensor) -> tuple[float, float]:
        """Loss and accuracy for samples that nobody has trained on."""
        inputs, targets = self._exam
        with torch.no_grad():
            answers = self._answers(weights, inputs)
            loss = functional.cross_entropy(answers, targets.flatten())
            right = (answers.argmax(-1) == targets.flatten()).float().mean()
        return float(loss), float(right)

    def _generator(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed * (1 << 41) + step)

    def _loss(self, weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self._answers(weights, inputs), targets.flatten())

    def _answers(self, weights: Tensor, inputs: Tensor) -> Tensor:
        named = {name: weights[begin:end].view(shape) for name, begin, end, shape in self._places}
        answers: Tensor = functional_call(self._model, named, (inputs,))
        return answers.flatten(0, -2)


def _places(model: nn.Sequential) -> tuple[list[tuple[str, int, int, torch.Size]], list[slice]]:
    """Where each parameter lies in the row of weights; where each layer does, in the order in which gradients come."""
    places, layers, at = [], [], 0
    for layer, child in model.named_children():
        begin = at
        for name, parameter in child.named_parameters():
            places.append((f"{layer}.{name}", at, at + prod(parameter.shape), parameter.shape))
            at += prod(parameter.shape)
        if at > begin:
            layers.append(slice(begin, at))
    return places, layers[::-1]


# -- models


def _mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(_SIDE * _SIDE, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, _CLASSES)
    )


def _cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, _CLASSES),
    )  # fmt: skip


def _gpt() -> nn.Sequential:
    head = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _SYMBOLS))
    return nn.Sequential(_Embedding(), _Block(), _Block(), head)


class _Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(_SYMBOLS, _WIDTH), nn.Embedding(_CONTEXT, _WIDTH)

    def forward(self, symbols: Tensor) -> Tensor:
        embedded: Tensor = self.symbol(symbols) + self.place(torch.arange(_CONTEXT))
        return embedded


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend, self.project = (
            nn.LayerNorm(_WIDTH),
            nn.Linear(_WIDTH, 3 * _WIDTH),
            nn.Linear(_WIDTH, _WIDTH),
        )
        self.think = nn.Sequential(
            nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
        )
        self.register_buffer("future", torch.ones(_CONTEXT, _CONTEXT).triu(1).bool())

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attend(self.norm(x)).unflatten(-1, (3, _HEADS, -1))
        query, key, value = (parts.select(-3, i).transpose(-3, -2) for i in range(3))
        scores = (query @ key.transpose(-2, -1) / sqrt(_WIDTH / _HEADS)).masked_fill(self.future, float("-inf"))
        x = x + self.project((scores.softmax(-1) @ value).transpose(-3, -2).flatten(-2))
        thought: Tensor = x + self.think(x)
        return thought


# -- data


def _images(world: torch.Generator) -> Callable[[int, torch.Generator], Batch]:
    """Each class looks in one of several ways, under much noise."""
    shapes = torch.randn(_CLASSES * _WAYS, 1, 7, 7, generator=world)
    looks = functional.interpolate(shapes, _SIDE, mode="bilinear")

    def draw(count: int, generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(looks), (count,), generator=generator)
        return looks[chosen] + _NOISE * torch.randn(count, 1, _SIDE, _SIDE, generator=generator), chosen % _CLASSES

    return draw


def _sequences(world: torch.Generator) -> Callable[[int, torch.Generator], Batch]:
    """What follows a symbol depends on it, and is a matter of chance."""
    strength = torch.randn(_SYMBOLS, _SYMBOLS, generator=world)
    chances = (3.0 * strength).softmax(-1)

    def draw(count: int, generator: torch.Generator) -> Batch:
        found = [torch.randint(_SYMBOLS, (count,), generator=generator)]
        for _ in range(_CONTEXT):
            found.append(torch.multinomial(chances[found[-1]], 1, generator=generator).squeeze(1))
        symbols = torch.stack(found, 1)
        return symbols[:, :-1], symbols[:, 1:]

    return draw


_KINDS = {
    "mlp": _Kind(model=_mlp, data=_images, rate=0.02, exam=1000),
    "cnn": _Kind(model=_cnn, data=_images, rate=0.02, exam=1000),
    "gpt": _Kind(model=_gpt, data=_sequences, rate=0.1, exam=250),
}
