"""Description of a run: its run.json, its ancestors, and the sessions that wrote it.

A fork shares its parent's records. The chain consists of the first run's run.json, its records, the fork's run.json
(which contains the newest record's hash), and the fork's records. Records therefore cannot be moved between forks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.storage.errors import DamagedRun, IncompatibleFormat, NotARun, RunNotFound, system_errors
from metaloom.storage.format.codec import KINDS
from metaloom.storage.format.files import read_sealed
from metaloom.storage.format.places import location
from metaloom.storage.format.records import FORMATS
from metaloom.storage.format.sessions import FOLDER, read_session, sessions_in
from metaloom.storage.format.stages import EARLIER, ON_POLICY, StageTable

_MEMBERS = {
    "id": str,
    "config": dict,
    "config_digest": str,
    "environment": dict,
    "system": dict,
    "versions": dict,
    "created": str,
}
"""Required members of run.json, with their types."""


def read_info(path: Path) -> dict[str, Any]:
    """Read and validate a run's run.json. Raises RunNotFound, NotARun, IncompatibleFormat or DamagedRun."""
    with system_errors(path, required="a folder that can be read", action="Check its permissions and its disk"):
        is_folder = path.is_dir()
    if not is_folder:
        raise RunNotFound(
            location(path),
            found="no such folder",
            required="an existing run folder",
            action="`metaloom ls` lists the runs",
        )
    try:
        info = read_sealed(path / "run.json", indented=True)
    except FileNotFoundError:
        raise NotARun(
            location(path), found="a folder without run.json", required="a run", action="`metaloom ls` lists the runs"
        ) from None
    where = path / "run.json"
    if info.get("format") not in FORMATS:
        raise _incompatible(where, f"format {info.get('format')!r}", " or ".join(FORMATS))
    wrong = [name for name, kind in _MEMBERS.items() if not isinstance(info.get(name), kind)]
    if wrong:
        raise _incompatible(where, f"no {' and no '.join(wrong)}", f"the members {', '.join(_MEMBERS)}")
    if "stages" not in info and (last := info.get("last_stage", ON_POLICY.last)) not in EARLIER:
        raise _incompatible(where, f"last_stage {last!r}", " or ".join(EARLIER))
    try:
        unknown = {s.output for s in StageTable.of(info).stages if (s.output in KINDS) == (s.schema is not None)}
    except (KeyError, TypeError, ValueError) as error:
        raise _incompatible(where, f"stages that are not a table ({error})", "a table of stages") from None
    if unknown:
        found = f"stages that output {', '.join(sorted(map(str, unknown)))}"
        raise _incompatible(where, found, f"outputs of {', '.join(KINDS)}")
    return info


def _incompatible(where: Path, found: str, required: str) -> IncompatibleFormat:
    action = "Use the version of metaloom that wrote the run; run.json names it under `versions`"
    return IncompatibleFormat(where, found=found, required=required, action=action)


def boundaries(info: Mapping[str, Any]) -> dict[int, str]:
    """Return the hash of each run.json in the chain, keyed by the position of the record after it."""
    return {first_sequence(run): str(run["sha256"]) for run in contributors(info)}


def first_sequence(info: Mapping[str, Any]) -> int:
    """Return the history position of the first record that the run itself wrote."""
    return int(info.get("first_sequence", 0))


def first_session(info: Mapping[str, Any]) -> int:
    """Return the number of the run's own first session; a fork continues its parent's numbering."""
    return int(info.get("first_session", 0))


def origin(info: Mapping[str, Any], ref: StageRef) -> Mapping[str, Any]:
    """Return the description of the run whose settings determine an output (stored or not): this one or an ancestor."""
    runs = contributors(info)
    if ref.stage == StageTable.of(info).first:  # forks inherit it
        return runs[0]
    return next(run for run in reversed(runs) if first_iteration(run) <= ref.iteration)


def as_ancestor(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a parent's run.json that its fork keeps."""
    kept = ("id", "sha256", "config", "config_digest", "environment", "versions")
    place = {"first_sequence": first_sequence(info), "first_iteration": first_iteration(info)}
    return {name: info[name] for name in kept} | place


def first_iteration(run: Mapping[str, Any]) -> int:
    """Return the first iteration that the run itself computed."""
    return int(run["parent"]["iteration"] if "parent" in run else run.get("first_iteration", 0))


def contributors(info: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the descriptions of the runs that wrote this run's records, from the oldest ancestor to the run itself."""
    found = [info]
    for run in reversed(info.get("ancestors", [])):
        # A fork that begins no later than its parent did contains no records written by the parent.
        if first_sequence(run) < first_sequence(found[0]):
            found.insert(0, run)
    return found


@dataclass(frozen=True)
class ComputedWith:
    """Facts about a session that affect results."""

    number: int
    token: str  # identifies the session permanently; "" if it was not recorded
    started: str  # UTC, ISO 8601
    environment: Mapping[str, Any]  # what affects results besides the settings
    versions: Mapping[str, Any]


def read_sessions(root: Path, info: Mapping[str, Any]) -> list[ComputedWith]:
    """Return the sessions that computed outputs of a run, in order.

    The first session is described in run.json; for a fork, in the run.json of its oldest ancestor. Sessions of earlier
    versions without a recorded environment are skipped.
    """
    oldest = contributors(info)[0]
    environment, packages = mapping(oldest.get("environment")), mapping(oldest.get("versions"))
    first = ComputedWith(0, "", str(oldest.get("created", "")), environment, packages)
    later: list[ComputedWith] = []
    for session in sessions_in(root):
        try:
            document = read_session(root / FOLDER / str(session))
        except (FileNotFoundError, DamagedRun):  # interrupted before writing anything, or reported by `verify`
            continue
        if "environment" in document:
            started, used = str(document.get("started", "")), mapping(document["environment"])
            versions = mapping(document.get("versions"))
            later.append(ComputedWith(session.number, session.token, started, used, versions))
    return [first, *later]


def mapping(value: object) -> Mapping[str, Any]:
    """Return the value if it is a mapping, otherwise {}; a run from elsewhere may contain anything."""
    return value if isinstance(value, dict) else {}
