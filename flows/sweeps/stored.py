"""Sweeps, which are runs of a recipe over many seeds and settings, and the files that list these runs.

A file `sweeps/NAME.json` in the runs folder only lists the runs; their progress is read from the runs themselves.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import from_json

from metaloom.flows import recipes
from metaloom.flows.errors import UsageError
from metaloom.flows.runs import runs_root
from metaloom.flows.sweeps.space import Choice, Search
from metaloom.flows.trust import StoredSettings, names_in
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.config.yaml import parse
from metaloom.pipeline.schema import ConfigError
from metaloom.storage import DamagedRun, check_run_name, url_of
from metaloom.storage.format.files import lock, read_file, replace_file

FORMAT = "metaloom-sweep/1"
_LARGEST = 2**26
_FIELDS = ("recipe", "settings", "grid", "seeds", "runs", "search")


@dataclass(frozen=True)
class PlannedRun:
    """Run planned by a sweep, with the varied settings as text.

    `digest` is the SHA-256 of all the run's settings; it is empty for a search trial with invalid settings.
    """

    name: str
    settings: Mapping[str, str]
    seed: int
    digest: str


@dataclass(frozen=True)
class Sweep:
    """Sweep as described by its file."""

    name: str
    root: Path  # runs folder
    recipe: str  # recipe name, or path of a settings file
    settings: tuple[str, ...]  # settings shared by all runs, as KEY=VALUE
    grid: Mapping[str, tuple[str, ...]]  # values to try, keyed by setting
    seeds: tuple[int, ...]  # seeds for each combination of values
    runs: tuple[PlannedRun, ...]  # all runs, with seeds varying fastest; for a search, the runs suggested so far
    search: Search | None = None  # search that replaces the grid, if any

    @property
    def file(self) -> Path:
        """Path of the file that lists the sweep's runs."""
        return _file(self.root, self.name)

    @property
    def num_runs(self) -> int:
        """Number of runs in the finished sweep."""
        return len(self.runs) if self.search is None else self.search.trials * len(self.seeds)

    @property
    def keys(self) -> tuple[str, ...]:
        """Settings that the sweep varies."""
        return tuple(self.grid if self.search is None else self.search.space)

    def folder(self, run: PlannedRun) -> Path:
        return self.root / run.name

    def config(self, run: PlannedRun) -> RunConfig:
        """Return the configuration of one of the sweep's runs; raise UsageError if the recipe has changed."""
        option = "--grid" if self.search is None else "--search"
        config = config_of(self.recipe, self.settings, run.settings, run.seed, option)
        if (found := digest_of(config)) != run.digest:
            raise UsageError(
                f"sweep {self.name}: the settings of {run.name} have the digest {found[:12]}, but had "
                f"{run.digest[:12]} when the sweep began: {self.recipe} has changed since. Continue with the "
                "original recipe, or start a sweep with another --name"
            )
        return config

    def configs(self) -> list[RunConfig]:
        """Return the configurations of all runs without reading the runs. Raises UntrustedRun."""
        self.require_trust()
        return [self.config(run) for run in self.runs]

    def require_trust(self) -> None:
        """Raise UntrustedRun if the sweep's file names modules, unless a command of this user wrote it."""
        self._named().require_trust()

    def document(self) -> dict[str, Any]:
        """Return the content of the sweep's file as JSON data."""
        written = asdict(self)
        return {"format": FORMAT} | {name: written[name] for name in _FIELDS if written[name] is not None}

    def _named(self) -> StoredSettings:
        """Return the settings that may name modules. They are parsed first, since YAML can escape a colon."""
        document, pairs = self.document(), [assignment.partition("=")[::2] for assignment in self.settings]
        if self.search is not None:
            del document["runs"]  # a search adds runs one by one, with values from its space
            spaces = self.search.dimensions.items()
            pairs += [(key, text) for key, space in spaces if isinstance(space, Choice) for text in space.texts]
        text = json.dumps(document, sort_keys=True)
        pairs += [(key, value) for key, values in self.grid.items() for value in values]
        pairs += [pair for run in self.runs for pair in run.settings.items()]
        named: list[object] = [self.recipe]
        for key, value in (f"{key}={value}".partition("=")[::2] for key, value in pairs):  # as they will be split
            try:
                named.append((key, parse(value)))
            except ValueError:  # reported when the setting is used
                named.append((key, value))
        names = {*names_in(named)}
        if recipes.is_settings_file(self.recipe):
            if Path(self.recipe).exists() and not Path(self.recipe).is_file():  # reading a pipe may never end
                raise UsageError(f"{self.file}: {self.recipe} is a pipe or a device, not a settings file")
            names |= {*names_in(recipes.load_settings(self.recipe))}
            text += Path(self.recipe).read_text("utf-8", errors="replace")
        remedy = f"repeat the full command that started the sweep {self.name}"
        return StoredSettings(str(self.file), hashlib.sha256(text.encode()).hexdigest(), sorted(names), remedy)

    def write(self) -> None:
        """Write the sweep's file atomically, and trust the modules that it names."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps(self.document(), indent=1).encode()
        replace_file(self.file, content, self.file.with_suffix(f".{os.getpid()}.new"))
        self._named().trust()


def find_sweep(name: str) -> Sweep | None:
    """Return the sweep with this name in the runs folder, or None if it does not exist."""
    root = runs_root()
    if url_of(root) is not None:
        return None
    file = _file(root, name)
    try:
        return _parsed(read_file(file, limit=_LARGEST), root, name)
    except FileNotFoundError:
        return None
    except (ValueError, DamagedRun) as error:
        why = f" ({error.found})" if isinstance(error, DamagedRun) else ""
        raise UsageError(
            f"{file} is not a sweep in the format {FORMAT}{why}. Restore the file that `metaloom sweep` "
            "wrote. The runs are beside it and can be used without it"
        ) from None


def require_sweep(name: str) -> Sweep:
    """Return the sweep with this name in the runs folder, or raise UsageError if it does not exist."""
    found = find_sweep(name)
    if found is None:
        names = ", ".join(sorted(file.stem for file in (runs_root() / "sweeps").glob("*.json"))) or "none"
        raise UsageError(f"there is no sweep {name!r} in {runs_root()}; available sweeps: {names}")
    return found


@contextmanager
def held(sweep: Sweep) -> Iterator[None]:
    """Within the block, lock a sweep against other processes on this machine. A killed process releases the lock."""
    sweep.file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(sweep.file.with_name(f".{sweep.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        lock(descriptor, wait=False)
        yield
    except BlockingIOError:
        raise UsageError(
            f"another process is running the sweep {sweep.name}; only one can run at a time. "
            f"`metaloom sweep {sweep.name} --status` shows its progress"
        ) from None
    finally:
        os.close(descriptor)


def _file(root: Path, name: str) -> Path:
    return root / "sweeps" / f"{name}.json"


def _parsed(text: bytes, root: Path, name: str) -> Sweep:
    """Parse the content of a sweep's file, which may come from anyone; raise ValueError if it is invalid."""
    document: Any = from_json(text)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError("another format")
    own = {field: value for field, value in document.items() if field in _FIELDS} | {"name": "", "root": ""}
    # The folder is added later, since its name need not be UTF-8.
    sweep = replace(TypeAdapter(Sweep).validate_json(json.dumps(own), strict=True), name=name, root=root)
    for run in sweep.runs:  # a run's name must not lead outside the runs folder
        check_run_name(run.name)
    if len({run.name for run in sweep.runs}) < len(sweep.runs):
        raise ValueError("a repeated run")
    if sweep.search is None:
        return sweep
    # The runs must belong to trials of the search, and each trial must have all seeds.
    if sweep.search.trials < 1 or not sweep.search.dimensions:
        raise ValueError("an empty search")
    if not (each := len(sweep.seeds)) or len(sweep.runs) % each or len(sweep.runs) > sweep.num_runs:
        raise ValueError("an incomplete trial")
    for first in range(0, len(sweep.runs), each):
        runs = sweep.runs[first : first + each]
        sweep.search.values(runs[0].settings)
        if any(run.settings != runs[0].settings for run in runs) or tuple(run.seed for run in runs) != sweep.seeds:
            raise ValueError("a trial whose runs have different settings")
    return sweep


def config_of(recipe: str, settings: Sequence[str], point: Mapping[str, str], seed: int, option: str) -> RunConfig:
    """Return a recipe's configuration with the given settings, the values at a point of the sweep, and a seed."""
    words = [*settings, *(f"{key}={text}" for key, text in point.items()), f"seed={seed}"]
    try:
        return recipes.new_config(recipe, words)
    except ConfigError as problem:
        where = " ".join(f"{key}={text}" for key, text in point.items())
        raise ConfigError(f"{option} {where}: {problem}" if where else str(problem)) from None


def digest_of(config: RunConfig) -> str:
    """Return the SHA-256 of the settings that affect a run's results."""
    text = json.dumps(config.decisive(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
