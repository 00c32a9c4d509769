"""PowerSGD as torch has it, with a state that outlives the process.

torch's hook does the arithmetic and the communication. The residual and the warm start are ours, because torch keeps
them by number of bucket, and buckets change when a run is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

from everstep.capture.bits import cut_up
from everstep.capture.compressor import Compressor, finite
from everstep.errors import BadConfig

_Q, _STEPS, _RANDOM = "q.", "steps", "random"


class PowerSGD(Compressor):
    """Every matrix M as P·Qᵀ of low rank; the first `start` steps, and what is not worth it, are averaged densely.

    Packed are `p` and `q` of all matrices, the `rest`, and the `plan` that says where each goes.
    """

    def __init__(self, rank: int = 1, start: int = 10) -> None:
        super().__init__()
        if rank < 1 or start < 2:
            raise BadConfig(
                f"PowerSGD needs rank >= 1 and start >= 2 (DDP has its final buckets then), not {rank} and {start}"
            )
        self._torch = theirs.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=start,
            use_error_feedback=False,  # done by Compressor.reduce
            orthogonalization_epsilon=1e-8,  # a gradient of zeros would become NaN
        )
        self._seen: set[str] = set()  # buffers of this step
        self._qs: dict[int, Tensor] = {}  # of each parameter, zeros where it has none yet
        self._warm: set[int] = set()  # parameters that have one

    def _compress(
        self, total: Tensor, flat: Tensor, key: str, group: ProcessGroup | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        parameters = self._parameters.get(key)
        if group is None:
            raise BadConfig("PowerSGD saves communication and needs a process group; a single process can use TopK")
        if parameters is None:
            raise BadConfig(f"PowerSGD works on matrices; tell it those of buffer {key!r} by lay_out()")
        if key in self._seen:  # again: a new step
            self._torch.iter += 1
            self._seen.clear()
        self._seen.add(key)
        self._torch.process_group = group
        flat.copy_(total)
        if self._torch.iter < self._torch.start_powerSGD_iter:
            theirs.powerSGD_hook(self._torch, cast(dist.GradBucket, _Bucket(flat, parameters))).wait()
            for row in self._plan(parameters):
                if row.rank:
                    self._q(parameters[row.number], row, flat)  # so that the state has one shape from the start
            none = flat.new_empty(0)
            plan = torch.tensor([[0, flat.numel(), 1, 0]])
            return {"plan": plan, "p": none, "q": none, "rest": flat.clone()}, torch.zeros_like(total)
        return self._low_rank(flat, parameters), total.sub_(flat)

    def _low_rank(self, flat: Tensor, parameters: Sequence[Tensor]) -> dict[str, Tensor]:
        rows = self._plan(parameters)
        matrices = [row for row in rows if row.rank]
        qs = [self._q(parameters[row.number], row, flat) for row in matrices]
        owners = {id(parameters[row.number]) for row in matrices}
        if matrices and owners <= self._warm:
            self._torch.q_memory_dict[0] = torch.cat(qs)
            self._torch.p_memory_dict[0] = flat.new_empty(sum(row.n * row.rank for row in matrices))
        theirs.powerSGD_hook(self._torch, cast(dist.GradBucket, _Bucket(flat, parameters))).wait()
        p, q = self._torch.p_memory_dict.pop(0), self._torch.q_memory_dict.pop(0)
        if matrices and finite(flat):  # else the next step starts as warm as this one did
            torch._foreach_copy_(qs, list(q.split([one.numel() for one in qs])))
            alive = [(one.view(row.m, row.rank) != 0).any(0).all() for one, row in zip(qs, matrices, strict=True)]
            if torch.stack(alive).all():
                self._warm |= owners
            else:  # a column of zeros would stay one: begin at random again
                self._warm -= owners
                torch._foreach_zero_(qs)
        rest = [flat[row.offset : row.offset + row.n] for row in rows if not row.rank]
        plan = torch.tensor([[row.offset, row.n, row.m, row.rank] for row in rows])
        return {"plan": plan, "p": p, "q": q, "rest": torch.cat(rest) if rest else flat.new_empty(0)}

    def _q(self, parameter: Tensor, row: _Row, flat: Tensor) -> Tensor:
        held = self._qs.get(id(parameter))
        if held is None:
            held = torch.zeros(row.m * row.rank, dtype=flat.dtype, device=flat.device)
        self._qs[id(parameter)] = held = held.to(flat)
        return held

    def _plan(self, parameters: Sequence[Tensor]) -> list[_Row]:
        """What torch's hook does to each parameter, in the order of its memories: matrices by shape, then the rest."""
        shapes: dict[tuple[int, int], list[_Row]] = {}
        rest, offset = [], 0
        for number, parameter in enumerate(parameters):
            size = parameter.numel()
            n = len(parameter) if parameter.dim() else 1
            m = size // n
            rank = min(n, m, self._torch.matrix_approximation_rank)
            if theirs._should_compress(n, m, rank, self._torch.min_compression_rate)[0]:
                shapes.setdefault((n, m), []).append(_Row(number, offset, n, m, rank))
            else:
                rest.append(_Row(number, offset, size, 1, 0))
            offset += size
        return [row for rows in shapes.values() for row in rows] + rest

    @classmethod
    def unpack(cls, packed: Mapping[str, Tensor], into: Tensor) -> None:
        p, q, rest = packed["p"], packed["q"], packed["rest"]
        at_p = at_q = at_rest = 0
        for offset, n, m, rank in packed["plan"].tolist():
            if rank == 0:
                into[offset : offset + n] = rest[at_rest : at_rest + n]
                at_rest += n
                continue
            left = p[at_p : at_p + n * rank].view(1, n, rank)
            right = q[at_q : at_q + m * rank].view(1, m, rank)
            torch.bmm(left, right.transpose(1, 2), out=into[offset : offset + n * m].view(1, n, m))
            at_p += n * rank
            at_q += m * rank

    def holders(self) -> list[dict[Any, Tensor]]:
        return [*super().holders(), self._qs]

    def large(self) -> dict[str, Tensor]:
        return super().large() | {_Q + self._name(owner): q for owner, q in self._qs.items()}

    def small(self) -> dict[str, Tensor]:
        random = self._torch.rng.get_state(legacy=False)["state"]
        steps = self._torch.iter + bool(self._seen)
        found = {_STEPS: torch.tensor(steps), _RANDOM: torch.tensor([*random["key"].tolist(), random["pos"]])}
        return super().small() | found

    def load(self, state: Mapping[str, Tensor]) -> None:
        super().load(state)
        *key, position = state[_RANDOM].tolist()
        self._torch.rng.set_state(("MT19937", np.array(key, np.uint32), position, 0, 0.0))
        self._torch.iter = int(state[_STEPS])
        self._seen.clear()
        named = {name.removeprefix(_Q): q for name, q in state.items() if name.startswith(_Q)}
        self._qs = {owner: named[name].clone() for owner, name in self._names.items() if name in named}
        self._warm = {owner for owner, q in self._qs.items() if q.any()}


class _Row(NamedTuple):
    """How one parameter is packed: as n x m of a rank, or n elements as they are where the rank is 0."""

    number: int
    offset: int
    n: int
    m: int
    rank: int


class _Bucket:
    """What torch's hook asks of a bucket. The first dimension of a parameter is that of its memory, for any layout."""

    def __init__(self, flat: Tensor, parameters: Sequence[Tensor]) -> None:
        self._flat = flat
        shapes = [parameter.shape or (1,) for parameter in parameters]
        self._gradients = [p.view(shape) for p, shape in zip(cut_up(flat, parameters), shapes, strict=True)]

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def index(self) -> int:
        return 0  # nothing is left in torch's memory between two buckets

    def is_last(self) -> bool:
        return False  # steps are counted by PowerSGD
