"""A thread that copies while the training thread goes on: one for bases, and one for records.

One job at a time, in the order in which they were handed over. What goes wrong in a job is raised in the training
thread, at its next word with the copier.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from everstep.errors import EverstepError


class Copier:
    def __init__(self) -> None:
        self.changed = threading.Condition()  # jobs tell their progress by it
        self._jobs: deque[Callable[[], None]] = deque()
        self._failure: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None  # as soon as there is a job

    def submit(self, job: Callable[[], None]) -> None:
        with self.changed:  # gradients leave a device from whatever threads reduce them, and one thread is to copy
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="everstep-copier", daemon=True)
                self._thread.start()
            self._jobs.append(job)
            self.changed.notify_all()

    def wait(self) -> None:
        """Until every job is over."""
        if self._jobs:
            with self.changed:
                self.changed.wait_for(lambda: not self._jobs)

    def raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise EverstepError(f"capturing failed: {failure}") from failure

    def close(self) -> None:
        """The thread ends after its last job, whether or not anybody waits for that to the end."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs[0]
            try:
                job()
            except BaseException as error:
                self._failure = error
            with self.changed:
                self._jobs.popleft()
                self.changed.notify_all()
