"""What choosing the largest gradients costs on one CUDA device: tensor by tensor, by DDP's buckets, and all at once.

    python bench/compress.py [--quick] [--ratio 0.01] [--out DIR]

Gradients have the shapes of GPT-2 124M and BERT-large, with random values of differing size. All ways do the same
work: add the residual, choose exactly, keep what is left over, and leave the gradient as the optimizer will see it.
The ways take turns in one process, so every ratio comes from one run. One process: nothing is sent.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import MB, Report, Stat, Table, Target, machine, timed
from torch import Tensor

from everstep.capture.compress import Bf16, Compressor, Int8, TopK

HERE = Path(__file__).parent
BUCKET_BYTES = 25 * 2**20  # DDP's own
PER_TENSOR, BUCKETS, FLAT = "torch.topk per tensor", "TopK, 25 MB buckets", "TopK, one flat buffer"
Way = Callable[[], None]


def gpt2() -> list[tuple[int, ...]]:
    wide = 768
    layer = [(wide,), (wide,), (wide, 3 * wide), (3 * wide,), (wide, wide), (wide,)]
    layer += [(wide,), (wide,), (wide, 4 * wide), (4 * wide,), (4 * wide, wide), (wide,)]
    return [(50257, wide), (1024, wide), *layer * 12, (wide,), (wide,)]


def bert_large() -> list[tuple[int, ...]]:
    wide = 1024
    layer = [(wide, wide), (wide,)] * 4 + [(wide,), (wide,)]
    layer += [(4 * wide, wide), (4 * wide,), (wide, 4 * wide), (wide,), (wide,), (wide,)]
    head = [(wide, wide), (wide,), (wide,), (wide,), (30522,)]
    return [(30522, wide), (512, wide), (2, wide), (wide,), (wide,), *layer * 24, *head]


MODELS = {"GPT-2 124M": gpt2, "BERT-large": bert_large}


def made_up(shapes: Sequence[tuple[int, ...]]) -> Tensor:
    """All gradients side by side; tensors differ in size by a factor of a thousand, as those of real layers do."""
    torch.manual_seed(0)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    scales = 10 ** (3 * torch.rand(len(sizes)) - 3)
    parts = [torch.randn(size, device="cuda") * scale for size, scale in zip(sizes, scales.tolist(), strict=True)]
    return torch.cat(parts)


def tensor_by_tensor(tensors: Sequence[Tensor], ratio: float) -> Way:
    """The usual way: a small top-k for every tensor, each with a residual of its own."""
    residuals = [torch.zeros_like(tensor) for tensor in tensors]

    def compress() -> None:
        for tensor, residual in zip(tensors, residuals, strict=True):
            residual.add_(tensor)
            k = max(1, round(ratio * residual.numel()))
            chosen = torch.topk(residual.abs(), k, sorted=False).indices
            values = residual[chosen]
            residual[chosen] = 0
            tensor.zero_()
            tensor[chosen] = values

    return compress


def by_buffer(buffers: Sequence[Tensor], compressor: Compressor) -> Way:
    def compress() -> None:
        for number, buffer in enumerate(buffers):
            compressor.reduce(buffer, str(number), None)

    return compress


def buckets(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Whole tensors side by side, up to DDP's size; the last layers first."""
    cuts, held = [0], 0
    for size in reversed(sizes):
        if held and (held + size) * flat.element_size() > BUCKET_BYTES:
            cuts.append(held)
            held = 0
        held += size
    return list(flat.split([*cuts[1:], held]))


def measure(shapes: Sequence[tuple[int, ...]], ratio: float, rounds: int) -> tuple[dict[str, Stat], dict[str, int]]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    source = made_up(shapes)
    flat = torch.empty_like(source)
    pieces = buckets(flat, sizes)
    ways = {
        PER_TENSOR: tensor_by_tensor(flat.split(sizes), ratio),
        BUCKETS: by_buffer(pieces, TopK(ratio)),
        FLAT: by_buffer([flat], TopK(ratio)),
        "Int8, 25 MB buckets": by_buffer(pieces, Int8()),
        "Bf16, 25 MB buckets": by_buffer(pieces, Bf16()),
    }
    found = {name: Stat() for name in ways}
    for turn in range(rounds + 3):  # the first ones fill torch's cache of memory
        for name, way in ways.items():
            flat.copy_(source)
            torch.cuda.synchronize()
            with timed() as timer:
                way()
                torch.cuda.synchronize()
            if turn >= 3:
                found[name].values.append(timer.seconds)
    return found, {"tensors": len(sizes), "elements": sum(sizes), "buckets": len(pieces)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--ratio", type=float, default=0.01, help="the part of the elements that is kept")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/compress.py needs a CUDA device, and torch sees none here.")
    command = f"python bench/compress.py{' --quick' if given.quick else ''} --ratio {given.ratio}"
    report = Report(title="Compressors on one GPU", command=command, machine=machine())
    data: dict[str, Any] = {}
    for model, shapes in MODELS.items():
        found, facts = measure(shapes(), given.ratio, 5 if given.quick else 30)
        base = found[PER_TENSOR].median
        title = (
            f"{model}: {facts['tensors']} tensors, {4 * facts['elements'] / MB:.0f} MB fp32, {facts['buckets']} buckets"
        )
        rows = [[name, stat.text(1e3), f"{stat.median / base:.2f}"] for name, stat in found.items()]
        report.tables.append(Table(title, ["way", "ms, median (range)", "of per tensor"], rows))
        for name in (BUCKETS, FLAT):
            part = found[name].median / base
            report.targets.append(Target(f"{model}: {name}, of per tensor", "<= 0.5", f"{part:.2f}", part <= 0.5))
        data[model] = facts | {name: stat.values for name, stat in found.items()}
    report.data = data
    report.save(given.out, "compress")
    print(report.markdown())


if __name__ == "__main__":
    main()
