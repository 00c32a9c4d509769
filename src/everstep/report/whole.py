"""A file that is there as a whole or not at all, also for somebody who presses Ctrl-C while it is written."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex[:12]}-{path.name}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
