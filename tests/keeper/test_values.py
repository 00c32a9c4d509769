"""What is too large for every record follows the records to the disk, however fast the loop is."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import everstep

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import forget_memory, live, must_finish, run_directory, train_tiny

PATIENCE_S = 60.0


def compressed(directory: Path, steps: int, **options: Any) -> dict[str, Any]:
    return train_tiny(
        directory, steps=steps, strategy="log", keeper="process", compress=everstep.compress.TopK(0.2), **options
    )


def test_a_loop_that_never_waits_gets_steps_that_can_be_stopped_at() -> None:
    with run_directory() as one, run_directory() as two:
        seen: list[int] = []
        began = time.monotonic()

        def leave_late(run: everstep.Run) -> None:
            """As many steps as it takes; on a busy machine the keeper is slow, and the loop is not."""
            time.sleep(0.03)
            seen.append(int(run.status()["durable_step"] or 0))  # type: ignore[call-overload]
            if len(set(seen)) > 5 and run.step >= 80:
                two.with_name("left").write_text(str(run.step))
                raise SystemExit(9)
            assert time.monotonic() < began + PATIENCE_S, f"durable only at {sorted(set(seen))}"

        outcome = live(lambda: compressed(two, 10**6, at_step=leave_late))
        assert outcome.code == 9, outcome.error
        forget_memory(two)
        steps = int(two.with_name("left").read_text()) + 20
        whole = must_finish(lambda: train_tiny(one, steps=steps, compress=everstep.compress.TopK(0.2)))
        resumed = must_finish(lambda: compressed(two, steps))
        assert resumed["resumed_from"] is not None
        assert resumed["digest"] == whole["digest"]
