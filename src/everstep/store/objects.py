"""An object store as a tier: S3 and what speaks like it, Google Cloud Storage, Azure; file:// and memory:// for tests.

A blob of up to 8 MiB is one object, put on condition that its name is free. A larger one goes up in parts, several in
flight, as an object with a name that nobody else has and nobody lists; then a pointer to it is put under the blob's
name, on the same condition. An upload in parts cannot be conditional itself: obstore has no way to say so, and not
every store has either. So of two writers of a name one is told that it made it, and the other never touches it.

Objects do not grow. `append` makes a blob that stays as it is, and says no to one that is there; `cut` says no too.
"""

from __future__ import annotations

import errno
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from types import MappingProxyType

import xxhash

from everstep.errors import BadConfig, TierFailed
from everstep.image import CHUNK_BYTES, round_up
from everstep.store.blocks import room_for
from everstep.store.bucket import open_store, stay_in_one_process, translated
from everstep.store.tier import NAME, Arrived, Passing, freely, unseen
from everstep.types import Room, Survives, Traits

# After bucket, which says what to do where it is missing.
import obstore  # isort: skip
from obstore import exceptions as refusals  # isort: skip

_PART_BYTES = 2 * CHUNK_BYTES  # of an upload, and of a ranged get; stores want at least 5 MiB
_MOST_PARTS = 9_000  # stores take 10,000
_IN_FLIGHT = 8
_COPIED_BYTES = 1 << 30  # what a store copies by itself within the time limit of a request; S3 refuses more than 5 GiB
_UPLOAD_BYTES_PER_S = 8 << 20  # who is slower than this may lose an upload to a sweep
_UNBOUNDED_BYTES = 1 << 62
_POINTER = re.compile(rb"everstep-object ([0-9a-f]{32})\n")
_POINTER_BYTES = 49
_DATA = re.compile(r"((?:[a-z][a-z0-9-]*/)?)\.data-([0-9a-f]{32})-(.+)")  # folder, token, the blob's name in it


