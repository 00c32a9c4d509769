"""The promises of a tier, as a suite that anybody can run on their own.

    from everstep.testing import check_tier
    check_tier(lambda folder: MyTier(folder))

`check_tier` raises AssertionError with the broken promise. It includes a walk that kills a writing process with SIGKILL
before each of its operations on the medium, so it needs os.fork and a tier whose `before` is called before each.
"""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import xxhash

from everstep.errors import BadConfig
from everstep.image import CHUNK_BYTES
from everstep.store.tier import Tier

Maker = Callable[[Path], Tier]
_BAD_NAMES = ("../out", "/etc/passwd", "a/../b", "", "a/b/c", ".hidden", "a.tmp-1/b")


def check_tier(make: Maker) -> None:
    """Hold a tier to its promises. `make` opens it on a directory, which may already hold blobs."""
    for check in (
        _a_blob_comes_back_as_it_was,
        _checksums_are_those_of_the_chunks,
        _a_name_never_changes_its_content,
        _what_is_not_there_says_so,
        _listing_and_deleting_agree,
        _names_cannot_climb_out,
        _a_folder_is_renamed_and_deleted_whole,
        _a_put_killed_before_any_operation_is_all_or_nothing,
    ):
        with tempfile.TemporaryDirectory(prefix="everstep-tier-") as folder:
            check(make, Path(folder))


def _sizes() -> tuple[int, ...]:
    return (0, 1, 511, 4096, 4097, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 4096)


def _blob(size: int) -> memoryview:
    return memoryview(bytes(i * 7 % 251 for i in range(min(size, 997))) * (size // 997 + 1))[:size]


def _a_blob_comes_back_as_it_was(make: Maker, folder: Path) -> None:
    tier = make(folder)
    for size in _sizes():
        name = f"sizes/blob-{size}.bin"
        tier.put(name, _blob(size))
        assert tier.get(name) == _blob(size), f"{size} bytes came back changed"
        assert tier.size(name) == size, f"{size} bytes are listed as {tier.size(name)}"
        assert make(folder).get(name) == _blob(size), "another reader sees something else"


def _checksums_are_those_of_the_chunks(make: Maker, folder: Path) -> None:
    data = _blob(2 * CHUNK_BYTES + 5)
    expected = tuple(xxhash.xxh3_64_intdigest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES))
    assert make(folder).put("blob", data) == expected, "put returned other checksums than those of its chunks"


def _a_name_never_changes_its_content(make: Maker, folder: Path) -> None:
    tier = make(folder)
    tier.put("once", _blob(10))
    try:
        tier.put("once", _blob(20))
    except FileExistsError:
        assert tier.get("once") == _blob(10), "a refused put changed the content"
        return
    raise AssertionError("a second put under the same name was not refused")


def _what_is_not_there_says_so(make: Maker, folder: Path) -> None:
    tier = make(folder)
    for ask in (tier.get, tier.size):
        try:
            ask("nothing")
        except FileNotFoundError:
            continue
        raise AssertionError(f"{ask.__name__} of a missing blob did not raise FileNotFoundError")
    tier.delete("nothing")
    assert tier.names("nowhere") == []


def _listing_and_deleting_agree(make: Maker, folder: Path) -> None:
    tier = make(folder)
    for name in ("b", "a", "inner/c"):
        tier.put(name, _blob(3))
    assert tier.names() == ["a", "b"], f"the top lists {tier.names()}"
    assert tier.names("inner") == ["inner/c"] and tier.folders() == ["inner"]
    tier.delete("a")
    assert tier.names() == ["b"], "a deleted blob is still listed"
    assert tier.free_bytes() > 0


def _names_cannot_climb_out(make: Maker, folder: Path) -> None:
    tier = make(folder / "inside")
    for name in _BAD_NAMES:
        for ask in (lambda n: tier.put(n, _blob(1)), tier.get, tier.delete):
            try:
                ask(name)
            except BadConfig:
                continue
            raise AssertionError(f"the name {name!r} was not refused")


def _a_folder_is_renamed_and_deleted_whole(make: Maker, folder: Path) -> None:
    tier = make(folder)
    tier.put("old/a", _blob(3))
    tier.rename_folder("old", "new")
    assert tier.names("new") == ["new/a"] and tier.names("old") == []
    tier.delete_folder("new")
    assert tier.folders() == []


def _a_put_killed_before_any_operation_is_all_or_nothing(make: Maker, folder: Path) -> None:
    """Kill the writer before its first operation, its second, and so on, until it gets through."""
    data = _blob(2 * CHUNK_BYTES + 100)
    for operation in range(200):
        place = folder / f"walk-{operation}"
        if not _killed_before(operation, lambda place=place: make(place), lambda tier: tier.put("step/blob", data)):  # type: ignore[misc]
            assert operation > 3, "the tier does not call `before` before its operations"
            assert make(place).get("step/blob") == data
            return
        survivor = make(place)
        if survivor.names("step"):
            assert survivor.get("step/blob") == data, f"a torn blob is listed after a kill before operation {operation}"
        else:
            survivor.put("step/blob", data)  # the leftovers are in nobody's way
        assert survivor.get("step/blob") == data
        survivor.sweep(0.0)
        assert survivor.names("step") == ["step/blob"], "sweeping took or left something it should not have"
    raise AssertionError("a put takes more than 200 operations")


def _killed_before(operation: int, make: Callable[[], Tier], act: Callable[[Tier], object]) -> bool:
    """Run `act` in a child that is killed before the given operation; False if it got through."""
    child = os.fork()
    if child == 0:
        try:
            tier = make()
            left = [operation]

            def countdown(name: str) -> None:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

            tier.before = countdown
            act(tier)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, "the writer failed by itself"
    return os.WIFSIGNALED(status)
