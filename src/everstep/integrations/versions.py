"""Which versions of a framework an integration is made for, and the sentence for any other.

An integration reaches into the loops of its framework, which change without notice. So it says which ones it knows,
and refuses the rest before anything is trained.
"""

from __future__ import annotations

import re
from importlib import metadata

from everstep.errors import BadConfig, MissingPackage


def need(package: str, feature: str, *, least: str, below: str) -> None:
    """`package` is there in a version from `least` on and before `below`; its extra has the same name."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise MissingPackage(package, feature, extra=package) from None
    if not _numbers(least) <= _numbers(found) < _numbers(below):
        raise BadConfig(
            f"{feature} is made for {package} from {least} to before {below}, and {found} is installed: "
            f"pip install '{package}>={least},<{below}'."
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The release, without what follows it: 5.0.0rc1 counts as 5.0.0."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
