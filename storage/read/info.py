"""The description of a run, as its run.json has it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metaloom.storage.errors import IncompatibleFormat, NotARun, RunNotFound, system_errors
from metaloom.storage.format.canonical import read_sealed
from metaloom.storage.format.codec import KINDS
from metaloom.storage.format.places import location
from metaloom.storage.format.records import FORMATS
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
"""What every run.json has, with its type."""


def read_info(path: Path) -> dict[str, Any]:
    """Read a run's run.json."""
    with system_errors(path, required="a folder that can be read", action="Check its permissions and its disk"):
        found = path.is_dir()
    if not found:
        raise RunNotFound(
            location(path),
            found="no such folder",
            required="the folder of a run",
            action="`metaloom ls` lists the runs",
        )
    try:
        info = read_sealed(path / "run.json", indented=True)
    except FileNotFoundError:
        raise NotARun(
            location(path), found="a folder without run.json", required="a run", action="`metaloom ls` lists the runs"
        ) from None
    _require_known(info, path / "run.json")
    return info


def _require_known(info: Mapping[str, Any], where: Path) -> None:
    if info.get("format") not in FORMATS:
        raise _incompatible(where, f"format {info.get('format')!r}", " or ".join(FORMATS))
    wrong = [name for name, kind in _MEMBERS.items() if not isinstance(info.get(name), kind)]
    if wrong:
        raise _incompatible(where, f"no {' and no '.join(wrong)}", f"the members {', '.join(_MEMBERS)}")
    if "stages" not in info and (last := info.get("last_stage", ON_POLICY.last)) not in EARLIER:
        raise _incompatible(where, f"last_stage {last!r}", " or ".join(EARLIER))
    try:
        unknown = {stage.output for stage in StageTable.of(info).stages} - {*KINDS}
    except (KeyError, TypeError, ValueError) as error:
        raise _incompatible(where, f"stages that are no table ({error})", "a table of stages") from None
    if unknown:
        raise _incompatible(
            where, f"stages that give {', '.join(sorted(map(str, unknown)))}", f"outputs of {', '.join(KINDS)}"
        )


def _incompatible(where: Path, found: str, required: str) -> IncompatibleFormat:
    action = "Use the version of metaloom that wrote the run; run.json names it under `versions`"
    return IncompatibleFormat(where, found=found, required=required, action=action)
