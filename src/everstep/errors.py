"""Every way Everstep says no.

    EverstepError                      exit 1
    ├── Restart                        exit 75  also RuntimeError: a loss that cannot be lived through; start again
    ├── NothingToRestore               exit 3   also FileNotFoundError
    ├── Damaged                        exit 4   also ValueError: bytes that fail their check
    │   └── NewerFormat                exit 4   written by a later Everstep
    ├── Diverged                       exit 4   also ValueError: replayed steps that give another state
    ├── TooManyLost                    exit 4   also ValueError: more members of a parity group than it makes up for
    ├── Mismatch                       exit 5   also ValueError: the checkpoint and the program differ
    ├── Unstorable                     exit 5   also TypeError: state that no format of ours can hold
    ├── RunHeld                        exit 6   also RuntimeError: another process holds this run
    ├── NotEnoughMemory                exit 7   also MemoryError
    ├── TierFailed                     exit 7   also OSError: a medium refused
    │   └── NotEnoughSpace             exit 7
    ├── KeeperLost                     exit 8   also ConnectionError: the keeper cannot be reached or started
    │   └── KeeperSilent               exit 8   it lives, and does not answer
    ├── PeerLost                       exit 8   also ConnectionError: another node's keeper does not answer
    ├── PeerFailed                     exit 8   also RuntimeError: it answers that it could not
    ├── Misuse                         exit 2   also RuntimeError: a call that cannot come now
    │   └── RunOver                    exit 2   the run has come to its end
    ├── MissingPackage                 exit 2   also ImportError: an optional package that is not installed
    └── BadConfig                      exit 2   also ValueError: an argument that cannot be right

Each error carries the fields a program needs and a sentence a person can act on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class EverstepError(Exception):
    exit_code = 1

    def __reduce__(self) -> tuple[Callable[..., EverstepError], tuple[Any, ...]]:
        """Errors travel between processes, as DCP's ranks and pools have it, and come out as they went in."""
        return _again, (type(self), super().__reduce__()[1], dict(self.__dict__))


def _again(kind: type[EverstepError], words: tuple[Any, ...], fields: dict[str, Any]) -> EverstepError:
    built_in: Any = kind
    while built_in.__module__ != "builtins":  # the one that lays it out in memory must make it
        built_in = built_in.__base__
    error: EverstepError = built_in.__new__(kind, *words)
    built_in.__init__(error, *words)
    error.__dict__.update(fields)
    return error


class BadConfig(EverstepError, ValueError):
    exit_code = 2


class Misuse(EverstepError, RuntimeError):
    exit_code = 2


class RunOver(Misuse):
    def __init__(self, step: int) -> None:
        super().__init__(
            f"this run is over, at step {step}: iterating it once gives the batches of all its epochs. For more of "
            "them say guard(..., epochs=...), and do not loop over epochs around it"
        )


class MissingPackage(EverstepError, ImportError):
    exit_code = 2

    def __init__(self, package: str, feature: str, *, extra: str) -> None:
        self.package, self.feature, self.extra = package, feature, extra
        super().__init__(f"{feature} needs {package}: pip install {package}, or pip install 'everstep[{extra}]'.")


class Restart(EverstepError, RuntimeError):
    """Nobody goes on in this process: it is to be started again, and resumes from the nearest tier."""

    exit_code = 75


class NothingToRestore(EverstepError, FileNotFoundError):
    exit_code = 3


class Damaged(EverstepError, ValueError):
    exit_code = 4

    def __init__(
        self,
        reason: str,
        *,
        tier: str = "",
        file: str = "",
        step: int | None = None,
        rank: int | None = None,
        chunk: int | None = None,
    ) -> None:
        self.reason, self.tier, self.file = reason, tier, file
        self.step, self.rank, self.chunk = step, rank, chunk
        fields = (("tier", tier or None), ("step", step), ("rank", rank), ("file", file or None), ("chunk", chunk))
        where = ", ".join(f"{key} {value}" for key, value in fields if value is not None)
        super().__init__(f"{reason} ({where})" if where else reason)


class NewerFormat(Damaged):
    pass


class Diverged(EverstepError, ValueError):
    exit_code = 4

    def __init__(
        self, step: int, proven: int | None, advice: str = "Is this the same kind of machine, with the same versions?"
    ) -> None:
        self.step, self.proven, self.advice = step, proven, advice
        known = "no step" if proven is None else f"step {proven}"
        super().__init__(
            f"replayed to step {step}, the state is not what it was in training; {known} after the base was proven. "
            f"{advice}"
        )


