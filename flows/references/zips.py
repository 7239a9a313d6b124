"""Zip files of reference runs: written the same for the same files, and unpacked only if they could be ours."""

import errno
import io
import struct
import zlib
from pathlib import Path, PurePosixPath
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from metaloom.flows.references.remedies import broken

LARGEST_ARCHIVE = 2**28
_LARGEST_RUN = 2**30
_MOST_FILES = 10_000
_DEEPEST = 16
_ENTRY = b"PK\x01\x02"  # begins every entry in the table of contents of a zip
_NO_ARCHIVE = (BadZipFile, OSError, RuntimeError, ValueError, EOFError, zlib.error, struct.error)
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE)
_BEGINNING = (1980, 1, 1, 0, 0, 0)  # of time, to zip


def pack(folder: Path, archive: Path) -> Path:
    """Write all files of a folder into an archive, the same bytes for the same files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "writer.lock")
    with ZipFile(archive, "w", ZIP_DEFLATED, compresslevel=9) as opened_archive:
        for path in files:
            info = ZipInfo(path.relative_to(folder).as_posix(), _BEGINNING)
            info.external_attr = 0o644 << 16
            opened_archive.writestr(info, path.read_bytes(), ZIP_DEFLATED)
    return archive


def unpack(raw: bytes, archive: Path, folder: Path) -> None:
    """Unpack what was read of an archive, which somebody may have replaced since."""
    if raw.count(_ENTRY) > _MOST_FILES:
        raise broken(archive, f"holds more than {_MOST_FILES} files, more than any reference does")
    try:
        with ZipFile(io.BytesIO(raw)) as opened_archive:
            _require_plain(archive, opened_archive)
            opened_archive.extractall(folder)
    except _NO_ARCHIVE as error:
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            raise
        raise broken(archive, f"cannot be unpacked ({type(error).__name__}: {error})") from None


def _require_plain(archive: Path, opened_archive: ZipFile) -> None:
    """Refuse what `pack` does not write: other names than of files within, twice the same one, more than fits."""
    entries, names = opened_archive.infolist(), opened_archive.namelist()
    for entry in entries:
        name = PurePosixPath(entry.filename)
        is_within = not name.is_absolute() and ".." not in name.parts and str(name) == entry.filename
        # Others may give gigabytes for each kilobyte, all at once.
        is_known = entry.compress_type in (ZIP_STORED, ZIP_DEFLATED)
        if not (is_within and is_known and len(name.parts) <= _DEEPEST):
            raise broken(archive, f"holds {entry.filename[:80]!r}, which no reference does")
    if len({*names}) < len(names):
        raise broken(archive, "holds several files of the same name")
    if (size := sum(entry.file_size for entry in entries)) > _LARGEST_RUN:
        raise broken(archive, f"holds {size} bytes, more than any reference does")
