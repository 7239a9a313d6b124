"""Writing of a run in object storage, where a write takes effect when the next log entry is put.

An entry is put on the condition that its number is free. A new session takes the next number, after which any put by an
earlier session fails. Objects are uploaded below the session's prefix before the entry that names them, so uploads by a
superseded session have no effect.
"""

import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metaloom.storage.errors import RunLocked, StorageFailed, fenced_out
from metaloom.storage.format.files import read_file
from metaloom.storage.format.places import argument
from metaloom.storage.format.provenance import utc
from metaloom.storage.remote.entries import Entry, Kind, LoggedFile, entry_key, object_key
from metaloom.storage.remote.log import LARGEST, RemoteLog

_FILES_PER_ENTRY = 1000
_BYTES_AT_ONCE = 2**26


class RemoteSession:
    """Permission to append to a run's log, until the session ends or another takes over."""

    def __init__(self, log: RemoteLog, token: str) -> None:
        self._log = log
        self._token = token
        self._next = log.next
        self._previous = log.last_hash
        self._failed = False
        self._given_up: dict[str, LoggedFile] = {}

    @classmethod
    def begin(cls, log: RemoteLog, token: str, *, take_over: bool) -> "RemoteSession":
        """Begin a session. The caller must hold the cache folder's lock.

        Raises RunLocked if a session on another machine has not ended, and StorageFailed if the store cannot be written
        or does not support conditional puts.
        """
        while True:
            log.pull()
            before = log.owner
            if before is not None and not take_over and not log.is_own(before.session):
                dead = f"`metaloom resume {argument(log.root)} --take-over`"
                if "run.json" not in log.files:
                    dead = f"it had not even created the run: remove {log.objects.url}, or choose another name"
                who = before.about
                raise RunLocked(
                    log.objects.url,
                    found=f"process {who.get('pid')} on {who.get('host')} has been writing it since {who.get('since')}",
                    required="no other writer",
                    action=f"Wait for it or stop it. This machine cannot know whether it is dead; if it is: {dead}",
                )
            log.claim(token)
            session = cls(log, token)
            if session._put("begin", about={"host": socket.gethostname(), "pid": os.getpid(), "since": utc()}):
                break  # otherwise another session has just begun
        session._require_conditions()
        if before is not None:
            # That session was killed, perhaps between upload and commit, or before removing replaced objects.
            used = {file.key for file in log.files.values()}
            log.objects.remove([key for key in log.objects.below("_objects/") if key not in used])
        return session

    def commit(self, changed: Mapping[Path, Path | None]) -> None:
        """Commit the current state of some files atomically.

        Files that were only moved are mapped to their previous paths; the folder need not contain them. Raises
        FencedOut if a later session has begun, and StorageFailed if the store cannot be written, which ends the
        session.
        """
        names = {path: self._log.name_of(path) for path in changed}
        # Files whose objects are stored under their previous names.
        sources = {names[path]: self._log.name_of(old) for path, old in changed.items() if old is not None}
        logged = {name: self._log.files.get(source) for name, source in sources.items()}
        moved = {name: file for name, file in logged.items() if file is not None and file.key}
        present = [path for path, name in names.items() if path.is_file() and name not in moved]
        gone = (name for path, name in names.items() if path not in present and name not in moved)
        removed = [known for name in gone for known in self._known(name)]
        if not present and not removed and not moved:
            return
        touched = (*(names[path] for path in present), *removed)
        before = [self._log.files.get(name) or self._given_up.pop(name, None) for name in touched]
        try:
            files = {**self._upload({path: names[path] for path in present}), **moved}
            removed = [name for name in removed if name not in files]
            if not self._put("commit", files=files, removed=removed):
                raise fenced_out(self._log.objects.url, self._token)
            # Remove unreferenced objects, but only after the entry is stored.
            named = {file.key for file in files.values()}
            self._log.objects.remove([file.key for file in before if file and file.key and file.key not in named])
        except BaseException:
            self._failed = True
            raise

    def commit_all(self) -> None:
        """Commit all differences between the folder and the log, run.json last."""
        changes = sorted(self._log.changes(), key=lambda path: path.name == "run.json")
        for start in range(0, len(changes), _FILES_PER_ENTRY):
            self.commit(dict.fromkeys(changes[start : start + _FILES_PER_ENTRY]))

    def give_up_damaged(self) -> None:
        """Treat files with damaged objects as lost; files with an intact local copy are uploaded again."""
        for name, _ in [*self._log.problems()]:
            if name in self._log.files:
                self._given_up[name] = self._log.files.pop(name)

    def end(self) -> None:
        """End the session, unless a failed write or a later session has already ended it."""
        if not self._failed:
            self._put("end")

    def _known(self, name: str) -> list[str]:
        """Return the log's files at a path, including files given up as damaged."""
        given_up = [path for path in self._given_up if path == name or path.startswith(f"{name}/")]
        return [*self._log.below(name), *given_up]

    def _upload(self, names: Mapping[Path, str]) -> dict[str, LoggedFile]:
        files: dict[str, LoggedFile] = {}
        contents: dict[str, bytes] = {}
        for path, name in names.items():
            raw = read_file(path, limit=LARGEST)
            key = object_key(self._token, self._next, name)
            if name.endswith(".json"):
                files[name] = LoggedFile(len(raw), raw.decode())
            else:
                files[name] = LoggedFile(len(raw), None, key, hashlib.sha256(raw).hexdigest())
                contents[key] = raw
            if sum(map(len, contents.values())) > _BYTES_AT_ONCE:
                self._log.objects.put_all(contents)
                contents = {}
        self._log.objects.put_all(contents)
        return files

    def _put(self, kind: Kind, **parts: Any) -> bool:
        """Append an entry with some of the parts `about`, `files` and `removed`; return True if its number was free."""
        raw = Entry(self._next, self._previous, kind, self._token, **parts).content()
        entry = Entry.parse(raw)
        # If the response to a put is lost, the back end retries and finds its own entry.
        if not self._log.objects.put_new(entry_key(self._next), raw) and self._log.stored_entry(self._next) != raw:
            return False
        self._log.append(entry, raw)
        self._next, self._previous = entry.sequence + 1, entry.sha256
        return True

    def _require_conditions(self) -> None:
        """Check that the store supports conditional puts, by trying to put the newest entry again."""
        newest = self._log.stored_entry(self._next - 1)
        if newest is not None and self._log.objects.put_new(entry_key(self._next - 1), newest):
            raise StorageFailed(
                self._log.objects.url,
                found="a store that ignores the condition of a put (If-None-Match)",
                required="a store where the second of two concurrent writers fails",
                action="Use Amazon S3, or another store that documents conditional writes",
            )
