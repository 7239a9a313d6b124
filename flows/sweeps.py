"""Sweeps: many runs of one recipe, over seeds and a grid of settings, and the small file that says which they are.

A sweep is what its runs are: the file `sweeps/NAME.json` in the runs folder only lists them, and what is done of them
is read from the runs themselves.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from metaloom import storage
from metaloom.flows import recipes
from metaloom.flows.errors import UsageError
from metaloom.flows.runs import check_seed, runs_root
from metaloom.flows.trust import Settings, names_in
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.config.yaml import parse
from metaloom.pipeline.schema import ConfigError
from metaloom.storage import check_run_name, url_of

FORMAT = "metaloom-sweep/1"
MOST_UNASKED = 1000
"""Runs up to which a sweep is not asked about again."""
_LONGEST_NAME = 60


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep.

    Attributes:
        name: of the run, made of its settings.
        settings: its values of the grid's settings, as text.
        seed: its seed.
        digest: SHA-256 of all its settings.
    """

    name: str
    settings: Mapping[str, str]
    seed: int
    digest: str


@dataclass(frozen=True)
class Sweep:
    """A sweep as its file has it.

    Attributes:
        name: of the sweep.
        root: the runs folder.
        recipe: its recipe, or file of settings.
        settings: that all runs have, as KEY=VALUE.
        grid: values to try, by setting.
        seeds: of the runs of every combination of values.
        runs: all runs; settings change slowest, seeds fastest.
    """

    name: str
    root: Path
    recipe: str
    settings: tuple[str, ...]
    grid: Mapping[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    runs: tuple[PlannedRun, ...]

    @property
    def file(self) -> Path:
        """The file that lists its runs."""
        return _file(self.root, self.name)

    def folder(self, run: PlannedRun) -> Path:
        """The folder of one of its runs."""
        return self.root / run.name

    def config(self, run: PlannedRun) -> RunConfig:
        """The settings of one of its runs.

        Raises:
            UsageError: the recipe says something else by now.
        """
        config = _config(self.recipe, self.settings, run.settings, run.seed)
        if (found := _digest(config)) != run.digest:
            raise UsageError(
                f"sweep {self.name}: found settings of {run.name} with the digest {found[:12]}; required "
                f"{run.digest[:12]}, as when the sweep began: {self.recipe} has changed since. Go on with it as it was "
                "or begin a sweep of another --name"
            )
        return config

    def configs(self) -> list[RunConfig]:
        """Settings of all runs, from the file alone.

        Raises:
            UntrustedRun: they name modules, and the file was not written by this user's own command.
            UsageError: the recipe says something else by now.
        """
        self._named().require_trust()
        return [self.config(run) for run in self.runs]

    def document(self) -> dict[str, Any]:
        """The content of the file."""
        return {
            "format": FORMAT,
            "recipe": self.recipe,
            "settings": list(self.settings),
            "grid": {key: list(values) for key, values in self.grid.items()},
            "seeds": list(self.seeds),
            "runs": [asdict(run) for run in self.runs],
        }

    def _named(self) -> Settings:
        """What the settings may name, for trust: read as they will be, since YAML can spell a colon without one."""
        text, given = json.dumps(self.document(), sort_keys=True), [*self.settings]
        given += [f"{key}={value}" for key, values in self.grid.items() for value in values]
        given += [f"{key}={value}" for run in self.runs for key, value in run.settings.items()]
        names = {*names_in([self.recipe, *map(_meant, given)])}
        if recipes.is_settings_file(self.recipe):
            names |= {*names_in(recipes.load_settings(self.recipe))}
            text += Path(self.recipe).read_text("utf-8", errors="replace")
        remedy = f"give the command that began the sweep {self.name}, whose words are yours"
        return Settings(str(self.file), hashlib.sha256(text.encode()).hexdigest(), sorted(names), remedy)

    def write(self) -> None:
        """Write the file, all of it or nothing, and trust what it names from now on."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        aside = self.file.with_suffix(f".{os.getpid()}.new")
        with aside.open("w", encoding="utf-8") as file:
            json.dump(self.document(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self.file)
        self._named().trust()


def plan(
    recipe: str,
    name: str | None = None,
    *,
    seeds: int | Sequence[int] = 5,
    grid: Mapping[str, Sequence[str]] | None = None,
    settings: Sequence[str] = (),
    many: bool = False,
) -> tuple[Sweep, list[RunConfig]]:
    """Plan a sweep, with the settings of each of its runs. Nothing is stored.

    Args:
        recipe: a recipe, or a file of settings.
        name: of the sweep; that of the recipe and "-sweep" when None.
        seeds: how many, counted from the recipe's, or which.
        grid: values to try as text, by setting.
        settings: what all runs have, as KEY=VALUE.
        many: whether there may be more than a thousand runs.

    Raises:
        UsageError, ConfigError, EnvError: what is wrong, before any run is begun.
    """
    root, name, grid = _root(), name or f"{Path(recipe).stem}-sweep", dict(grid or {})
    if len(check_run_name(name)) > _LONGEST_NAME:
        raise UsageError(f"found a sweep name of {len(name)} letters; required at most {_LONGEST_NAME}")
    if storage.run_exists(root / name):
        raise UsageError(f"{name} is the name of a run in {root}; required another one, by --name")
    _check_keys(grid, settings)
    first = recipes.new_config(recipe, settings).seed
    chosen = _seeds(seeds, first)
    if (count := prod(map(len, grid.values())) * len(chosen)) > MOST_UNASKED and not many:
        raise UsageError(
            f"found a sweep of {count:,} runs; required at most {MOST_UNASKED:,}, or --yes (in Python: many=True)"
        )
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    rows = [(point, seed, _config(recipe, settings, point, seed)) for point in points for seed in chosen]
    digests = [_digest(config) for _, _, config in rows]
    _refuse_equal(rows, digests)
    names = _run_names(name, [(point, seed, digest) for (point, seed, _), digest in zip(rows, digests, strict=True)])
    runs = [
        PlannedRun(run, point, seed, digest) for run, (point, seed, _), digest in zip(names, rows, digests, strict=True)
    ]
    values = {key: tuple(texts) for key, texts in grid.items()}
    sweep = Sweep(name, root, recipe, tuple(settings), values, chosen, tuple(runs))
    return sweep, [config for _, _, config in rows]


def find_sweep(name: str) -> Sweep | None:
    """Read the sweep of this name in the runs folder; None if there is none.

    Raises:
        UsageError: its file is none that this version has written.
    """
    root = runs_root()
    if url_of(root) is not None:
        return None
    file = _file(root, name)
    try:
        return _parsed(file.read_bytes(), root, name)
    except FileNotFoundError:
        return None
    except ValueError:
        raise UsageError(
            f"{file}: found no sweep of the format {FORMAT}; required one that `metaloom sweep` wrote. Its runs are "
            "beside it, and do not need it"
        ) from None


def require_sweep(name: str) -> Sweep:
    """Read the sweep of this name.

    Raises:
        UsageError: there is none.
    """
    found = find_sweep(name)
    if found is None:
        names = ", ".join(sorted(file.stem for file in (runs_root() / "sweeps").glob("*.json"))) or "none"
        raise UsageError(f"found no sweep {name!r} in {runs_root()}; required the name of one. There are: {names}")
    return found


def check_unchanged(stored: Sweep, planned: Sweep, *, extend: bool) -> None:
    """Refuse a plan that is not that of the stored sweep of its name, or with `extend` does not hold all of it.

    Raises:
        UsageError: saying what changed, and what can be done.
    """
    before, now = ({run.name: run.digest for run in sweep.runs} for sweep in (stored, planned))
    if before == now:
        return
    added = len(now.keys() - before.keys())
    grows = before.items() <= now.items()
    if grows and extend:
        return
    told = [
        f"{what}: {_shown(a)} before, {_shown(b)} now"
        for what, a, b in (
            ("seeds", stored.seeds, planned.seeds),
            ("grid", stored.grid, planned.grid),
            ("settings", stored.settings, planned.settings),
            ("recipe", stored.recipe, planned.recipe),
        )
        if a != b
    ] or [f"what {stored.recipe} says"]
    remedy = (
        f"--extend (in Python: extend=True) adds the {added} new runs to it, --name begins another sweep"
        if grows
        else "--name begins another sweep"
    )
    raise UsageError(f"the sweep {stored.name} is stored with something else. {'; '.join(told)}. {remedy}")


@contextmanager
def held(sweep: Sweep) -> Iterator[None]:
    """Hold a sweep, so that no other process on this machine works on it; the hold goes with the process.

    Raises:
        UsageError: another one does.
    """
    sweep.file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(sweep.file.with_name(f".{sweep.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UsageError(
            f"the sweep {sweep.name} is being worked on by another process; required one at a time. "
            f"`metaloom sweep {sweep.name} --status` shows how far it is"
        ) from None
    finally:
        os.close(descriptor)


def _root() -> Path:
    root = runs_root()
    if (url := url_of(root)) is not None:
        raise UsageError(
            f"found the runs folder {url}; required a folder on this machine for sweeps. Set METALOOM_RUNS"
        )
    return root


def _file(root: Path, name: str) -> Path:
    return root / "sweeps" / f"{name}.json"


class _Document(BaseModel):
    """The file of a sweep, which may come from anybody."""

    model_config = ConfigDict(strict=True)

    format: Literal["metaloom-sweep/1"]
    recipe: str
    settings: tuple[str, ...]
    grid: Mapping[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    runs: tuple[PlannedRun, ...]


def _parsed(text: bytes, root: Path, name: str) -> Sweep:
    document = _Document.model_validate_json(text)
    for run in document.runs:  # a run's name must not lead out of the runs folder
        check_run_name(run.name)
    if len({run.name for run in document.runs}) < len(document.runs):
        raise ValueError("a run twice")
    return Sweep(name, root, document.recipe, document.settings, document.grid, document.seeds, document.runs)


def _meant(assignment: str) -> tuple[str, object]:
    """Key and value of KEY=VALUE; the text where it is no value, as is told when it is used."""
    key, _, text = assignment.partition("=")
    try:
        return key, parse(text)
    except ValueError:
        return key, text


def _check_keys(grid: Mapping[str, Sequence[str]], settings: Sequence[str]) -> None:
    given = {assignment.partition("=")[0] for assignment in settings}
    for key, values in grid.items():
        if key == "seed":
            raise UsageError("found --grid seed=...; required --seeds, such as --seeds 5 or --seeds 1,2,3")
        if key in given:
            raise UsageError(f"found {key} in --grid and in --set; leave one of them out")
        if not values:
            raise UsageError(f"found --grid {key} without values; required one or more")


def _seeds(seeds: int | Sequence[int], first: int) -> tuple[int, ...]:
    if not isinstance(seeds, Sized):
        if not 1 <= (count := check_seed(seeds)) <= 10**6:  # which takes NumPy's integers too
            raise UsageError(f"found {seeds} seeds; required 1 or more")
        return tuple(check_seed(first + n) for n in range(count))
    chosen = tuple(check_seed(seed) for seed in seeds)
    if not chosen or len({*chosen}) < len(chosen):
        raise UsageError(f"found seeds {', '.join(map(str, chosen)) or 'none'}; required one or more, each once")
    return chosen


def _config(recipe: str, settings: Sequence[str], point: Mapping[str, str], seed: int) -> RunConfig:
    words = [*settings, *(f"{key}={text}" for key, text in point.items()), f"seed={seed}"]
    try:
        return recipes.new_config(recipe, words)
    except ConfigError as problem:
        where = " ".join(f"{key}={text}" for key, text in point.items())
        raise ConfigError(f"--grid {where}: {problem}" if where else str(problem)) from None


def _digest(config: RunConfig) -> str:
    text = json.dumps(config.decisive(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse_equal(rows: Sequence[tuple[Mapping[str, str], int, RunConfig]], digests: Sequence[str]) -> None:
    seen: dict[str, Mapping[str, str]] = {}
    for (point, _, _), digest in zip(rows, digests, strict=True):
        if digest in seen:
            twice = " and ".join(" ".join(f"{k}={v}" for k, v in p.items()) for p in (seen[digest], point))
            raise UsageError(f"found {twice} in --grid, which are the same settings; leave one of them out")
        seen[digest] = point


def _run_names(sweep: str, runs: Sequence[tuple[Mapping[str, str], int, str]]) -> list[str]:
    """Names made of settings; of their digest where that gives no name, or one twice."""
    keys = [*runs[0][0]] if runs else []
    last = [key.rpartition(".")[2] for key in keys]
    short = dict(zip(keys, last if len({*last}) == len(last) else keys, strict=True))
    names = [
        "-".join([sweep, *(f"{short[key]}-{_plain(text)}" for key, text in point.items()), f"seed-{seed}"])
        for point, seed, _ in runs
    ]
    if len({name.lower() for name in names}) == len(names) and all(len(name) <= 100 for name in names):
        return names
    return [f"{sweep}-{digest[:12]}-seed-{seed}" for _, seed, digest in runs]


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.\-]+", "_", text).strip("_") or "_"


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={','.join(values)}" for key, values in value.items()) or "none"
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
