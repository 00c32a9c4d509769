"""With another number of ranks the state is the same and no sample is lost or seen twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import SEED, Kill, Lines, Stage

Make = Callable[..., Stage]
SAMPLES = 50
PER_RANK = 2


def plain(lines: Lines) -> Lines:
    return {name.replace(".module.", "."): line for name, line in lines.items()}


def seen(stage: Stage, worlds: list[int]) -> dict[int, Counter[int]]:
    """The samples of each epoch that count: those of steps which no later life did again."""
    epochs: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}
    began = [stage.read("began", 0, number)["resumed_from"] or 0 for number in range(1, len(worlds) + 1)]
    for number, world in enumerate(worlds, 1):
        until = began[number] if number < len(worlds) else 10**9
        for rank in range(world):
            for line in Path(stage.directory / f"seen-life-{number}-rank-{rank}").read_text().splitlines():
                step, epoch, indices = json.loads(line)
                if step < until:
                    epochs[epoch].update(indices)
    return epochs


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("any_number_of_ranks", "snapshot"),
        ("any_number_of_ranks", "log"),
        ("any_number_of_ranks_with_a_stateful_loader", "snapshot"),
    ],
)
@pytest.mark.parametrize(
    "worlds",
    [
        *([2, 1], [1, 2], [2, 3, 2], [3, 1, 3]),
        *(pytest.param(few, marks=pytest.mark.soak) for few in ([2, 3], [2, 1, 2])),
    ],
    ids=str,
)
def test_state_and_data_go_on_with_another_number_of_ranks(
    worlds: list[int], name: str, strategy: str, stage: Make
) -> None:
    check(worlds, name, strategy, stage)


@pytest.mark.parametrize(
    ("worlds", "strategy"),
    [
        ([2, 1], "snapshot"),
        *(pytest.param(few, "log", marks=pytest.mark.soak) for few in ([2, 3, 2], [1, 2], [2, 4, 2])),
    ],
    ids=str,
)
def test_so_do_streams(worlds: list[int], strategy: str, stage: Make) -> None:
    check(worlds, "any_number_of_ranks_over_a_stream", strategy, stage)


def check(worlds: list[int], name: str, strategy: str, stage: Make) -> None:
    again = stage(name, strategy=strategy)
    done = 0
    for number, world in enumerate(worlds, 1):
        last = number == len(worlds)
        kill = None if last else Kill(done + 4, "forward", rank=world - 1)
        codes = again.live_once(world=world, kill=kill, seed=SEED + number)
        assert codes == [0] * world if last else codes[-1] == -9, again.errors()
        if number > 1:
            resumed_from = again.read("began")["resumed_from"]
            assert resumed_from >= done - 2
            before = plain(again.read(f"state-{resumed_from}", 0, number - 1))
            for rank in range(world):
                assert plain(again.read("began", rank)["state"]) == before
        if not last:
            done = again.read("killed", world - 1)
    for samples in seen(again, worlds).values():
        assert set(samples) == set(range(SAMPLES))
        padding = sum(samples.values()) - SAMPLES
        assert padding < max(worlds), f"{padding} samples were seen twice: {samples.most_common(5)}"
    assert again.left_in_memory() == []
