"""Requests to an object store through fsspec, with deadlines and retries."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from metaloom.storage.errors import StorageFailed, StoreError

TIMEOUT, TRIES = "METALOOM_STORE_TIMEOUT", "METALOOM_STORE_TRIES"
_SLOWEST_BYTES_PER_SECOND = 100_000
_FIRST_PAUSE_SECONDS = 0.5
# Temporary errors, listed by name because their packages are not imported for local runs.
_PASSING = {"HTTPClientError", "ConnectionError", "ClientConnectionError", "ClientPayloadError", "IncompleteRead"}
_SILENCE = ("ReadTimeoutError", "ConnectTimeoutError", "SocketTimeoutError", "ServerTimeoutError")
_FINAL = (FileNotFoundError, FileExistsError, PermissionError)
_REFUSED = range(400, 500)
_SLOW_DOWN = (408, 425, 429)

_log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Deadlines:
    """Limits for each request: the maximum time without a response, and the number of attempts before the run stops.

    A whole response may take twice as long as `seconds`, plus its size at 100 kB/s.
    """

    seconds: float = 20.0
    tries: int = 5

    @classmethod
    def chosen(cls) -> "Deadlines":
        """Return the deadlines set by $METALOOM_STORE_TIMEOUT (seconds) and $METALOOM_STORE_TRIES.

        Raises StorageFailed if a value is not a valid number.
        """
        return cls(_chosen(TIMEOUT, cls.seconds), int(_chosen(TRIES, cls.tries, at_least=1)))

    def ask(self, url: str, request: Callable[[], Answer]) -> Answer:
        """Make a request, retrying with a warning if an error may be temporary. Raises the last attempt's error."""
        pause = _FIRST_PAUSE_SECONDS
        for n in range(2, self.tries + 1):
            try:
                return request()
            except Exception as error:
                if not may_pass(error):
                    raise
                _log.warning("%s: %s, trying again (%d of %d)", url, self.problem(error), n, self.tries)
            time.sleep(pause)
            pause *= 2
        return request()

    def problem(self, error: Exception) -> str:
        if type(error).__name__ in _SILENCE:
            return f"no answer for {self.seconds:g} s"
        if isinstance(error, TimeoutError):
            return "no complete answer in time"
        return f"{type(error).__name__}: {error}"


def may_pass(error: Exception) -> bool:
    if isinstance(error, _FINAL):
        return False
    if isinstance(error, OSError):  # unless the store rejected the request itself
        response: dict[str, dict[str, int]] = getattr(error.__cause__, "response", {})
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status not in _REFUSED or status in _SLOW_DOWN
    return any(kind.__name__ in _PASSING for kind in type(error).__mro__)


def _chosen(name: str, default: float, at_least: float = 0.001) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text or default)
    except ValueError:
        value = float("nan")
    if not at_least <= value <= 86_400:
        raise StorageFailed(
            f"${name}",
            found=repr(text),
            required=f"a number from {at_least:g} to 86400",
            action=f"The default is {default:g}",
        )
    return value


# Assumed sizes in bytes, if unknown, of a log entry and of a listing.
_SMALL_OBJECT = 2**16
_LISTING = 2**24
_LARGE = 2**26  # bytes from which an object is worth reading in parts
_AT_ONCE = 128
_S3 = ("s3://", "s3a://")


