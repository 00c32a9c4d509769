"""A URL becomes a store of obstore, and what a store complains about becomes a sentence to act on.

Credentials, region and endpoint come from the options or from the environment (AWS_ACCESS_KEY_ID, AWS_REGION,
AWS_ENDPOINT_URL and so on); profiles in files are not read. Every request has a time limit and so have its retries.
Plain http is spoken only to an endpoint that says so.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from everstep.errors import BadConfig, TierFailed

try:
    import obstore.exceptions as refusals
    from obstore.store import from_url
except ImportError:
    raise BadConfig("object stores need a package that is not installed: pip install 'everstep[objects]'") from None

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_SCHEMES = ("s3", "gs", "az", "file", "memory")
_LIMITS = {"timeout": "60s", "connect_timeout": "5s"}
_RETRIES = {"max_retries": "5", "retry_timeout_s": "120"}
# What obstore wants apart from the settings of the store itself; it panics where it finds them among those.
_OF_THE_CLIENT = frozenset({
    "allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only", "http2_only", "pool_idle_timeout",
    "pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes", "proxy_url", "read_timeout", "root_certificate",
    "timeout", "user_agent",
})  # fmt: skip

_NO_CREDENTIALS = (
    "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give this machine a role"
)
_NOT_ALLOWED = "these credentials may not do that: allow them to get, put, delete and list objects under this URL"
_NO_BUCKET = "there is no such bucket: create it, or correct the URL"
_THROTTLED = "the store asks for fewer requests: write less often, or wait; it is tried again"
_NOT_REACHED = "the store cannot be reached: is the endpoint right, and is it up? It is tried again"
_NOT_ABLE = "this store lacks an operation that is needed, such as a put that refuses a name that is taken"
# (words of the complaint, the error's number, the sentence); the first that is found counts. Complaints quote URLs, so
# the words must be such as nobody calls a bucket.
_SENTENCES = (
    (("<Code>NoSuchBucket<", "<Code>ContainerNotFound<", "specified bucket does not exist"), errno.ENODEV, _NO_BUCKET),
    (("/latest/api/token", "/latest/meta-data/", "/computeMetadata/v1", "/metadata/identity/"),
     errno.EACCES, _NO_CREDENTIALS),
    (("<Code>SlowDown<", "status code: 429", "status code: 503"), errno.EBUSY, _THROTTLED),
    (("status code: 401", "status code: 403", "Permission denied (os error"), errno.EACCES, _NOT_ALLOWED),
    (("HTTP error: ", "status code: 502", "status code: 504"), errno.EHOSTUNREACH, _NOT_REACHED),
)  # fmt: skip


def open_store(url: str, options: Mapping[str, str]) -> ObjectStore:
    scheme = urlsplit(url).scheme
    if scheme not in _SCHEMES:
        raise BadConfig(
            f"{url!r} is no object store: it must begin with one of {', '.join(f'{s}://' for s in _SCHEMES)}"
        )
    try:
        if scheme == "file":
            return from_url(url, mkdir=True, automatic_cleanup=True)
        if scheme == "memory":
            return from_url(url)
        config: dict[str, Any] = {**_endpoint_from_the_environment(scheme), **options}
        client: dict[str, Any] = _LIMITS | {key: config.pop(key) for key in _OF_THE_CLIENT & config.keys()}
        retries = {key: config.pop(key, default) for key, default in _RETRIES.items()}
        if any("endpoint" in key.lower() and value.startswith("http://") for key, value in config.items()):
            client["allow_http"] = "true"
        return from_url(
            url,
            config=cast(Any, config),  # a mapping of strings, of which obstore says itself what is unknown
            client_options=cast(Any, client),
            retry_config={
                "max_retries": int(retries["max_retries"]),
                "retry_timeout": timedelta(seconds=float(retries["retry_timeout_s"])),
            },
        )
    except (refusals.BaseError, ValueError) as error:
        raise BadConfig(f"{url} cannot be opened: {_first_line(error)}") from error


def _endpoint_from_the_environment(scheme: str) -> dict[str, str]:
    """As Amazon's own tools look for it. obstore knows the second name by itself, but this must see its scheme."""
    if scheme == "s3":
        for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
            if os.environ.get(variable):
                return {"endpoint": os.environ[variable]}
    return {}


def translated(error: Exception, tier: str, what: str, url: str) -> OSError:
    """What obstore raised, as a tier says it."""
    text = str(error)
    if isinstance(error, refusals.AlreadyExistsError | refusals.PreconditionError):
        return FileExistsError(errno.EEXIST, "a name never changes its content", f"{url} ({what})")
    number, sentence = next(
        ((number, sentence) for words, number, sentence in _SENTENCES if any(word in text for word in words)),
        (errno.EIO, ""),
    )
    if isinstance(error, FileNotFoundError) and sentence != _NO_BUCKET:
        return FileNotFoundError(errno.ENOENT, "no such object", f"{url} ({what})")
    if isinstance(error, refusals.NotSupportedError):
        number, sentence = errno.EOPNOTSUPP, _NOT_ABLE
    said = _first_line(error)
    return TierFailed(
        number, f"{tier} failed {what}: {sentence} ({said})" if sentence else f"{tier} failed {what}: {said}", url
    )


def _first_line(error: Exception) -> str:
    """Without the structures that obstore appends for those who debug it, nor pages that a server sent."""
    line = str(error).partition("\n")[0].strip()
    return line if len(line) <= 300 else f"{line[:300]}..."


class _Threads:
    pid = 0  # the process in which obstore has its threads


def stay_in_one_process(tier: str, url: str) -> None:
    """obstore's threads do not follow a fork: whoever asks it there waits for ever, so nobody may."""
    _Threads.pid = _Threads.pid or os.getpid()
    if _Threads.pid != os.getpid():
        raise TierFailed(
            errno.EDEADLK,
            f"{tier} was used before this process was forked, and its connections did not come along: "
            "start a process of its own instead of forking, or fork before the first use",
            url,
        )
