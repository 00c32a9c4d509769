"""An arena in other hands than those that made it."""

from __future__ import annotations

from pathlib import Path

from everstep.capture.arena import Arena
from everstep.image import FORMAT, lay_out
from everstep.types import ImageInfo


def test_whoever_takes_over_a_damaged_arena_does_not_seal_into_its_damage(tmp_path: Path) -> None:
    run = "ab" * 16
    layout = lay_out([], ImageInfo(format=FORMAT, run=run, rank=0, world=1), 100)
    arena = Arena.create(tmp_path, run=run, rank=0, world=1, layout=layout, slots=2)
    arena.slots[1][20] ^= 1
    successor = Arena.open(Path(arena.place))
    successor.adopt(layout)
    assert [buffer[: len(layout.header)] for buffer in arena.slots] == [layout.header] * 2
    successor.close()
    arena.close()
