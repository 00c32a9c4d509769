"""The promises of a tier, as a suite that anybody can run on their own.

    from everstep.testing import check_tier
    check_tier(lambda folder: MyTier(folder))

`check_tier` raises AssertionError with the broken promise. It includes walks that kill a writing process with SIGKILL
before each of its operations on the medium, so it needs os.fork and a tier whose `before` is called before each. The
process that calls it never touches the tier: all is done in children, because some clients do not outlive a fork.
"""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import xxhash

from everstep.errors import BadConfig, TierFailed
from everstep.image import CHUNK_BYTES
from everstep.store.blocks import room_for
from everstep.store.tier import Tier

Maker = Callable[[Path], Tier]
_BAD_NAMES = ("../out", "/etc/passwd", "a/../b", "", "a/b/c", ".hidden", "a.tmp-1/b")


def check_tier(make: Maker, *, walk: bool = True) -> None:
    """Hold a tier to its promises. `make` opens it on a directory, which may already hold blobs.

    `walk=False` leaves out what kills processes: for a tier whose blobs end with the process that made them.
    """
    for check in (
        _a_blob_comes_back_as_it_was,
        _every_chunk_is_shown_once,
        _checksums_are_those_of_the_chunks,
        _a_name_never_changes_its_content,
        _a_put_that_is_called_off_leaves_nothing,
        _what_is_not_there_says_so,
        _listing_and_deleting_agree,
        _names_cannot_climb_out,
        _a_folder_is_renamed_and_deleted_whole,
        _a_range_is_what_lies_there,
        _a_growing_blob_is_the_sum_of_its_appends,
        _a_cut_blob_is_shorter_and_grows_again,
        _a_blob_that_does_not_grow_says_so,
    ):
        with tempfile.TemporaryDirectory(prefix="everstep-tier-") as folder:
            _apart(lambda check=check, folder=folder: check(make, Path(folder)))  # type: ignore[misc]
    for walk_through in (
        _a_put_killed_before_any_operation_is_all_or_nothing,
        _a_rename_killed_before_any_operation_loses_nothing,
        _a_folder_deleted_and_killed_before_any_operation_lists_no_torn_blob,
        _an_append_killed_before_any_operation_keeps_what_was_there,
        _a_cut_killed_before_any_operation_keeps_what_was_to_stay,
    ):
        if walk:
            with tempfile.TemporaryDirectory(prefix="everstep-tier-") as folder:
                walk_through(make, Path(folder))


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


def _every_chunk_is_shown_once(make: Maker, folder: Path) -> None:
    tier, made, shown = make(folder), list[memoryview](), list[tuple[int, bytes]]()

    def room(size: int) -> memoryview:
        made.append(room_for(size))
        return made[-1]

    def refuse(offset: int, chunk: memoryview) -> None:
        raise ValueError("no good")

    for size in _sizes():
        tier.put(f"blob-{size}", _blob(size))
        shown.clear()
        found = tier.get(f"blob-{size}", room=room, arrived=lambda at, chunk: shown.append((at, bytes(chunk))))
        chunks = [(at, bytes(_blob(size)[at : at + CHUNK_BYTES])) for at in range(0, size, CHUNK_BYTES)]
        assert sorted(shown) == chunks, f"of {size} bytes not every chunk was shown once, as it is"
        assert found == _blob(size), f"{size} bytes came back changed"
        assert not size or found.obj is made[-1].obj, "a blob was put elsewhere than into the memory given for it"
        if size:
            try:
                tier.get(f"blob-{size}", arrived=refuse)
            except ValueError:
                continue
            raise AssertionError("a get went on with a chunk that is no good")


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


def _a_put_that_is_called_off_leaves_nothing(make: Maker, folder: Path) -> None:
    tier, data = make(folder), _blob(3 * CHUNK_BYTES + 5)
    passed: list[int] = []
    tier.put("step/whole", data, passed.append)
    assert sorted(passed) == [5, *[CHUNK_BYTES] * 3], "a put did not ask for every chunk"

    class CalledOff(Exception):
        pass

    def passing(size_bytes: int) -> None:
        passed.append(size_bytes)
        if len(passed) == 6:
            raise CalledOff

    try:
        tier.put("step/blob", data, passing)
    except CalledOff:
        assert tier.names("step") == ["step/whole"], "a put that was called off is listed"
        tier.put("step/blob", data)
        assert tier.get("step/blob") == data, "what was called off is in the way of the next put"
        return
    raise AssertionError("a put went on though it was called off")