class ObjectTier:
    before: Callable[[str], None] = staticmethod(lambda operation: None)

    def __init__(self, url: str, options: Mapping[str, str] = MappingProxyType({}), *, name: str = "objects") -> None:
        """`options`: what obstore calls configuration and client options, and `max_retries` and `retry_timeout_s`."""
        self.url, self.name = url, name
        self.traits = Traits(survives=Survives.NODE, shared=True, appends=False)
        self._store = open_store(url, options)

    # -- writing

    def put(self, name: str, data: memoryview, passing: Passing = freely) -> tuple[int, ...]:
        data, checksums = data.cast("B"), list[int]()

        def chunks() -> Iterator[memoryview]:
            for at in range(0, len(data), CHUNK_BYTES):
                chunk = data[at : at + CHUNK_BYTES]
                passing(len(chunk))
                checksums.append(int(xxhash.xxh3_64_intdigest(chunk)))
                yield chunk

        self._create(name, len(data), chunks())
        return tuple(checksums)

    def append(self, name: str, parts: Sequence[memoryview]) -> None:
        parts = [part.cast("B") for part in parts]
        chunks = (part[at : at + CHUNK_BYTES] for part in parts for at in range(0, len(part), CHUNK_BYTES))
        try:
            self._create(name, sum(map(len, parts)), chunks)
        except FileExistsError as error:
            raise self._unable(f"appending to {name}", "begin another blob") from error

    def cut(self, name: str, length: int) -> None:
        if self.size(name) > length:
            raise self._unable(f"cutting {name}", "delete it, or leave it as it is")

    def _create(self, name: str, size: int, chunks: Iterable[memoryview]) -> None:
        self._check(name)
        with self._failing(f"writing {name}"):
            if size <= _PART_BYTES:
                body = b"".join(chunks)
                if not _POINTER.fullmatch(body):
                    self._put_new(name, body)
                    return
                chunks = [memoryview(body)]  # it would be taken for a pointer, so it gets one
            self._refuse_if_there(name)
            token = uuid.uuid4().hex
            self._upload(_place(name, token), size, chunks)
            try:
                self._put_new(name, b"everstep-object %s\n" % token.encode())
            except refusals.AlreadyExistsError:
                if self._token(name) == token:
                    return  # it was made, but the store's answer was lost and the question asked again
                self._remove([_place(name, token)])
                raise

    def _upload(self, key: str, size: int, chunks: Iterable[memoryview]) -> None:
        def sent() -> Iterator[memoryview]:
            at = 0
            for chunk in chunks:
                self.before(f"write {key} at {at}")
                yield chunk
                at += len(chunk)

        part_bytes = max(_PART_BYTES, round_up(-(-size // _MOST_PARTS), CHUNK_BYTES))
        obstore.put(self._store, key, sent(), chunk_size=part_bytes, max_concurrency=_IN_FLIGHT)

    def _put_new(self, name: str, body: bytes) -> None:
        self.before(f"put {name}")
        obstore.put(self._store, name, body, mode="create", use_multipart=False)

    def _refuse_if_there(self, name: str) -> None:
        """Before an upload that would be in vain."""
        try:
            obstore.head(self._store, name)
        except FileNotFoundError:
            return
        raise FileExistsError(errno.EEXIST, "a name never changes its content", f"{self.url} ({name})")

    # -- reading

    def get(self, name: str, *, room: Room = room_for, arrived: Arrived = unseen) -> memoryview:
        self._check(name)
        with self._failing(f"reading {name}"):
            key, size = self._find(name)
            into = room(size)[:size]
            self._fetch(key, 0, into, arrived)
            return into

    def read(self, name: str, offset: int, into: memoryview) -> int:
        self._check(name)
        with self._failing(f"reading {name}"):
            key, size = self._find(name)
            count = max(min(len(into), size - offset), 0)
            self._fetch(key, offset, into[:count])
            return count

    def view(self, name: str) -> memoryview:
        return self.get(name).toreadonly()

    def size(self, name: str) -> int:
        self._check(name)
        with self._failing(f"looking for {name}"):
            return self._find(name)[1]

    def names(self, folder: str = "") -> list[str]:
        with self._failing(f"listing {folder or 'the top'}"):
            listed = obstore.list_with_delimiter(self._store, folder or None)["objects"]
        return sorted(meta["path"] for meta in listed if NAME.fullmatch(meta["path"]))

    def folders(self) -> list[str]:
        with self._failing("listing folders"):
            return sorted(obstore.list_with_delimiter(self._store)["common_prefixes"])

    def free_bytes(self) -> int:
        return _UNBOUNDED_BYTES

    def _find(self, name: str) -> tuple[str, int]:
        """The object that has a blob's bytes, and how many they are."""
        token = self._token(name)
        key = _place(name, token) if token else name
        return key, int(obstore.head(self._store, key)["size"])

    def _token(self, name: str) -> str:
        """Of the pointer under this name; empty if the object there is the blob itself."""
        if obstore.head(self._store, name)["size"] != _POINTER_BYTES:
            return ""
        found = _POINTER.fullmatch(bytes(obstore.get(self._store, name).bytes()))
        return found[1].decode() if found else ""

    def _fetch(self, key: str, offset: int, into: memoryview, arrived: Arrived = unseen) -> None:
        def fetch(at: int) -> None:
            end = min(at + _PART_BYTES, len(into))
            got = obstore.get_range(self._store, key, start=offset + at, length=end - at)
            if len(got) != end - at:
                raise TierFailed(errno.EIO, f"{self.name}: {key} became shorter while it was read", self.url)
            into[at:end] = memoryview(got)
            for begin in range(at, end, CHUNK_BYTES):
                arrived(begin, into[begin : min(begin + CHUNK_BYTES, end)])

        offsets = range(0, len(into), _PART_BYTES)
        if len(offsets) > 1:
            with ThreadPoolExecutor(_IN_FLIGHT) as pool:
                list(pool.map(fetch, offsets))
        elif offsets:
            fetch(0)

    # -- removing

    def delete(self, name: str) -> None:
        self._check(name)
        with self._failing(f"deleting {name}"):
            try:
                token = self._token(name)
            except FileNotFoundError:
                return
            self.before(f"delete {name}")
            self._remove([name])
            if token:
                self.before(f"delete {_place(name, token)}")
                self._remove([_place(name, token)])

    def delete_folder(self, folder: str) -> None:
        self._check(folder)
        with self._failing(f"deleting {folder}"):
            names, data = self._contents(folder)
            for keys in (names, data):  # a listed blob is complete, so what is listed goes first
                if keys:
                    self.before(f"delete {folder}")
                    self._remove(list(keys))

    def rename_folder(self, folder: str, to: str) -> None:
        """Copies, then deletes: a crash leaves some of it in both folders, and each blob that is listed is complete."""
        self._check(folder)
        self._check(to)
        with self._failing(f"renaming {folder}"):
            names, data = self._contents(folder)
            if not names and not data:
                raise FileNotFoundError(errno.ENOENT, "no such folder", f"{self.url} ({folder})")
            for key, size in (data | names).items():  # pointers after what they point to
                self.before(f"copy {key}")
                self._copy(key, f"{to}/{key.removeprefix(f'{folder}/')}", size)
            self.delete_folder(folder)

    def sweep(self, age_s: float) -> int:
        """Uploads that came to their end and got no pointer. Unfinished ones cannot be listed: the bucket's rules must
        remove those (see "Object stores" in FORMAT.md)."""
        removed = 0
        with self._failing("sweeping"):
            now = datetime.now(UTC)
            for key, (size, modified) in self._objects(None).items():
                found = _DATA.fullmatch(key)
                # S3 counts an object's age from the beginning of its upload, which may have ended this moment.
                if not found or (now - modified).total_seconds() < age_s + size / _UPLOAD_BYTES_PER_S:
                    continue
                if self._is_pointed_to(found[1] + found[3], token=found[2]):
                    continue
                self.before(f"delete {key}")
                self._remove([key])
                removed += 1
        return removed

    def _is_pointed_to(self, name: str, token: str) -> bool:
        try:
            return self._token(name) == token
        except FileNotFoundError:
            return False

    # -- small things

    def _objects(self, folder: str | None) -> dict[str, tuple[int, datetime]]:
        batches = obstore.list(self._store, folder)
        return {meta["path"]: (meta["size"], meta["last_modified"]) for batch in batches for meta in batch}

    def _contents(self, folder: str) -> tuple[dict[str, int], dict[str, int]]:
        """Sizes of what is listed in a folder, and of what is not."""
        sizes = {key: size for key, (size, _) in self._objects(folder).items()}
        names = {key: size for key, size in sizes.items() if NAME.fullmatch(key)}
        return names, {key: size for key, size in sizes.items() if key not in names}

    def _copy(self, key: str, to: str, size: int) -> None:
        if size <= _COPIED_BYTES:
            obstore.copy(self._store, key, to)
            return

        def pieces() -> Iterator[memoryview]:
            with ThreadPoolExecutor(1) as pool:  # obstore cannot be asked by a thread that it asks for the next piece
                for at in range(0, size, _PART_BYTES):
                    end = min(at + _PART_BYTES, size)
                    got = pool.submit(obstore.get_range, self._store, key, start=at, end=end)
                    yield memoryview(got.result())

        self._upload(to, size, pieces())

    def _remove(self, keys: list[str]) -> None:
        try:
            obstore.delete(self._store, keys)
        except FileNotFoundError:  # only some stores mind, and they stop there
            for key in keys if len(keys) > 1 else []:
                self._remove([key])

    def _check(self, name: str) -> None:
        if not NAME.fullmatch(name):
            raise BadConfig(f"{name!r} is not a name that a tier can hold")

    def _unable(self, what: str, advice: str) -> TierFailed:
        return TierFailed(errno.EOPNOTSUPP, f"{self.name} failed {what}: objects do not change; {advice}", self.url)

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Name the tier in whatever the store complains about, and say what to do about it."""
        stay_in_one_process(self.name, self.url)
        try:
            yield
        except (FileExistsError, TierFailed):
            raise
        except (refusals.BaseError, FileNotFoundError) as error:
            raise translated(error, self.name, what, self.url) from error


def _place(name: str, token: str) -> str:
    """Where the bytes of a large blob are: beside its name."""
    folder, slash, leaf = name.rpartition("/")
    return f"{folder}{slash}.data-{token}-{leaf}"
