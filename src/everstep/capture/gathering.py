"""Many small tensors of a device, copied into its spare memory.

Each launch copies a few dozen of them, so thousands keep the copier busy for milliseconds, in which the update of the
next step may be waiting for it. What is launched is the same at every cut as long as the tensors stay where they are:
it is recorded as a CUDA graph, and one call launches all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MANY = 256  # fewer are launched within a tenth of a millisecond


@dataclass(slots=True)
class Gathering:
    targets: list[Tensor]
    sources: list[Tensor]
    _copies: int = 0  # that were launched one by one
    _graph: torch.cuda.CUDAGraph | None = None
    _refused: bool = False

    def launch(self) -> None:
        """The copier thread, on the current stream."""
        if self._graph is not None:
            self._graph.replay()
        else:
            torch._foreach_copy_(self.targets, self.sources)
            self._copies += 1

    def record(self, stream: torch.cuda.Stream) -> str:
        """The training thread, at a cut: nothing may be drawn from a device's generator meanwhile. Why it could not be.

        Not before they were copied once: a loop that replaces its tensors in every step would record in vain.
        """
        if self._graph is not None or self._refused or not self._copies or len(self.targets) < _MANY:
            return ""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    torch._foreach_copy_(self.targets, self.sources)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self._refused = True
            return str(error)
        self._graph = graph
        return ""