def _what_is_not_there_says_so(make: Maker, folder: Path) -> None:
    tier = make(folder)
    into = memoryview(bytearray(1))
    asks: dict[str, Callable[[str], object]] = {
        "get": tier.get, "size": tier.size, "view": tier.view,
        "read": lambda name: tier.read(name, 0, into), "cut": lambda name: tier.cut(name, 0),
    }  # fmt: skip
    for verb, ask in asks.items():
        try:
            ask("nothing")
        except FileNotFoundError:
            continue
        raise AssertionError(f"{verb} of a missing blob did not raise FileNotFoundError")
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
        asks: tuple[Callable[[str], object], ...] = (
            lambda n: tier.put(n, _blob(1)), lambda n: tier.append(n, [_blob(1)]), lambda n: tier.cut(n, 0),
            lambda n: tier.read(n, 0, memoryview(bytearray(1))), tier.get, tier.view, tier.delete,
        )  # fmt: skip
        for ask in asks:
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

    def look(place: Path, operation: int, killed: bool) -> None:
        survivor = make(place)
        if survivor.names("step"):
            assert survivor.get("step/blob") == data, f"a torn blob is listed after a kill before operation {operation}"
        else:
            assert killed, "a put did nothing"
            survivor.put("step/blob", data)  # the leftovers are in nobody's way
        assert survivor.get("step/blob") == data
        survivor.sweep(0.0)
        assert survivor.names("step") == ["step/blob"], "sweeping took or left something it should not have"
        assert survivor.get("step/blob") == data, "sweeping took bytes of a blob"

    for operation in range(200):
        place = folder / f"walk-{operation}"
        killed = _killed_before(operation, lambda: make(place), lambda tier: tier.put("step/blob", data))  # noqa: B023
        _apart(lambda: look(place, operation, killed))  # noqa: B023
        if not killed:
            assert operation > 3, "the tier does not call `before` before its operations"
            return
    raise AssertionError("a put takes more than 200 operations")


def _a_rename_killed_before_any_operation_loses_nothing(make: Maker, folder: Path) -> None:
    blobs = {"small": _blob(100), "large": _blob(2 * CHUNK_BYTES + 100)}

    def look(place: Path, operation: int, killed: bool) -> None:
        survivor = make(place)
        for name, data in blobs.items():
            there = [where for where in ("old", "new") if f"{where}/{name}" in survivor.names(where)]
            assert there, f"a rename killed before operation {operation} lost {name}"
            for where in there:
                assert survivor.get(f"{where}/{name}") == data, f"{name} is torn after a kill before {operation}"
        if killed and survivor.names("old"):
            survivor.rename_folder("old", "new")
        assert survivor.names("old") == [] and survivor.names("new") == ["new/large", "new/small"]

    _walk_folder(make, folder, blobs, lambda tier: tier.rename_folder("old", "new"), look)


def _a_folder_deleted_and_killed_before_any_operation_lists_no_torn_blob(make: Maker, folder: Path) -> None:
    blobs = {"small": _blob(100), "large": _blob(2 * CHUNK_BYTES + 100)}

    def look(place: Path, operation: int, killed: bool) -> None:
        survivor = make(place)
        for name in survivor.names("old"):
            assert survivor.get(name) == blobs[name.removeprefix("old/")], (
                f"{name} is torn after a kill before {operation}"
            )
        assert killed or survivor.folders() == [], "a deleted folder is still listed"
        survivor.delete_folder("old")
        assert survivor.folders() == [], "leftovers of a folder cannot be deleted"

    _walk_folder(make, folder, blobs, lambda tier: tier.delete_folder("old"), look)


def _walk_folder(
    make: Maker,
    folder: Path,
    blobs: dict[str, memoryview],
    act: Callable[[Tier], None],
    look: Callable[[Path, int, bool], None],
) -> None:
    """Kill what is done to the folder `old` before each of its operations, and look at what is left."""
    for operation in range(200):
        place = folder / f"walk-{operation}"
        for name, data in blobs.items():
            _apart(lambda: make(place).put(f"old/{name}", data))  # noqa: B023
        killed = _killed_before(operation, lambda: make(place), act)  # noqa: B023
        _apart(lambda: look(place, operation, killed))  # noqa: B023
        if not killed:
            assert operation > 0, "the tier does not call `before` before its operations"
            return
    raise AssertionError("it takes more than 200 operations")


def _appends() -> list[list[memoryview]]:
    """Parts of all lengths and alignments; those of each of the first three are together whole blocks."""
    data = _blob(3 * CHUNK_BYTES)
    return [
        [data[:4096]],
        [data[100:200], data[: CHUNK_BYTES + 4096], data[7 : 7 + 4096 - 100]],
        [data[1 : 1 + 2 * CHUNK_BYTES], data[:4096], data[:0], data[5:10], data[: 8192 - 5]],
        [data[:3], data[: CHUNK_BYTES + 1]],
        [data[:4096]],
    ]


def _a_range_is_what_lies_there(make: Maker, folder: Path) -> None:
    make(folder).put("blob", data := _blob(3 * CHUNK_BYTES))
    _check_ranges(make(folder), "blob", bytes(data))


def _check_ranges(tier: Tier, name: str, expected: bytes) -> None:
    assert tier.view(name) == expected and tier.view(name).readonly, "a view shows something else"
    for length in (1000, len(expected) - 5000):
        into = memoryview(bytearray(length))
        for offset in (0, 4095, len(expected) - 10, len(expected) + 5):
            there = max(min(length, len(expected) - offset), 0)
            assert tier.read(name, offset, into) == there, f"a read at {offset} is not as long as it should be"
            assert into[:there] == expected[offset : offset + there], f"a read at {offset} gives something else"


