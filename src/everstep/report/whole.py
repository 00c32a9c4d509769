"""A file that is there as a whole or not at all, also for somebody who presses Ctrl-C while it is written."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from everstep.errors import TierFailed


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex[:12]}-{path.name}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            yield file
        os.replace(temporary, path)
    except OSError as error:
        if error.filename not in (None, str(temporary)):
            raise  # of another file
        refused = f"it cannot be written: {error.strerror}; make room, or name another file"
        raise TierFailed(error.errno, refused, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)