class TooManyLost(EverstepError, ValueError):
    exit_code = 4

    def __init__(self, missing: Sequence[str], members: int, losses: int) -> None:
        self.missing, self.members, self.losses = tuple(missing), members, losses
        super().__init__(
            f"{', '.join(self.missing)} are missing from a parity group of {members}, and it makes up for {losses} of "
            "them at most. Bring one back, or restore from another tier."
        )


class Mismatch(EverstepError, ValueError):
    exit_code = 5

    def __init__(self, message: str, differences: Sequence[str] = ()) -> None:
        self.differences = tuple(differences)
        shown = list(self.differences[:20])
        if len(self.differences) > 20:
            shown.append(f"... and {len(self.differences) - 20} more")
        super().__init__("\n  ".join([message, *shown]))


class Unstorable(EverstepError, TypeError):
    exit_code = 5

    def __init__(self, key: str, value: object, why: str = "") -> None:
        self.key, self.type = key, f"{type(value).__module__}.{type(value).__qualname__}"
        super().__init__(
            f"{key} is a {self.type}, which cannot be stored without pickle{': ' + why if why else ''}. "
            "Give it a state_dict() of numbers, strings, bytes, lists, dicts and tensors, or leave it out."
        )


class RunHeld(EverstepError, RuntimeError):
    exit_code = 6

    def __init__(self, directory: str, pid: int, host: str, *, is_own: bool = False) -> None:
        """`is_own`: by this very process."""
        self.directory, self.pid, self.host = directory, pid, host
        advice = "Wait for it to end, stop it, or give this run a directory of its own."
        if is_own:
            advice = "That is this one: close() the run that it has there before it makes another."
        super().__init__(f"{directory} is in use by process {pid} on {host}. {advice}")


class NotEnoughMemory(EverstepError, MemoryError):
    exit_code = 7

    def __init__(self, where: str, needed_bytes: int, free_bytes: int, advice: str) -> None:
        self.where, self.needed_bytes, self.free_bytes = where, needed_bytes, free_bytes
        super().__init__(
            f"the arena needs {needed_bytes / 1e6:,.1f} MB in {where} and {free_bytes / 1e6:,.1f} MB are free. {advice}"
        )


class TierFailed(EverstepError, OSError):
    exit_code = 7


class NotEnoughSpace(TierFailed):
    def __init__(self, tier: str, needed_bytes: int, free_bytes: int, reserve_bytes: int = 0) -> None:
        """`reserve_bytes`: what is left free whatever is written."""
        self.tier, self.needed_bytes = tier, needed_bytes
        self.free_bytes, self.reserve_bytes = free_bytes, reserve_bytes
        needed = f"{needed_bytes / 1e6:,.1f} MB" if needed_bytes >= 1e5 else f"{needed_bytes:,} bytes"
        reserve = f" beside the {reserve_bytes / 1e6:,.1f} MB that always stay free" if reserve_bytes else ""
        super().__init__(
            f"{tier} has {free_bytes / 1e6:,.1f} MB free, and the write needs {needed}{reserve}. Free some space."
        )


class KeeperLost(EverstepError, ConnectionError):
    exit_code = 8


class KeeperSilent(KeeperLost):
    def __init__(self, pid: int, patience_s: float) -> None:
        self.pid = pid
        super().__init__(
            f"the keeper, process {pid}, has not answered in {patience_s:g} s: it may be stopped (kill -CONT {pid}), "
            "or wait for a disk that does not answer"
        )


class PeerLost(EverstepError, ConnectionError):
    exit_code = 8

    def __init__(self, node: str, address: str, asked: str, reason: str) -> None:
        self.node, self.address, self.asked, self.reason = node, address, asked, reason
        super().__init__(
            f"the keeper of {node} at {address} is lost ({asked}: {reason}). "
            "Is it alive, reachable from here, of the same run, and with the same encrypt=?"
        )


class PeerFailed(EverstepError, RuntimeError):
    exit_code = 8

    def __init__(self, node: str, address: str, asked: str, reason: str) -> None:
        self.node, self.address, self.asked, self.reason = node, address, asked, reason
        super().__init__(f"the keeper of {node} at {address} could not do {asked}: {reason}")


class ReplayedElsewhere(UserWarning):
    """Steps were repeated on another kind of device than they were trained on, and may differ where no digest is."""


class PassedOver(UserWarning):
    """The newest step was asked for, and a newer one than is given was there, but is damaged."""