def _a_growing_blob_is_the_sum_of_its_appends(make: Maker, folder: Path) -> None:
    tier, expected = make(folder), b""
    for parts in _appends() if tier.traits.appends else _appends()[2:3]:
        tier.append("log/grows", parts)
        expected += b"".join(parts)
        assert tier.get("log/grows") == expected, "an append changed or lost bytes"
    assert tier.names("log") == ["log/grows"] and tier.size("log/grows") == len(expected)
    _check_ranges(make(folder), "log/grows", expected)


def _a_cut_blob_is_shorter_and_grows_again(make: Maker, folder: Path) -> None:
    tier, data = make(folder), _blob(3 * 4096)
    if not tier.traits.appends:
        return
    tier.append("grows", [data])
    for length in (4 * 4096, 3 * 4096, 2 * 4096, 5000, 0):
        tier.cut("grows", length)
        assert tier.get("grows") == data[:length], f"a cut to {length} bytes left something else"
        tier.append("grows", [data[length:]])
        assert tier.get("grows") == data, f"after a cut to {length} bytes the next append is not at the end"


def _a_blob_that_does_not_grow_says_so(make: Maker, folder: Path) -> None:
    tier, data = make(folder), _blob(3 * 4096)
    if tier.traits.appends:
        return
    tier.append("once", [data])
    tier.cut("once", len(data))
    changes: dict[str, Callable[[], None]] = {
        "append": lambda: tier.append("once", [data]), "cut": lambda: tier.cut("once", 5000),
    }  # fmt: skip
    for verb, change in changes.items():
        try:
            change()
        except TierFailed:
            assert tier.get("once") == data, f"a refused {verb} changed the content"
            continue
        raise AssertionError(f"{verb} did not raise TierFailed, though the traits say that blobs do not grow")


def _an_append_killed_before_any_operation_keeps_what_was_there(make: Maker, folder: Path) -> None:
    """Also when what was there is nothing. Behind it there may be anything, a torn tail, if blobs grow."""
    more = [_blob(2 * CHUNK_BYTES), _blob(5000), _blob(3192)]
    grows = _apart(lambda: make(folder).traits.appends)

    def look(place: Path, before: bytes, operation: int, killed: bool) -> None:
        survivor, whole = make(place), before + b"".join(more)
        there = survivor.get("log/grows") if survivor.names("log") else memoryview(b"")
        assert there[: len(before)] == before, f"an append killed before operation {operation} took bytes away"
        assert grows or there in (b"", whole), f"a torn blob is listed after a kill before operation {operation}"
        if killed and (grows or not there):
            if there:
                survivor.cut("log/grows", len(before))
            survivor.append("log/grows", more)
        assert survivor.get("log/grows") == whole

    for before in (b"", bytes(_blob(8192))) if grows else (b"",):
        for operation in range(200):
            place = folder / f"walk-{len(before)}-{operation}"
            if before:
                _apart(lambda: make(place).append("log/grows", [memoryview(before)]))  # noqa: B023
            killed = _killed_before(operation, lambda: make(place), lambda tier: tier.append("log/grows", more))  # noqa: B023
            _apart(lambda: look(place, before, operation, killed))  # noqa: B023
            if not killed:
                assert operation > 2, "the tier does not call `before` before its operations"
                break
        else:
            raise AssertionError("an append takes more than 200 operations")


def _a_cut_killed_before_any_operation_keeps_what_was_to_stay(make: Maker, folder: Path) -> None:
    def look(place: Path, operation: int, killed: bool) -> None:
        there = make(place).get("log/grows")
        assert there in (_blob(9000), _blob(5000)), f"a cut killed before operation {operation} left {len(there)} bytes"
        if not killed:
            assert len(there) == 5000 and operation > 0, "a cut did nothing, or without calling `before`"

    if not _apart(lambda: make(folder).traits.appends):
        return
    for operation in range(20):
        place = folder / f"walk-{operation}"
        _apart(lambda: make(place).append("log/grows", [_blob(9000)]))  # noqa: B023
        killed = _killed_before(operation, lambda: make(place), lambda tier: tier.cut("log/grows", 5000))  # noqa: B023
        _apart(lambda: look(place, operation, killed))  # noqa: B023
        if not killed:
            return
    raise AssertionError("a cut takes more than 20 operations")


def _apart(act: Callable[[], object]) -> bool:
    """Do something in a child: whether it came to something true. What it raises is raised here, as AssertionError."""
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        said, code = "", 2
        try:
            code = 0 if act() else 1
        except AssertionError as broken:
            said = str(broken) or traceback.format_exc()
        except BaseException:
            said = traceback.format_exc()
        finally:
            os.write(tell, said.encode()[:16384])
            os._exit(code)
    os.close(tell)
    with os.fdopen(hear, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) < 2, said or "a child died"
    return os.WEXITSTATUS(status) == 0


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
