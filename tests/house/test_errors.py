"""Errors travel: every one of the tree comes out of a pickle as it went in, whatever it is made of."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from everstep import errors
from everstep.errors import EverstepError

MADE_OF = {
    errors.MissingPackage: ("obstore", "Objects"),
    errors.Diverged: (7, None),
    errors.TooManyLost: (("n1", "n2"), 3, 1),
    errors.Unstorable: ("f", print, "why"),
    errors.RunHeld: ("/runs/a", 12, "host"),
    errors.NotEnoughMemory: ("memory", 10, 5, "Free some."),
    errors.TierFailed: (28, "no space", "/runs/a"),
    errors.NotEnoughSpace: ("disk", 10, 5, 2),
    errors.KeeperSilent: (12, 20.0),
    errors.PeerLost: ("n1", "host:1", "asked", "why"),
    errors.PeerFailed: ("n1", "host:1", "asked", "why"),
}


def all_kinds(kind: type[EverstepError] = EverstepError) -> Iterator[type[EverstepError]]:
    yield kind
    for one in kind.__subclasses__():
        if one.__module__ == errors.__name__:
            yield from all_kinds(one)


@pytest.mark.parametrize("kind", list(all_kinds()), ids=lambda kind: kind.__name__)
def test_an_error_comes_back(kind: type[EverstepError]) -> None:
    error = kind(*MADE_OF.get(kind, ("words",)), **({"extra": "s3"} if kind is errors.MissingPackage else {}))
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is kind and str(found) == str(error) and found.__dict__ == error.__dict__
    assert found.args == error.args and getattr(found, "errno", None) == getattr(error, "errno", None)