class ObjectFolder:
    """Objects below a URL. Connects on first use.

    All methods raise StorageFailed if the store rejects a request, is unreachable, or times out on every attempt; see
    `Deadlines`.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def get_all(self, keys: Sequence[str], *, num_bytes: int | None = None) -> list[bytes | None]:
        """Fetch the contents of objects in parallel; None for a missing object.

        `num_bytes` is the total size or an upper bound, if known. Larger requests may take longer.
        """
        with self._failures():
            paths = [self._path(key) for key in keys]
            size = len(keys) * _SMALL_OBJECT if num_bytes is None else num_bytes
            # Otherwise, S3's back end asks for an object's size before it reads it, to read it in parts if it is large.
            whole = {"max_concurrency": 1} if self.url.startswith(_S3) and size <= _LARGE else {}
            found = self._ask(size, lambda fs, limit: _contents(fs.cat(paths, on_error="return", **whole, **limit)))
            return [found[path] if isinstance(found[path], bytes) else None for path in paths]

    def put_all(self, contents: Mapping[str, bytes]) -> None:
        """Store objects, replacing existing ones."""
        with self._failures():
            if contents:
                objects = {self._path(key): content for key, content in contents.items()}
                self._ask(sum(map(len, objects.values())), lambda fs, limit: _pipe(fs, objects, limit))

    def put_new(self, key: str, content: bytes) -> bool:
        """Store an object unless it exists; return True if it was stored."""
        with self._failures():
            try:
                path = self._path(key)
                self._ask(len(content), lambda fs, limit: fs.pipe_file(path, content, mode="create", **limit))
            except FileExistsError:
                return False
            return True

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, skipping missing ones."""
        with self._failures():
            if keys:
                paths = [self._path(key) for key in keys]
                self._ask(len(keys) * _SMALL_OBJECT, lambda fs, limit: _remove(fs, paths, limit))

    def below(self, key: str) -> list[str]:
        """Return the keys below a folder."""
        with self._failures():
            prefix = self._path(key)
            found: list[str] = self._ask(_LISTING, lambda fs, limit: fs.find(prefix, **limit))
            return [key + path[len(prefix) :] for path in found]

    def folders(self) -> list[str]:
        """Return the names of the folder-like prefixes directly below the URL."""
        with self._failures():
            try:
                entries = self._ask(_LISTING, lambda fs, limit: fs.ls(self._root, detail=True, **limit))
            except FileNotFoundError:
                return []
            return [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]

    def _ask(self, num_bytes: int, request: Callable[[Any, dict[str, float]], Any]) -> Any:
        # Deadlines need an asynchronous back end, such as S3's. They cover request, response and transfer.
        seconds = 2 * self._deadlines.seconds + num_bytes / _SLOWEST_BYTES_PER_SECOND
        limit = {"timeout": seconds} if self._fs.async_impl else {}
        return self._deadlines.ask(self.url, lambda: request(self._fs, limit))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    @property
    def _root(self) -> str:
        return self._place[1].rstrip("/")

    @property
    def _fs(self) -> Any:
        return self._place[0]

    @cached_property
    def _deadlines(self) -> Deadlines:
        return Deadlines.chosen()

    @cached_property
    def _place(self) -> tuple[Any, str]:
        # Imported here because the import takes as long as opening a run, and local runs do not need it.
        from fsspec.core import url_to_fs

        options: dict[str, Any] = {}
        if self.url.startswith(_S3):  # whose back end retries 25 times, 15 seconds each
            seconds = self._deadlines.seconds
            once = {"retries": {"total_max_attempts": 1, "mode": "standard"}}
            options = {"config_kwargs": {"connect_timeout": seconds, "read_timeout": seconds, **once}}
        # Cached listings would hide what other machines have stored since.
        fs, root = url_to_fs(self.url, use_listings_cache=False, **options)
        if hasattr(fs, "retries"):
            fs.retries = 1
        return fs, root

    @contextmanager
    def _failures(self) -> Generator[None]:
        try:
            yield
        except StoreError:
            raise
        except ImportError as error:
            raise self._failed(error, "Install the missing package: pip install 'metaloom[s3]' for s3://") from error
        # Back ends raise their own errors, not all of which are OSErrors.
        except Exception as error:
            advice = "Committed data is safe. Check bucket, network and credentials; then run the command again"
            raise self._failed(error, f"{advice}, or continue the training with `metaloom resume`") from error

    def _failed(self, error: Exception, action: str) -> StorageFailed:
        often = f", {self._deadlines.tries} times" if may_pass(error) else ""
        return StorageFailed(
            self.url,
            found=f"{self._deadlines.problem(error)}{often}",
            required="a reachable object store with permission to read and write",
            action=action,
        )


def _pipe(fs: Any, objects: Mapping[str, bytes], limit: dict[str, float]) -> None:
    if not fs.async_impl:
        fs.pipe(objects)
        return
    from fsspec.asyn import sync

    sync(fs.loop, _pipe_together, fs, objects, **limit)


async def _pipe_together(fs: Any, objects: Mapping[str, bytes]) -> None:
    # fsspec's own timeout leaves its requests running after the deadline. They would compete with the retries.
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def put(path: str, content: bytes) -> None:
        async with at_once:
            await fs._pipe_file(path, content)

    try:
        async with asyncio.TaskGroup() as requests:
            for path, content in objects.items():
                requests.create_task(put(path, content))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__


def _remove(fs: Any, paths: list[str], limit: dict[str, float]) -> None:
    try:
        fs.rm(paths, **limit)
    except FileNotFoundError:  # if one is missing, back ends other than S3 may skip the rest
        for path in paths:
            with suppress(FileNotFoundError):
                fs.rm(path, **limit)


def _contents(found: dict[str, Any]) -> dict[str, Any]:
    for answer in found.values():
        if isinstance(answer, Exception) and not isinstance(answer, FileNotFoundError):
            raise answer
    return found
