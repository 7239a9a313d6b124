"""Compare what an object store holds of a run with its log."""

from collections.abc import Iterator

from metaloom.storage.format.files import read_file
from metaloom.storage.remote.entries import AT_ONCE, LoggedFile, entry_key, in_groups, problem_of
from metaloom.storage.remote.log import LARGEST, RemoteLog


def problems(log: RemoteLog) -> Iterator[tuple[str, str]]:
    """Find what is wrong with the objects of the run: (path in the run or key of the entry, problem).

    Copies in the folder that are not what was committed, while their objects are, are replaced.
    """
    cached = log.cached_entries()
    for start in range(0, len(cached), AT_ONCE):
        keys = [entry_key(n) for n in range(start, min(start + AT_ONCE, len(cached)))]
        for n, raw in enumerate(log.objects.get_all(keys), start):
            if raw != cached[n]:
                yield entry_key(n), "is missing" if raw is None else "is not the entry that was written"
    for group in in_groups((name, file) for name, file in log.files.items() if file.text is None):
        keys = [file.key for _, file in group]
        for (name, file), raw in zip(
            group, log.objects.get_all(keys, num_bytes=sum(file.size for _, file in group)), strict=True
        ):
            problem = "is missing" if raw is None else problem_of(file, raw)
            if problem:
                yield name, f"its object {file.key} {problem}"
            elif raw is not None:
                _mend_copy(log, name, raw)


def give_up(log: RemoteLog, name: str) -> LoggedFile:
    """Take a file whose object is damaged for one that is not stored; a sound copy here is then stored again."""
    file = log.files.pop(name)
    path = log.local_path(name)
    if path.exists() and problem_of(file, read_file(path, limit=LARGEST)):
        path.unlink()
    return file


def _mend_copy(log: RemoteLog, name: str, raw: bytes) -> None:
    path = log.local_path(name)
    if not path.exists() or read_file(path, limit=LARGEST) != raw:
        log.write(name, raw)
