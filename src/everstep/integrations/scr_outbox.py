"""Files on their way to the prefix as they are: what an output is for. A thread brings them, and nobody waits.

A box is a folder of the node's cache: the files of one rank for one dataset, and a list of them, written last. It goes
when all are there under their own names, each made with a temporary name, fsynced and renamed; so a box that a crash
left is brought by the next life. A failure is an event, is tried again, and is said to whoever finalizes.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash

from everstep.errors import EverstepError
from everstep.events import Degraded, Sink

_LIST = "list.json"
_TRIES = 3
_COPY_BYTES = 4 << 20


class _Box(msgspec.Struct, kw_only=True):
    name: str
    files: dict[str, str]  # where it is in the box -> what it is called, from the prefix


class Outbox:
    def __init__(self, root: Path, prefix: Path, emit: Sink) -> None:
        self._root, self._prefix, self._emit = root, prefix, emit
        self._errands: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self.failed: list[str] = []  # datasets that are not there, and lie in the cache

    def post(self, name: str, files: dict[str, Path]) -> None:
        """Take a rank's files over; they are gone from where they were when this returns."""
        box = self._root / uuid.uuid4().hex
        box.mkdir(parents=True)
        named = {}
        for number, (key, path) in enumerate(files.items()):
            os.rename(path, box / f"{number}")
            named[f"{number}"] = key
        temporary = box / f".{_LIST}"
        temporary.write_bytes(msgspec.json.encode(_Box(name=name, files=named)))
        os.replace(temporary, box / _LIST)
        self.run(lambda: self._bring(box))

    def bring_leftovers(self) -> None:
        """What lives before this one left on this node; a box without its list was not posted."""
        for box in sorted(self._root.glob("*")):
            if (box / _LIST).is_file():
                self.run(lambda box=box: self._bring(box))  # type: ignore[misc]
            else:
                shutil.rmtree(box, ignore_errors=True)

    def run(self, errand: Callable[[], None]) -> None:
        """Have something done after all that was asked before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="everstep-outbox", daemon=True)
            self._thread.start()
        self._errands.put(errand)

    def wait(self) -> bool:
        """Until all was tried; whether all is there."""
        self._errands.join()
        return not self.failed

    def close(self) -> None:
        if self._thread is not None:
            self._errands.put(None)
            self._thread.join()

    # -- the thread

    def _work(self) -> None:
        while (errand := self._errands.get()) is not None:
            try:
                errand()
            except Exception as error:  # whatever it is, the next one is not kept waiting by it
                self._emit(Degraded(what="something is not on the prefix", reason=str(error)))
            finally:
                self._errands.task_done()
        self._errands.task_done()

    def _bring(self, box: Path) -> None:
        posted = msgspec.json.decode((box / _LIST).read_bytes(), type=_Box)
        for attempt in range(_TRIES):
            try:
                for inside, key in posted.files.items():
                    if (box / inside).exists():
                        _publish(box / inside, self._prefix / key)
                shutil.rmtree(box)
                return
            except (OSError, EverstepError) as error:
                self._emit(Degraded(what=f"output {posted.name} is not on the prefix yet", reason=str(error)))
                time.sleep(0.25 * 2**attempt)
        self.failed.append(posted.name)


def _publish(source: Path, target: Path) -> None:
    """Copy a file, read back what arrived and compare; then give it its name, and let the source go."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}-{uuid.uuid4().hex[:8]}")
    try:
        with open(source, "rb") as reading, open(temporary, "xb") as writing:
            shutil.copyfileobj(reading, writing, _COPY_BYTES)
            writing.flush()
            os.fsync(writing.fileno())
        if _digest(temporary) != _digest(source):
            raise EverstepError(f"{target.parent} does not give back what it was given; is it sound?")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    source.unlink()


def _digest(path: Path) -> bytes:
    total = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while data := file.read(_COPY_BYTES):
            total.update(data)
    return total.digest()
