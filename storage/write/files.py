"""Creation of files; large ones bypass the page cache.

Copying a batch into the page cache takes more CPU time than compressing it, and the batch is rarely read soon, since
the next stage gets it from memory.
"""

import errno
import mmap
import os
from pathlib import Path

from metaloom.storage.format.files import Content, flags

_BLOCK = 4096
_BUFFER = 4 * 2**20
_WORTHWHILE = 256 * 2**10
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)
_CREATE = flags("O_WRONLY", "O_CREAT", "O_EXCL", "O_CLOEXEC")


class FileCreator:
    """Creates files. Not thread-safe."""

    def __init__(self) -> None:
        # Direct writes need page-aligned memory.
        self._buffer = memoryview(mmap.mmap(-1, _BUFFER))
        self._direct = getattr(os, "O_DIRECT", 0)

    def create(self, path: Path, content: Content) -> int:
        """Write a new file; return its descriptor, which the caller must sync and close.

        Raises:
            FileExistsError: the file exists.
        """
        direct = self._direct if sum(map(len, content)) >= _WORTHWHILE else 0
        descriptor = self._open(path, direct)
        try:
            self._write(descriptor, content)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _open(self, path: Path, direct: int) -> int:
        try:
            return os.open(path, _CREATE | direct, 0o666)
        except OSError as error:
            if not direct or error.errno not in _UNSUPPORTED:
                raise
        self._direct = 0
        path.unlink(missing_ok=True)  # some systems create the file before rejecting the flag
        return os.open(path, _CREATE, 0o666)

    def _write(self, descriptor: int, content: Content) -> None:
        import fcntl  # not needed on systems that only read runs

        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
            _write_all(descriptor, content)
            return
        try:
            self._write_blocks(descriptor, content)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            # The device requires larger blocks: write this file and later ones normally.
            self._direct = 0
            fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.truncate(descriptor, 0)
            _write_all(descriptor, content)

    def _write_blocks(self, descriptor: int, content: Content) -> None:
        filled = total = 0
        for piece in content:
            rest = memoryview(piece)
            total += len(rest)
            while rest:
                taken = min(len(rest), _BUFFER - filled)
                self._buffer[filled : filled + taken] = rest[:taken]
                rest = rest[taken:]
                filled += taken
                if filled == _BUFFER:
                    _write_all(descriptor, (self._buffer,))
                    filled = 0
        if filled:
            padded = -(-filled // _BLOCK) * _BLOCK
            _write_all(descriptor, (self._buffer[:padded],))
            os.truncate(descriptor, total)


def _write_all(descriptor: int, content: tuple[bytes | memoryview, ...]) -> None:
    for piece in content:
        rest = memoryview(piece)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
