"""An object store keeps the promises of a tier, whoever dies in the middle."""

from __future__ import annotations

import errno
import http.server
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from buckets import BUCKET, HASTY, KEYS, Server, alone

from everstep.errors import BadConfig, TierFailed
from everstep.image import CHUNK_BYTES, Wanted, lay_out
from everstep.store import objects
from everstep.store.log import LogWriter, log_name, read_log
from everstep.store.objects import ObjectTier
from everstep.types import Frame, ImageInfo

LARGE = bytes(range(251)) * (3 * CHUNK_BYTES // 251 + 1)
OPEN = """
import json, os, signal, sys, time
from everstep.store.objects import ObjectTier
url, options = sys.argv[1], json.loads(sys.argv[2])
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


@pytest.fixture(params=["s3", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str]]:
    """A URL of its own for each test, with its options."""
    if request.param == "file":
        return f"file://{tmp_path}/objects", {}
    return f"s3://{BUCKET}/{tmp_path.name}", request.getfixturevalue("server").options


def at(server: Server, tmp_path: Path, **options: str) -> ObjectTier:
    return ObjectTier(f"s3://{BUCKET}/{tmp_path.name}", server.options | options)


# -- the suite

CHECK = (
    OPEN
    + """
from everstep.testing import check_tier
kept = {}
if url == "memory://":
    check_tier(lambda folder: kept.setdefault(folder, ObjectTier(url)), walk=False)
else:
    check_tier(lambda folder: ObjectTier(url + str(folder), options))
"""
)


@pytest.mark.parametrize("url", ["memory://", pytest.param("file://", marks=pytest.mark.soak), f"s3://{BUCKET}"])
def test_an_object_store_keeps_the_promises_of_a_tier_when_killed_before_every_operation(
    url: str, server: Server
) -> None:
    checking = alone(CHECK, url, json.dumps(server.options))
    assert checking.wait(timeout=240) == 0


# -- crashes

WRITE = (
    OPEN
    + """
tier, where = ObjectTier(url, options), sys.argv[3]
def wait_to_be_killed(operation):
    if where in operation:
        print("now", flush=True)
        time.sleep(60)
tier.before = wait_to_be_killed
tier.put("step/blob", memoryview(bytes(40 << 20)))
"""
)


def kill_a_writer(place: tuple[str, dict[str, str]], where: str) -> None:
    url, options = place
    writer = alone(WRITE, url, json.dumps(options), where)
    assert writer.stdout is not None and writer.stdout.readline() == "now\n"
    time.sleep(0.5)  # parts are in flight, and arrive
    writer.kill()
    writer.wait()


def test_a_writer_killed_in_mid_upload_leaves_nothing_listed_and_the_next_put_succeeds(
    place: tuple[str, dict[str, str]], server: Server, tmp_path: Path
) -> None:
    kill_a_writer(place, f"at {32 << 20}")
    tier = ObjectTier(*place)
    assert tier.names("step") == []
    tier.put("step/blob", memoryview(LARGE))
    assert tier.get("step/blob") == LARGE
    if place[0].startswith("s3"):  # what only a rule of the bucket can remove
        assert len(server.unfinished(tmp_path.name)) == 1
        assert tier.sweep(0.0) == 0


def test_an_upload_whose_writer_died_before_it_got_its_name_is_swept_when_it_is_old(
    place: tuple[str, dict[str, str]],
) -> None:
    kill_a_writer(place, "put step/blob")
    tier = ObjectTier(*place)
    assert tier.names("step") == [] and tier.folders() == ["step"]
    tier.put("step/blob", memoryview(LARGE))
    assert tier.sweep(300.0) == 0
    deadline = time.monotonic() + 30
    while tier.sweep(0.0) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert tier.get("step/blob") == LARGE
    time.sleep(len(LARGE) / objects._UPLOAD_BYTES_PER_S + 1)
    assert tier.sweep(0.0) == 0, "a sweep must not take what a name points to"
    assert tier.get("step/blob") == LARGE
    tier.delete("step/blob")
    assert tier.folders() == []


RACE = (
    OPEN
    + """
me, size, start = int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
tier = ObjectTier(url, options)
tier.names()
time.sleep(max(0.0, start - time.time()))
try:
    tier.put("step/blob", memoryview(bytes([me]) * size))
    print("made")
except FileExistsError:
    print("there")
"""
)


@pytest.mark.parametrize("size", [100, 12 << 20])
def test_of_many_writers_of_a_name_exactly_one_makes_it(place: tuple[str, dict[str, str]], size: int) -> None:
    url, options = place
    start = time.time() + 3.0
    writers = [alone(RACE, url, json.dumps(options), str(me), str(size), str(start)) for me in range(5)]
    said = [writer.communicate(timeout=60)[0].strip() for writer in writers]
    assert sorted(said) == ["made"] + ["there"] * 4
    tier = ObjectTier(*place)
    assert tier.get("step/blob") == bytes([said.index("made")]) * size
    assert len(tier._objects("step")) == (1 if size < CHUNK_BYTES else 2), "a loser left its upload behind"
    tier.delete_folder("step")
    assert tier.folders() == []


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_server_that_goes_away_in_mid_upload_is_a_bounded_error_and_the_next_put_goes_through(
    how: str, tmp_path: Path
) -> None:
    server = Server()
    try:
        tier = at(server, tmp_path, **HASTY)
        tier.put("step/before", memoryview(b"there"))

        def stop(operation: str) -> None:
            if operation.endswith(f"at {16 << 20}"):
                server.stop() if how == "killed" else server.freeze()

        tier.before = stop
        began = time.monotonic()
        with pytest.raises(TierFailed, match="objects failed writing step/blob: the store cannot be reached") as failed:
            tier.put("step/blob", memoryview(bytes(40 << 20)))
        assert time.monotonic() - began < 20
        assert failed.value.errno == errno.EHOSTUNREACH
        tier.before = lambda operation: None
        server.start() if how == "killed" else server.thaw()
        assert "step/blob" not in tier.names("step")
        tier.put("step/blob", memoryview(LARGE))
        assert tier.get("step/blob") == LARGE
    finally:
        server.stop()


def test_an_answer_that_was_lost_after_the_pointer_was_made_is_no_failure(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, real = at(server, tmp_path), objects.obstore.put

    def twice(store: object, path: str, *arguments: object, **options: object) -> object:
        if options.get("mode") == "create":
            real(store, path, *arguments, **options)  # type: ignore[arg-type]
        return real(store, path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(objects.obstore, "put", twice)
    tier.put("step/blob", memoryview(LARGE))
    assert tier.get("step/blob") == LARGE
    assert len(server.objects(f"{tmp_path.name}/step")) == 2


# -- what is there


@pytest.mark.soak
def test_thousands_of_objects_are_all_listed_and_deleted(server: Server, tmp_path: Path) -> None:
    tier = at(server, tmp_path)
    inside = [f"step/blob-{i:05d}" for i in range(1100)]
    beside = [f"step-{i:010d}/blob" for i in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: tier.put(name, memoryview(b"x")), inside + beside))
    assert tier.names("step") == inside
    assert tier.folders() == ["step", *(name.removesuffix("/blob") for name in beside)]
    tier.delete_folder("step")
    assert tier.names("step") == [] and len(tier.folders()) == 1100


def test_folders_whose_names_begin_alike_are_apart(place: tuple[str, dict[str, str]]) -> None:
    tier = ObjectTier(*place)
    for name in ("step-1/a", "step-10/a", "step-1.json"):
        tier.put(name, memoryview(b"x"))
    tier.delete_folder("step-1")
    assert tier.names() == ["step-1.json"] and tier.folders() == ["step-10"]


def test_a_blob_that_looks_like_a_pointer_comes_back_as_it_was(place: tuple[str, dict[str, str]]) -> None:
    tier = ObjectTier(*place)
    for number, blob in enumerate((b"everstep-object %s\n" % (b"0" * 32), b"x" * objects._POINTER_BYTES)):
        tier.put(f"blob-{number}", memoryview(blob))
        assert tier.get(f"blob-{number}") == blob and tier.size(f"blob-{number}") == len(blob)


def test_what_a_store_cannot_copy_at_once_is_renamed_all_the_same(
    place: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_COPIED_BYTES", 1 << 20)
    tier = ObjectTier(*place)
    tier.put("old/large", memoryview(LARGE))
    tier.put("old/small", memoryview(b"x"))
    tier.rename_folder("old", "new")
    assert tier.folders() == ["new"] and tier.get("new/large") == LARGE and tier.get("new/small") == b"x"
    with pytest.raises(FileNotFoundError):
        tier.rename_folder("old", "newer")


def test_a_group_of_records_is_a_segment_that_stays_as_it_is(place: tuple[str, dict[str, str]]) -> None:
    tier, run = ObjectTier(*place), "a" * 32
    wanted = Wanted(name="grad.w", dtype="F32", shape=(3000,), start=(0,), extent=(3000,))
    layout = lay_out([wanted], ImageInfo(format=1, run=run, rank=0, world=1), 100)

    def record(step: int) -> tuple[Frame, list[memoryview]]:
        frame = Frame(
            format=1, run=run, generation="b" * 32, step=step, rank=0, world=1, cut_time=1.5, kind="record",
            layout=layout.digest, ranges=((len(layout.header), 12000),),
        )  # fmt: skip
        return frame, [memoryview(bytes([step]) * 12000)]

    LogWriter(tier, 0, 0, run, layout.header).append([record(1), record(2)])
    again = LogWriter(tier, 0, 0, run, layout.header)
    assert again.last == 2
    with pytest.raises(TierFailed, match="objects do not change; begin another blob"):
        again.append([record(3)])
    LogWriter(tier, 2, 0, run, layout.header).append([record(3)])
    for start, steps in ((0, [1, 2]), (2, [3])):
        log = read_log(tier, start, 0, run)
        assert [r.frame.step for r in log.records] == steps and log.problem == ""
        assert all(log.payload(r) == bytes([r.frame.step]) * 12000 for r in log.records)
    with pytest.raises(TierFailed, match="objects do not change"):
        tier.cut(log_name(0, 0), 4096)


# -- what is said


def refusing(status: int, code: str) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.mark.parametrize(
    ("status", "code", "number", "sentence"),
    [
        (403, "AccessDenied", errno.EACCES, "these credentials may not do that: allow them to"),
        (503, "SlowDown", errno.EBUSY, "the store asks for fewer requests"),
        (404, "NoSuchBucket", errno.ENODEV, "there is no such bucket: create it, or correct the URL"),
    ],
)
def test_a_refusal_says_tier_operation_and_what_to_do(status: int, code: str, number: int, sentence: str) -> None:
    server = refusing(status, code)
    try:
        options = {"endpoint": f"http://127.0.0.1:{server.server_port}", **KEYS, **HASTY}
        tier = ObjectTier("s3://bucket/run", options, name="archive")
        acts = {
            "writing blob": lambda: tier.put("blob", memoryview(b"x")),
            "writing large": lambda: tier.put("large", memoryview(LARGE)),
            "listing the top": lambda: tier.names(),
            "deleting folder": lambda: tier.delete_folder("folder"),
        }
        for what, act in acts.items():
            began = time.monotonic()
            with pytest.raises(TierFailed, match=f"archive failed {what}: {sentence}") as failed:
                act()
            assert failed.value.errno == number and time.monotonic() - began < 10
    finally:
        server.shutdown()
        server.server_close()


def test_a_store_that_is_not_there_is_a_bounded_error() -> None:
    began = time.monotonic()
    tier = ObjectTier("s3://bucket/run", {"endpoint": "http://127.0.0.1:9", **KEYS, **HASTY})
    with pytest.raises(TierFailed, match="objects failed reading blob: the store cannot be reached: is the endpoint"):
        tier.get("blob")
    assert time.monotonic() - began < 10


def test_without_credentials_the_error_says_which_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    options = {"endpoint": "http://127.0.0.1:9", "metadata_endpoint": "http://127.0.0.1:9", **HASTY}
    with pytest.raises(TierFailed, match="no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        ObjectTier("s3://bucket/run", options).put("blob", memoryview(b"x"))


def test_endpoint_and_credentials_come_from_the_environment_and_plain_http_only_from_an_endpoint_that_says_so(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    url = f"s3://{BUCKET}/{tmp_path.name}"
    for variable in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(variable, server.options["endpoint"])
        ObjectTier(url).put(variable.lower().replace("_", "-"), memoryview(b"x"))
        monkeypatch.delenv(variable)
    assert len(at(server, tmp_path).names()) == 2
    secure = {"endpoint": server.options["endpoint"].replace("http:", "https:"), **HASTY}
    with pytest.raises(TierFailed, match="cannot be reached"):
        ObjectTier(url, secure).names()


@pytest.mark.parametrize(
    ("url", "options", "sentence"),
    [
        ("ftp://bucket/run", {}, "must begin with one of s3://, gs://"),
        ("runs/gpt2", {}, "is no object store"),
        ("s3://bucket/run", {"nonsense": "1"}, "'nonsense' is not valid"),
        ("s3://bucket/run", {"max_retries": "many"}, "cannot be opened"),
        ("az://container/run", {}, "Account must be specified"),
    ],
)
def test_a_url_or_option_that_cannot_be_right_is_refused_at_once(
    url: str, options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(BadConfig, match=sentence):
        ObjectTier(url, options)


def test_without_the_package_one_sentence_names_the_extra() -> None:
    script = "import sys; sys.modules['obstore'] = None\nimport everstep.store.objects"
    ended = alone(script, stderr=-1)
    _, said = ended.communicate(timeout=60)
    assert said.strip().endswith("pip install 'everstep[objects]'")


def test_a_forked_child_is_told_so_instead_of_waiting_for_ever(place: tuple[str, dict[str, str]]) -> None:
    script = (
        OPEN
        + """
tier = ObjectTier(url, options)
tier.names()
child = os.fork()
if child == 0:
    try:
        ObjectTier(url, options).names()
    except OSError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    )
    said, _ = alone(script, place[0], json.dumps(place[1])).communicate(timeout=30)
    assert "was used before this process was forked" in said
