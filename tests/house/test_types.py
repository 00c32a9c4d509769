"""Types that msgspec has looked at before threads could do so at once, which ends the process."""

from __future__ import annotations

import subprocess
import sys

_THREADS_AT_ONCE = """
import sys, threading
import msgspec
import everstep.types as types
sys.setswitchinterval(1e-6)
kinds = [kind for kind in vars(types).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
barrier = threading.Barrier(8)
def decode():
    barrier.wait()
    for kind in kinds:
        try:
            msgspec.json.decode(b'{"step": 1, "rank": 2, "world": 4}', type=kind)
        except msgspec.ValidationError:
            continue
threads = [threading.Thread(target=decode) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_threads_that_decode_for_the_first_time_at_once_do_not_end_the_process() -> None:
    """Without `learnt` one in forty of these crashes: seldom enough to be missed, too often for a keeper."""
    for _ in range(4):
        assert subprocess.run([sys.executable, "-c", _THREADS_AT_ONCE], check=False).returncode == 0
