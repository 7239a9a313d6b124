"""Trust in stored runs: permission to import the modules named in their settings.

Settings name classes as module:Class, and importing a module runs its code. Anyone may have written the settings of a
stored run, so only `run_stages.config_of` converts them to a RunConfig, and only `trained.deployment` converts a saved
policy's settings; both check trust first. Trust is remembered per user for the hash of a run.json or policy, so changes
revoke it. Modules must also be found at the same paths. Names without a module, which Metaloom or installed packages
provide, and names that the user typed need no trust.
"""

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metaloom import storage
from metaloom.flows.runs import run_folder
from metaloom.pipeline.plugins import INSTALLED, place_of
from metaloom.pipeline.shown import ConfigError
from metaloom.storage import Run
from metaloom.storage.read.info import mapping

log: logging.Logger = logging.getLogger(__name__)

Places = dict[str, str | None]  # import locations, keyed by top-level module name

_trusted_here: dict[str, Places] = {}
"""Trust given in this process, for use if the configuration folder cannot be written."""


class UntrustedRun(ConfigError):
    """Raised if stored settings name modules that the user has not trusted."""


@dataclass(frozen=True)
class StoredSettings:
    """Stored settings of a run or a policy, which may name modules."""

    where: str  # location of the settings, for messages
    sha256: str  # hash of the stored document
    names: list[str]  # names in the settings that may refer to modules
    remedy: str  # advice on how to trust the names
    starts: tuple[str, ...] = ()  # warm starts (`init_from.run`) from outside the run's runs folder

    @classmethod
    def of_run(cls, run: Run) -> "StoredSettings":
        """Return the settings of a run and its ancestors."""
        remedy = (
            f"add --trust (in Python: metaloom.trust_run({run.location!r})). `metaloom show "
            f"{storage.argument(run.path)} --all` shows the settings and runs nothing"
        )
        return cls(run.location, str(run.info["sha256"]), names_of_run(run), remedy, tuple(_starts_elsewhere(run)))

    @classmethod
    def of_policy(cls, path: str | Path, described: str) -> "StoredSettings":
        """Return the settings in a policy file, from the policy's JSON description."""
        sha256 = hashlib.sha256(described.encode()).hexdigest()
        names = sorted({*names_in(json.loads(described))})
        return cls(str(path), sha256, names, f"metaloom.load_policy({str(path)!r}, trust=True)")

    def trust(self) -> None:
        """Trust the named modules and runs, in this process and in later commands."""
        if not (self.names or self.starts):
            return
        # A module that is not found now could be anything later.
        places: Places = {name: place for name, place in _places(self.names).items() if place is not None}
        _trusted_here[self.sha256] = places
        try:
            remember(self.sha256, self.where, places)
        except OSError as error:
            log.warning("%s: cannot record that you trust it: %s; the next command needs --trust", self.where, error)

    def require_trust(self) -> None:
        """Raise UntrustedRun unless the user trusts all named modules, and all named runs outside the runs folder."""
        if not (self.names or self.starts):
            return
        places, trusted = _places(self.names), _trusted_here.get(self.sha256)
        trusted = remembered(self.sha256) if trusted is None else trusted
        refused = [name for name, place in places.items() if place not in (None, INSTALLED, (trusted or {}).get(name))]
        if trusted is not None and not refused:
            return
        if not self.names:
            raise UntrustedRun(
                f"{self.where}: its init_from names {', '.join(self.starts)}, which is outside its runs folder "
                f"and which you have not trusted. If you trust it: {self.remedy}"
            )
        shown = places if trusted is None else refused
        found = ", ".join(f"{name} ({_location(places[name])})" for name in shown)
        moved = trusted is not None and all(trusted.get(name) for name in refused)
        problem = "you have trusted a different path for" if moved else "you have not trusted"
        raise UntrustedRun(
            f"{self.where}: its settings name {', '.join(self.names)}. Importing runs code, and {problem} "
            f"{found}. If you trust it: {self.remedy}"
        )


def trust_run(run: Run | str | Path) -> None:
    """Trust the modules named in a stored run's settings, now and in this user's later commands.

    Args:
        run: Opened run, or a run's path, URL or name in the runs folder.

    Raises:
        storage.StoreError: the run does not exist.
    """
    StoredSettings.of_run(run if isinstance(run, Run) else storage.open_run(run_folder(run))).trust()


def require_trust(run: Run) -> None:
    """Raise UntrustedRun if a run's settings name modules, unless the user trusts the run."""
    StoredSettings.of_run(run).require_trust()


def names_of_run(run: Run) -> list[str]:
    """Return all strings that may name a module, such as module:Class, in the settings of a run and its ancestors."""
    runs: list[Mapping[str, Any]] = [run.info, *run.info.get("ancestors", [])]
    return sorted({name for info in runs for name in names_in(info.get("config"))})


def _starts_elsewhere(run: Run) -> Iterator[str]:
    for info in (run.info, *run.info.get("ancestors", [])):
        start = mapping(mapping(info.get("config")).get("init_from")).get("run")
        if not isinstance(start, str) or ":" in start:  # a URL, which is already among the names
            continue
        if run_folder(start).resolve().parent != run.path.resolve().parent:
            yield start


def names_in(settings: object) -> Iterator[str]:
    """Return all strings in the settings that contain a colon, since they may name an object in a module.

    Only the named classes know which strings are imported. A warm start from a URL also needs trust.
    """
    return (text for text in strings_in(settings) if ":" in text)


def strings_in(settings: object) -> Iterator[str]:
    """Yield all strings in nested settings, including mapping keys."""
    if isinstance(settings, str):
        yield settings
    elif isinstance(settings, Mapping | list | tuple):
        for part in settings.items() if isinstance(settings, Mapping) else settings:
            yield from strings_in(part)


def _places(names: list[str]) -> Places:
    modules = dict.fromkeys(name.partition(":")[0].partition(".")[0] for name in names)
    return {module: place_of(module) for module in modules}


def _location(place: str | None) -> str:
    return "not found here" if place is None else "an installed package" if place == INSTALLED else f"in {place}"


def _file(sha256: str) -> Path:
    chosen = os.environ.get("XDG_CONFIG_HOME", "")
    # By the XDG specification, relative paths are ignored; they would depend on the working directory.
    folder = Path(chosen if os.path.isabs(chosen) else os.path.expanduser("~/.config"))
    return folder / "metaloom" / "trusted" / f"{sha256}.json"


def remember(sha256: str, where: str, places: Places) -> None:
    """Record that this user trusts the settings with this hash; raise OSError if that cannot be written."""
    file = _file(sha256)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    part.write_text(json.dumps({"settings": where, "modules": places}, indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def remembered(sha256: str) -> Places | None:
    """Return the trusted import locations of the modules that settings name; None if the settings are not trusted."""
    file = _file(sha256)
    try:
        # Ignore files owned by another user.
        if file.stat().st_uid != os.geteuid():
            return None
        modules: Any = json.loads(file.read_text(encoding="utf-8"))["modules"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(modules) if isinstance(modules, dict) else None
