"""The comparison of turnstiles: what it changes in Everstep is put back, and its tables say what was seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def turnstiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_turnstiles

    return gpu_turnstiles


def test_whatever_happens_the_own_turnstiles_stand_again(turnstiles: Any) -> None:
    from everstep.capture import buckets, shape

    before = shape.PASSING_BYTES, shape.Lane.copy, buckets.PASSING_BYTES
    for one in turnstiles.TURNSTILES:
        with pytest.raises(RuntimeError), turnstiles.standing(one), turnstiles.small_pieces():
            assert (one.after_bytes or 1 << 62) == shape.PASSING_BYTES
            assert (shape.Lane.copy is before[1]) == (one.what == turnstiles.WORD)
            assert buckets.PASSING_BYTES == 16 << 20
            raise RuntimeError
    assert (shape.PASSING_BYTES, shape.Lane.copy, buckets.PASSING_BYTES) == before


@pytest.mark.parametrize("sizes", [[], [5], [10], [4, 4, 4, 4, 4], [30, 1], [1] * 25], ids=str)
def test_a_kernel_stands_where_a_word_would(turnstiles: Any, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from everstep.capture.shape import Lane

    queued: list[tuple[int, bool]] = []  # what was copied, and whether it was a turnstile
    word = torch.zeros(1)
    lane = Lane(stream=cast(Any, None), cut=cast(Any, None), end=cast(Any, None), turnstile=(word, torch.ones(1)))

    def copy(into: list[Tensor], out_of: list[Tensor], **_: object) -> None:
        queued.extend((0, True) if target is word else (id(source), False) for target, source in zip(into, out_of))

    class Counted:
        def add_(self, _: int) -> None:
            queued.append((0, True))

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    sources = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    seen = []
    for what in (turnstiles.WORD, turnstiles.KERNEL):
        lane.turnstile = (word, torch.ones(1)) if what == turnstiles.WORD else cast(Any, (Counted(), None))
        with turnstiles.standing(turnstiles.Turnstile(10, what)):
            lane.copy(sources, sources)
        seen.append(list(queued))
        queued.clear()
    assert seen[0] == seen[1]


def made_up(turnstiles: Any, **changed: Any) -> dict[str, Any]:
    modes = {one.name: {"kept_s": [0.084, 0.088], "plain_s": [0.08, 0.08]} for one in turnstiles.TURNSTILES}
    waits = {one.name: {"waits_s": [0.001, 0.003], "base_s": [0.02, 0.02]} for one in turnstiles.TURNSTILES}
    return {"title": "a model", "waits": waits, "modes": {"Everstep, host": modes}, "errors": {}, **changed}


def test_its_tables_say_what_was_seen(turnstiles: Any) -> None:
    from common import Report

    report = Report("", "", {})
    turnstiles.turnstiles_report(report, {"bert": made_up(turnstiles)})
    waits, host = report.tables
    assert waits.rows[0] == ["none", "2 (1-3)", "20 (20-20)", "53.7 (53.7-53.7)"]
    assert host.rows[3] == ["a word after 32 MB", "80 (80-80)", "86 (84-88)", "7.5 (5-10)"]
    assert "mean nothing" not in host.note


def test_without_a_device_it_says_that_numbers_mean_nothing(turnstiles: Any) -> None:
    from common import Report

    report = Report("", "", {})
    turnstiles.turnstiles_report(report, {"bert": made_up(turnstiles, waits={}, errors={"Everstep, device": "no"})})
    assert "mean nothing" in report.tables[0].note
    assert report.tables[1].rows == [["Everstep, device", "no"]]
