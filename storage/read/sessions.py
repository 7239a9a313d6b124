"""What the sessions that wrote a run computed with: code, plug-ins, kernel, device, packages."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metaloom.storage.errors import DamagedRun
from metaloom.storage.format.sessions import FOLDER, SessionName, read_session
from metaloom.storage.read.info import contributors


@dataclass(frozen=True)
class ComputedWith:
    """A session as far as it decides numbers.

    Attributes:
        number: counts the openings of the run.
        token: identifies the session for ever; "" for the first one of a run whose sessions did not write it down.
        started: UTC, ISO 8601.
        environment: what decides the numbers besides the settings.
        versions: of the interpreter and the libraries.
    """

    number: int
    token: str
    started: str
    environment: Mapping[str, Any]
    versions: Mapping[str, Any]


def read_sessions(root: Path, info: Mapping[str, Any]) -> list[ComputedWith]:
    """List the sessions that computed outputs of a run, the first one first.

    The first one is told by the run.json of the run, or of the run that it was forked from in the beginning. Sessions
    of earlier versions did not write down what they computed with, and are left out.
    """
    oldest = contributors(info)[0]
    environment, packages = mapping(oldest.get("environment")), mapping(oldest.get("versions"))
    first = ComputedWith(0, "", str(oldest.get("created", "")), environment, packages)
    try:
        names = os.listdir(root / FOLDER)
    except FileNotFoundError:
        names = []
    later: list[ComputedWith] = []
    for session in (session for session in map(SessionName.parse, names) if session is not None):
        try:
            document = read_session(root / FOLDER / str(session))
        except (FileNotFoundError, DamagedRun):  # interrupted before it wrote anything, or for `verify` to tell
            continue
        if "environment" in document:
            started, used = str(document.get("started", "")), mapping(document["environment"])
            versions = mapping(document.get("versions"))
            later.append(ComputedWith(session.number, session.token, started, used, versions))
    return [first, *sorted(later, key=lambda session: session.number)]


def mapping(value: object) -> Mapping[str, Any]:
    """The value if it is a mapping; a run from elsewhere may have anything in its place."""
    return value if isinstance(value, dict) else {}
