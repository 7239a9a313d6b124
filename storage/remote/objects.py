"""The few requests that a run makes of an object store, through fsspec."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

from metaloom.storage.errors import StorageFailed, StoreError


class ObjectFolder:
    """The objects whose keys begin with a URL. Connects when it is first asked something.

    Every method raises StorageFailed when the store cannot be reached or refuses.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """The contents of objects, asked for at once; None for one that is not there."""
        with self._failures():
            paths = [self._path(key) for key in keys]
            found = cast(dict[str, Any], self._fs.cat(paths, on_error="return")) if paths else {}
            for answer in found.values():
                if isinstance(answer, Exception) and not isinstance(answer, FileNotFoundError):
                    raise answer
            return [found[path] if isinstance(found[path], bytes) else None for path in paths]

    def put_all(self, contents: Mapping[str, bytes]) -> None:
        """Store objects, over what may be there."""
        with self._failures():
            if contents:
                self._fs.pipe({self._path(key): content for key, content in contents.items()})

    def put_new(self, key: str, content: bytes) -> bool:
        """Store an object if there is none; return whether it was stored."""
        with self._failures():
            try:
                self._fs.pipe_file(self._path(key), content, mode="create")
            except FileExistsError:
                return False
            return True

    def remove(self, keys: Sequence[str]) -> None:
        """Take objects away."""
        with self._failures():
            if keys:
                self._fs.rm([self._path(key) for key in keys])

    def below(self, key: str) -> list[str]:
        """The keys that begin with a folder's."""
        with self._failures():
            prefix = self._path(key)
            return [key + path[len(prefix) :] for path in self._fs.find(prefix)]

    def folders(self) -> list[str]:
        """Names of what looks like a folder directly below."""
        with self._failures():
            try:
                entries = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
            return [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    @property
    def _root(self) -> str:
        return self._place[1].rstrip("/")

    @property
    def _fs(self) -> Any:
        return self._place[0]

    @cached_property
    def _place(self) -> tuple[Any, str]:
        # It takes as long to import as a run takes to open, and local runs do not need it.
        from fsspec.core import url_to_fs

        # What a listing once said would hide what other machines have stored since.
        return url_to_fs(self.url, use_listings_cache=False)

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
            raise self._failed(error, "Check bucket, network and credentials; then run the command again") from error

    def _failed(self, error: Exception, action: str) -> StorageFailed:
        return StorageFailed(
            self.url,
            found=f"{type(error).__name__}: {error}",
            required="an object store that answers, with permission to read and write",
            action=action,
        )
