"""Log of a run as known to this machine, and the run's cache folder.

Segments appear and disappear in the folder atomically.
"""

import os
import re
import secrets
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from metaloom.storage.errors import DamagedRun, StoreError, system_errors
from metaloom.storage.format.files import folder_entries, lock, read_file, sync_file
from metaloom.storage.format.places import url_of
from metaloom.storage.format.segments import FOLDER, SEAL, segment_iterations
from metaloom.storage.format.sessions import CLAIM_NAME
from metaloom.storage.remote.entries import AT_ONCE, Entry, LoggedFile, entry_key, in_groups, problem_of
from metaloom.storage.remote.objects import ObjectFolder

_BATCHES = (2, 16, 128)
LARGEST = 2**40
_EMPTIED = b"emptied"
_OURS = ("writer.lock", "_quarantine", "_operator")


class RemoteLog:
    """Log at a URL, as of the last `pull`. Cached copies of its entries are kept in the folder `beside`.

    `files` contains the run's files, keyed by path. `owner` is the entry that began the newest session; None if it has
    ended.
    """

    def __init__(self, root: Path, url: str, beside: Path) -> None:
        self.root = root
        self.objects: ObjectFolder = ObjectFolder(url)
        self._beside = beside
        self._forget()

    @classmethod
    def of(cls, root: Path) -> "RemoteLog | None":
        url = url_of(root)
        return None if url is None else cls(root, url, log_folder(root))

    def pull(self) -> None:
        """Read new entries and update the folder.

        Raises DamagedRun if an entry is damaged, and StoreError if the URL contains a different run than the cache.
        """
        with self._locked():
            self._read_cached()
            batches = iter(_BATCHES)
            batch = next(batches)
            while self._pull_some(batch):
                batch = next(batches, batch)

    def append(self, entry: Entry, raw: bytes) -> None:
        """Add an entry that this process has stored."""
        with self._locked():
            self._read_cached()
            if entry.sequence == self.next:
                self._keep(entry, raw)

    def fetch(self, path: str) -> bool:
        """Download a file into the folder; return False if the log names no object for it.

        Raises DamagedRun if the file's object is missing or damaged.
        """
        file = self.files.get(path)
        if file is None or file.text is not None:
            return False
        self._fetch([(path, file)])
        return True

    def fetch_all(self, paths: Iterable[str]) -> None:
        """Download the missing files among `paths` in parallel. Raises the same errors as `fetch`."""
        wanted = ((path, file) for path in paths if (file := self.files.get(path)) and file.text is None)
        for group in in_groups((path, file) for path, file in wanted if not self.local_path(path).exists()):
            self._fetch(group)

    def _fetch(self, group: list[tuple[str, LoggedFile]]) -> None:
        size = sum(file.size for _, file in group)
        contents = self.objects.get_all([file.key for _, file in group], num_bytes=size)
        for (path, file), raw in zip(group, contents, strict=True):
            if raw is None:
                self.pull()  # the file may have been thinned or packed since
                if self.files.get(path) == file:
                    raise self.damaged_object(file, "missing")
            elif problem := problem_of(file, raw):
                raise self.damaged_object(file, problem)
            else:
                self.write(path, raw)

    def write(self, name: str, raw: bytes) -> None:
        """Write a file of the folder atomically."""
        path, segment = self.local_path(name), segment_of(name)
        if segment and not (self.root / segment).is_dir():  # a file without its segment would count as damage
            return
        part = self._beside / f"{secrets.token_hex(8)}.part"
        try:
            with open(part, "xb") as file:
                file.write(raw)
                sync_file(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    def damaged_object(self, file: LoggedFile, found: str) -> DamagedRun:
        url = self.objects.url
        return DamagedRun(
            f"{url}/{file.key}",
            found=found,
            required="the bytes that were committed",
            action=f"`metaloom verify {url}` lists all damage; `metaloom resume {url} --repair` recomputes it",
        )

    def is_own(self, session: str) -> bool:
        """Return True if a session belonged to this cache; it has ended if the caller holds the folder's lock."""
        return session in self._own

    def claim(self, session: str) -> None:
        """Record that a session belongs to this cache, before it stores anything."""
        with self._locked(), open(self._beside / "sessions", "ab") as file:
            file.write(f"{session}\n".encode())
            sync_file(file)
        self._read_sessions()

    def surplus(self) -> list[Path]:
        """Return the files in the folder that are not in the log."""
        segments = surplus_segments(self.root, self.files)
        surplus = segments.copy()
        for path, name in self.local_files():
            # For files without text, only the size is compared.
            file = self.files.get(name)
            may_be = file is not None and (file.text is not None or path.stat().st_size == file.size)
            if not may_be and not any(path.is_relative_to(folder) for folder in segments):
                surplus.append(path)
        return surplus

    def missing_texts(self) -> dict[Path, bytes]:
        """Return the content of small files that are missing or different in the folder, keyed by path."""
        texts = {self.local_path(n): file.text.encode() for n, file in self.files.items() if file.text is not None}
        return {path: raw for path, raw in texts.items() if not _holds(path, raw)}

    def changes(self) -> list[Path]:
        """Return the paths of files that differ from the log: new, changed or removed ones."""
        here = {name: path for path, name in self.local_files()}
        changed = [path for name, path in here.items() if not self._is_logged(name, path)]
        gone = [self.local_path(n) for n, file in self.files.items() if file.text is not None and n not in here]
        return [*changed, *gone]

    def local_files(self) -> Iterator[tuple[Path, str]]:
        """Yield the path of each file in the folder that belongs in the log, and its name in the log."""
        for folder, folders, names in os.walk(self.root):
            if Path(folder) == self.root:
                folders[:] = [name for name in folders if name not in _OURS]
                names = [name for name in names if not name.startswith(_OURS)]
            for name in names:
                if not CLAIM_NAME.fullmatch(name):
                    yield Path(folder) / name, self.name_of(Path(folder) / name)

    def name_of(self, path: Path) -> str:
        """Return a file's name in the log, in which sessions' folders have the names that they get when closed."""
        parts = list(path.relative_to(self.root).parts)
        if parts[0] == "_sessions" and not parts[1].endswith(".closed"):
            parts[1] += ".closed"
        return "/".join(parts)

    def local_path(self, name: str) -> Path:
        """Return the local path of a file in the log."""
        path = self.root / name
        if name.startswith("_sessions/"):
            open_folder = path.parent.with_name(path.parent.name.removesuffix(".closed"))
            return open_folder / path.name if open_folder.is_dir() else path
        return path

    def below(self, name: str) -> list[str]:
        """Return the names of the log's files at a path: the file itself, or all files of a segment."""
        if name in self.files:
            return [name]
        return [path for path in self.files if path.startswith(f"{name}/")] if segment_of(name) == name else []

    def cached_entries(self) -> list[bytes]:
        return read_file(self._entries, limit=LARGEST).splitlines(keepends=True)[: self.next] if self.next else []

    def stored_entry(self, sequence: int) -> bytes | None:
        return self.objects.get_all([entry_key(sequence)])[0]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield each problem with the run's objects, as (path in the run or key of the entry, description).

        Damaged copies in the folder are replaced if their objects are intact.
        """
        cached = self.cached_entries()
        for start in range(0, len(cached), AT_ONCE):
            keys = [entry_key(n) for n in range(start, min(start + AT_ONCE, len(cached)))]
            for n, raw in enumerate(self.objects.get_all(keys), start):
                if raw != cached[n]:
                    yield entry_key(n), "missing" if raw is None else "not the entry that was written"
        for group in in_groups((name, file) for name, file in self.files.items() if file.text is None):
            size = sum(file.size for _, file in group)
            contents = self.objects.get_all([file.key for _, file in group], num_bytes=size)
            for (name, file), raw in zip(group, contents, strict=True):
                path = self.local_path(name)
                if problem := "missing" if raw is None else problem_of(file, raw):
                    yield name, f"its object {file.key} {problem}"
                elif raw is not None and (not path.exists() or read_file(path, limit=LARGEST) != raw):
                    self.write(name, raw)

    def _is_logged(self, name: str, path: Path) -> bool:
        file = self.files.get(name)
        if file is None or file.text is None:
            return file is not None and path.stat().st_size == file.size
        return read_file(path, limit=LARGEST) == file.text.encode()

    def _forget(self) -> None:
        self.files: dict[str, LoggedFile] = {}
        self.owner: Entry | None = None
        self.next = 0
        self.last_hash = ""
        self._last_session = ""
        self._offset = 0
        self._own: set[str] = set()
        self._here: set[str] = set()

    @property
    def _entries(self) -> Path:
        return self._beside / "entries"

    def _read_cached(self) -> None:
        """Read cached entries that have not been read yet."""
        if not self.root.is_dir() and self._entries.exists():
            # The cache was emptied: its sessions have ended, but the files that they committed are missing.
            self._entries.unlink()
            with open(self._beside / "sessions", "ab") as file:
                file.write(_EMPTIED + b"\n")
            self._forget()
        self._read_sessions()
        if not self._entries.exists():
            return
        with open(self._entries, "r+b") as file:
            file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):  # truncated by a power failure
                    file.truncate(self._offset)
                    break
                self._take(self._checked(raw, str(self._entries)))
                self._offset += len(raw)

    def _read_sessions(self) -> None:
        if (self._beside / "sessions").exists():
            raw = (self._beside / "sessions").read_bytes()
            self._own = {line.decode() for line in raw.split()}
            self._here = {line.decode() for line in raw.rpartition(_EMPTIED)[2].split()}

    def _pull_some(self, count: int) -> bool:
        """Read up to `count` new entries, after checking the newest known one; return True if there may be more."""
        known = self.next > 0
        keys = [entry_key(n) for n in range(self.next - known, self.next + count)]
        found = self.objects.get_all(keys)
        if known:
            newest, other = found.pop(0), "no"
            if newest is not None:
                with open(self._entries, "rb") as file:
                    file.seek(self._newest_offset)
                    other = "another" if file.readline() != newest else ""
            if other:
                raise StoreError(
                    self.objects.url,
                    found=f"{other} entry {self.next - 1} in the log",
                    required="the same entry as in the cache",
                    action=f"If the run was removed or replaced on purpose, remove {self.root} and {self._beside} too",
                )
        for n, raw in enumerate(found):
            if raw is None:
                behind = found[n + 1 :] or [self.stored_entry(self.next + 1)]
                if not any(later is not None for later in behind):
                    return False
                if self.stored_entry(self.next) is None:  # still missing
                    where = f"{self.objects.url}/{entry_key(self.next)}"
                    raise self._damaged_entry(where, "missing; later ones exist")
                return True
            entry = self._checked(raw, f"{self.objects.url}/{entry_key(self.next)}")
            foreign = entry.session not in self._here  # this cache has the files that it committed
            if foreign:
                self._apply(entry)
            self._keep(entry, raw)
            if foreign and entry.kind == "begin":
                self._drop_surplus_segments()
        return True

    def _damaged_entry(self, where: str, found: str) -> DamagedRun:
        return DamagedRun(
            where,
            found=found,
            required="the entry that was written",
            action="Restore this object from a copy, such as the cache of another machine",
        )

    def _checked(self, raw: bytes, where: str) -> Entry:
        try:
            entry = Entry.parse(raw)
            if (entry.sequence, entry.previous) != (self.next, self.last_hash):
                raise ValueError("does not follow the entry before it")
            if entry.kind != "begin" and entry.session != self._last_session:
                raise ValueError("belongs to a different session from the one that had begun")
        except ValueError as error:
            raise self._damaged_entry(where, str(error)) from None
        return entry

    def _keep(self, entry: Entry, raw: bytes) -> None:
        with open(self._entries, "ab") as file:
            file.write(raw)
            sync_file(file)
        self._take(entry)
        self._offset += len(raw)

    def _take(self, entry: Entry) -> None:
        self._newest_offset = self._offset
        self.next: int = entry.sequence + 1
        self.last_hash: str = entry.sha256
        self._last_session = entry.session
        self.owner = {"begin": entry, "commit": self.owner, "end": None}[entry.kind]
        for name in entry.removed:
            self.files.pop(name, None)
        self.files.update(entry.files)

    def _apply(self, entry: Entry) -> None:
        for name in ("_commits", "_sessions", "data.zarr"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        # Add new files first: a reader that does not find a record looks for its segment.
        for folder in sealed_in(entry.files):
            about = {n: f.text for n, f in {**self.files, **entry.files}.items() if segment_of(n) == folder}
            texts = {name: text for name, text in about.items() if text is not None}
            place_segment(self.root, self._beside, folder, texts)
        moved = {file.key: name for name, file in entry.files.items() if entry.is_moved(name)}
        for name, file in self.files.items() if moved else ():
            if file.text is None and file.key in moved:  # hard-link the copy to its new name
                with suppress(FileNotFoundError, FileExistsError):
                    os.link(self.local_path(name), self.local_path(moved[file.key]))
        for name, file in entry.files.items():
            if file.text is not None:
                if not _holds(self.local_path(name), file.text.encode()):
                    self.write(name, file.text.encode())
            elif not entry.is_moved(name):
                self.local_path(name).unlink(missing_ok=True)  # a copy of earlier content
        for folder in sealed_in(entry.removed):
            drop_segment(self.root / folder, self._beside)
        for name in entry.removed:
            self.local_path(name).unlink(missing_ok=True)

    def _drop_surplus_segments(self) -> None:
        """Remove segments that a session in this folder wrote but did not commit."""
        surplus = surplus_segments(self.root, self.files)
        for folder in surplus:
            drop_segment(folder, self._beside)
        for path, raw in self.missing_texts().items() if surplus else ():
            self.write(self.name_of(path), raw)

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Within the block, lock the cache against other processes on this machine."""
        self._beside.mkdir(parents=True, exist_ok=True)
        with open(self._beside / "lock", "ab") as file:
            lock(file.fileno(), wait=True)
            yield


def follow(root: Path) -> RemoteLog | None:
    """Pull and return the log of a cache folder; None for other folders."""
    log = RemoteLog.of(root)
    if log is not None:
        action = "Choose another folder: METALOOM_CACHE=FOLDER"
        with system_errors(root, required="a cache that can be written", action=action):
            log.pull()
    return log


def log_folder(root: Path) -> Path:
    return root.with_name(f".{root.name}.log")


def _holds(path: Path, raw: bytes) -> bool:
    return path.is_file() and read_file(path, limit=LARGEST) == raw


_SEGMENT = re.compile(rf"({FOLDER}/\d{{8}}-\d{{8}})(/.*)?", re.ASCII)


def segment_of(name: str) -> str | None:
    """Return the path of the segment that contains a file; None for other files."""
    match = _SEGMENT.fullmatch(name)
    return match[1] if match else None


def sealed_in(names: Iterable[str]) -> set[str]:
    """Return the folders of segments whose seals are among the files."""
    return {folder for name in names if (folder := segment_of(name)) and name == f"{folder}/{SEAL}"}


def surplus_segments(root: Path, files: Iterable[str]) -> list[Path]:
    """Return the segment folders whose seals are not among the log's files."""
    sealed, entries = sealed_in(files), folder_entries(root / FOLDER) or []
    names = sorted(entry.name for entry in entries if segment_iterations(entry.name) is not None)
    return [root / FOLDER / name for name in names if f"{FOLDER}/{name}" not in sealed]


def place_segment(root: Path, beside: Path, folder: str, texts: Mapping[str, str]) -> None:
    """Create or replace a cached segment with its small files; large ones are downloaded on demand."""
    part = beside / f"{secrets.token_hex(8)}.part"
    for name, text in texts.items():
        path = part / name.removeprefix(f"{folder}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8", newline="")
    drop_segment(root / folder, beside)
    (root / folder).parent.mkdir(exist_ok=True)
    os.rename(part, root / folder)


def drop_segment(folder: Path, beside: Path) -> None:
    part = beside / f"{secrets.token_hex(8)}.part"
    try:
        os.rename(folder, part)
    except FileNotFoundError:
        return
    shutil.rmtree(part)
