"""The garbage collector waits while a checkpoint is viewed and applied, and no longer."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from everstep.errors import Damaged
from everstep.recover import assemble
from everstep.recover.needs import Needs


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    gc.enable() if was_on else gc.disable()


@pytest.mark.parametrize("is_on", [True, False])
def test_it_is_as_it_was_after_an_error(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile = []

    def uncovered(_: object) -> str:
        meanwhile.append(gc.isenabled())
        return "half of it"

    monkeypatch.setattr(assemble, "uncovered", uncovered)
    gc.enable() if is_on else gc.disable()
    with pytest.raises(Damaged, match="half of it"):
        assemble.view({}, 1, Needs(None, 0, 1))
    assert meanwhile == [False]
    assert gc.isenabled() is is_on
