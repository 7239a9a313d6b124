"""The environment of each session that wrote a run: code, plug-ins, kernel, device, packages."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metaloom.storage.errors import DamagedRun
from metaloom.storage.format.files import folder_entries
from metaloom.storage.format.sessions import FOLDER, SessionName, read_session
from metaloom.storage.read.info import contributors


@dataclass(frozen=True)
class ComputedWith:
    """Facts about a session that affect results.

    Attributes:
        number: Number of the session.
        token: Permanent identifier of the session; "" if it was not recorded.
        started: Start time, UTC, ISO 8601.
        environment: Facts that affect results besides the settings.
        versions: Versions of the interpreter and the libraries.
    """

    number: int
    token: str
    started: str
    environment: Mapping[str, Any]
    versions: Mapping[str, Any]


def read_sessions(root: Path, info: Mapping[str, Any]) -> list[ComputedWith]:
    """List the sessions that computed outputs of a run, in order.

    The first session is described in run.json, in a fork that of its oldest ancestor. Sessions of earlier versions
    without a recorded environment are skipped.
    """
    oldest = contributors(info)[0]
    environment, packages = mapping(oldest.get("environment")), mapping(oldest.get("versions"))
    first = ComputedWith(0, "", str(oldest.get("created", "")), environment, packages)
    try:
        names = [entry.name for entry in folder_entries(root / FOLDER)]
    except FileNotFoundError:
        names = []
    later: list[ComputedWith] = []
    for session in (session for session in map(SessionName.parse, names) if session is not None):
        try:
            document = read_session(root / FOLDER / str(session))
        except (FileNotFoundError, DamagedRun):  # interrupted before writing anything, or reported by `verify`
            continue
        if "environment" in document:
            started, used = str(document.get("started", "")), mapping(document["environment"])
            versions = mapping(document.get("versions"))
            later.append(ComputedWith(session.number, session.token, started, used, versions))
    return [first, *sorted(later, key=lambda session: session.number)]


def mapping(value: object) -> Mapping[str, Any]:
    """Return the value if it is a mapping, otherwise {}; a run from elsewhere may contain anything."""
    return value if isinstance(value, dict) else {}
