"""The few requests that a run makes of an object store, through fsspec."""

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

from metaloom.storage.errors import StorageFailed, StoreError
from metaloom.storage.remote.deadlines import Deadlines, may_pass

# Bytes that are allowed for where nobody knows: of an entry of the log, of the answers that list a folder.
_SMALL_OBJECT = 2**16
_LISTING = 2**24
_AT_ONCE = 128


class ObjectFolder:
    """The objects whose keys begin with a URL. Connects when it is first asked something.

    Every method raises StorageFailed when the store refuses, or cannot be reached, or does not answer in time, however
    often it is asked (`deadlines.py`).
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def get_all(self, keys: Sequence[str], *, num_bytes: int | None = None) -> list[bytes | None]:
        """The contents of objects, asked for at once; None for one that is not there.

        Args:
            keys: of the objects.
            num_bytes: how much it is together, or at most, where it is known: what is more may take longer.
        """
        with self._failures():
            paths = [self._path(key) for key in keys]
            if not keys:
                return []
            size = len(keys) * _SMALL_OBJECT if num_bytes is None else num_bytes
            found = self._ask(size, lambda fs, limit: _contents(fs.cat(paths, on_error="return", **limit)))
            return [found[path] if isinstance(found[path], bytes) else None for path in paths]

    def put_all(self, contents: Mapping[str, bytes]) -> None:
        """Store objects, over what may be there."""
        with self._failures():
            if contents:
                objects = {self._path(key): content for key, content in contents.items()}
                self._ask(sum(map(len, objects.values())), lambda fs, limit: _pipe(fs, objects, limit))

    def put_new(self, key: str, content: bytes) -> bool:
        """Store an object if there is none; return whether it was stored."""
        with self._failures():
            try:
                path = self._path(key)
                self._ask(len(content), lambda fs, limit: fs.pipe_file(path, content, mode="create", **limit))
            except FileExistsError:
                return False
            return True

    def remove(self, keys: Sequence[str]) -> None:
        """Take objects away, those that are there."""
        with self._failures():
            if keys:
                paths = [self._path(key) for key in keys]
                self._ask(len(keys) * _SMALL_OBJECT, lambda fs, limit: _remove(fs, paths, limit))

    def below(self, key: str) -> list[str]:
        """The keys that begin with a folder's."""
        with self._failures():
            prefix = self._path(key)
            found: list[str] = self._ask(_LISTING, lambda fs, limit: fs.find(prefix, **limit))
            return [key + path[len(prefix) :] for path in found]

    def folders(self) -> list[str]:
        """Names of what looks like a folder directly below."""
        with self._failures():
            try:
                entries = self._ask(_LISTING, lambda fs, limit: fs.ls(self._root, detail=True, **limit))
            except FileNotFoundError:
                return []
            return [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]

    def _ask(self, num_bytes: int, request: Callable[[Any, dict[str, float]], Any]) -> Any:
        # Back ends that are not asynchronous have no deadline to give; that of Amazon's protocol is.
        seconds = self._deadlines.of_transfer(num_bytes)
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
        # It takes as long to import as a run takes to open, and local runs do not need it.
        from fsspec.core import url_to_fs

        # What a listing once said would hide what other machines have stored since.
        fs, root = url_to_fs(self.url, use_listings_cache=False, **self._options())
        if hasattr(fs, "retries"):
            fs.retries = 1
        return fs, root

    def _options(self) -> dict[str, Any]:
        """Options of S3's back end, which by itself asks 25 times, 15 seconds each, and says nothing."""
        if not self.url.startswith(("s3://", "s3a://")):
            return {}
        seconds = self._deadlines.seconds
        once = {"retries": {"total_max_attempts": 1, "mode": "standard"}}
        return {"config_kwargs": {"connect_timeout": seconds, "read_timeout": seconds, **once}}

    @contextmanager
    def _failures(self) -> Generator[None]:
        try:
            yield
        except StoreError:
            raise
        except ImportError as error:
            raise self._failed(error, "Install what it names: pip install 'metaloom[s3]' for s3://") from error
        # Each back end has errors of its own, and not all of them are OSErrors.
        except Exception as error:
            advice = "What was committed is safe. Check bucket, network and credentials; then run the command again"
            raise self._failed(error, f"{advice}, or `metaloom resume` what was training") from error

    def _failed(self, error: Exception, action: str) -> StorageFailed:
        often = f", {self._deadlines.tries} times" if may_pass(error) else ""
        return StorageFailed(
            self.url,
            found=f"{self._deadlines.problem(error)}{often}",
            required="an object store that answers, with permission to read and write",
            action=action,
        )


def _pipe(fs: Any, objects: Mapping[str, bytes], limit: dict[str, float]) -> None:
    if not fs.async_impl:
        fs.pipe(objects)
        return
    from fsspec.asyn import sync

    sync(fs.loop, _pipe_together, fs, objects, **limit)


async def _pipe_together(fs: Any, objects: Mapping[str, bytes]) -> None:
    # fsspec's own way leaves its requests running when the deadline has passed: they go on beside those that are made
    # again, and nobody hears what becomes of them.
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
    except FileNotFoundError:  # where one is missing, which S3 does not mind, the others may be left
        for path in paths:
            with suppress(FileNotFoundError):
                fs.rm(path, **limit)


def _contents(found: dict[str, Any]) -> dict[str, Any]:
    for answer in found.values():
        if isinstance(answer, Exception) and not isinstance(answer, FileNotFoundError):
            raise answer
    return found
