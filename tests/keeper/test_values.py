"""What is too large for every record follows the records to the disk, however fast the loop is."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import everstep

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import forget_memory, live, must_finish, run_directory, train_tiny

STEPS = 100


def compressed(directory: Path, **options: Any) -> dict[str, Any]:
    return train_tiny(
        directory, steps=STEPS, strategy="log", keeper="process", compress=everstep.compress.TopK(0.2), **options
    )


def test_a_loop_that_never_waits_gets_steps_that_can_be_stopped_at() -> None:
    with run_directory() as one, run_directory() as two:
        whole = must_finish(lambda: train_tiny(one, steps=STEPS, compress=everstep.compress.TopK(0.2)))
        seen: list[int] = []

        def leave_late(run: everstep.Run) -> None:
            time.sleep(0.03)
            seen.append(int(run.status()["durable_step"] or 0))  # type: ignore[call-overload]
            if run.step == STEPS - 20:
                assert len(set(seen)) > 5, f"durable only at {sorted(set(seen))}"
                raise SystemExit(9)

        assert live(lambda: compressed(two, at_step=leave_late)).code == 9
        forget_memory(two)
        resumed = must_finish(lambda: compressed(two))
        assert resumed["resumed_from"] is not None
        assert resumed["digest"] == whole["digest"]
