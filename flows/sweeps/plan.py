"""Planning of sweeps: their runs, and checks before training."""

import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

from metaloom import storage
from metaloom.flows import recipes
from metaloom.flows.errors import UsageError
from metaloom.flows.runs import check_seed, runs_root
from metaloom.flows.sweeps.space import Search, require_optuna
from metaloom.flows.sweeps.stored import PlannedRun, Sweep, config_of, digest_of, find_sweep
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.schema import ConfigError
from metaloom.storage import check_run_name, url_of

MOST_UNASKED = 1000  # maximum number of runs that are planned without confirmation
_LONGEST_NAME = 60


def plan(
    recipe: str,
    name: str | None = None,
    *,
    seeds: int | Sequence[int] = 5,
    grid: Mapping[str, Sequence[str]] | None = None,
    settings: Sequence[str] = (),
    many: bool = False,
) -> tuple[Sweep, list[RunConfig]]:
    """Plan a sweep over a grid and return it with the configurations of its runs. Stores nothing."""
    (root, name), grid = _place(recipe, name), dict(grid or {})
    _check_keys("--grid", grid, settings)
    if empty := [key for key, values in grid.items() if not values]:
        raise UsageError(f"--grid {empty[0]} has no values; give at least one")
    chosen = _seeds(seeds, recipes.new_config(recipe, settings).seed)
    _check_count(prod(map(len, grid.values())) * len(chosen), many=many)
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    rows = [(point, seed) for point in points for seed in chosen]
    configs = [config_of(recipe, settings, point, seed, "--grid") for point, seed in rows]
    digests = [*map(digest_of, configs)]
    _refuse_equal("--grid", [(point, digest) for (point, _), digest in zip(rows, digests, strict=True)])
    names = _run_names(name, rows, digests)
    runs = [PlannedRun(run, *row, digest) for run, row, digest in zip(names, rows, digests, strict=True)]
    values = {key: tuple(texts) for key, texts in grid.items()}
    return Sweep(name, root, recipe, tuple(settings), values, chosen, tuple(runs)), configs


def plan_search(
    recipe: str,
    name: str | None = None,
    *,
    search: Search,
    seeds: int | Sequence[int] = 1,
    settings: Sequence[str] = (),
    many: bool = False,
) -> Sweep:
    """Plan a hyperparameter search, and return it with the runs suggested so far. Stores nothing."""
    require_optuna()
    root, name = _place(recipe, name)
    if not search.space:
        raise UsageError("nothing to search; pass --search KEY=VALUES, such as algorithm.inner_lr=0.01:1:log")
    _check_keys("--search", search.space, settings)
    if not 1 <= search.trials <= search.size:
        all_there_are = f"at most {search.size:,}, the number of combinations (--grid tries all of them)"
        required = "at least 1" if search.trials < 1 else all_there_are
        raise UsageError(f"--optuna must be {required}, got {search.trials}")
    base = recipes.new_config(recipe, settings)
    chosen = _seeds(seeds, base.seed)
    _check_count(search.trials * len(chosen), many=many)
    if search.metric == "evaluation" and base.evaluation.every is None:
        raise UsageError("--metric evaluation requires runs that are evaluated; add --set evaluation.every=10")
    sweep = Sweep(name, root, recipe, tuple(settings), {}, chosen, (), search)
    digests = map(digest_of, probe_configs(sweep, search))
    _refuse_equal("--search", zip(search.probes(), digests, strict=True))
    stored = find_sweep(name)
    if stored is None or not _searched(stored, sweep, trials=False):
        return sweep
    return replace(sweep, runs=stored.runs[: sweep.num_runs])


def probe_configs(sweep: Sweep, search: Search) -> list[RunConfig]:
    """Return the configurations at the bounds and choices of a search space, for checks."""
    seed = sweep.seeds[0]
    return [config_of(sweep.recipe, sweep.settings, point, seed, "--search") for point in search.probes()]


def trial_runs(sweep: Sweep, point: Mapping[str, str]) -> tuple[PlannedRun, ...]:
    """Return the planned runs of a search's next trial, which uses this point of the search space."""
    number = len(sweep.runs) // len(sweep.seeds)
    runs: list[PlannedRun] = []
    for seed in sweep.seeds:
        try:
            digest = digest_of(config_of(sweep.recipe, sweep.settings, point, seed, "--search"))
        except ConfigError:  # values that are valid separately but not together make a failed trial
            digest = ""
        runs.append(PlannedRun(f"{sweep.name}-trial-{number:03}-seed-{seed}", point, seed, digest))
    return tuple(runs)


def check_unchanged(stored: Sweep, planned: Sweep, *, extend: bool) -> None:
    """Raise UsageError if a plan differs from the stored sweep or, with `extend`, lacks some of its runs."""
    if (stored.search is None) != (planned.search is None):
        was, now = ("a grid", "a search") if stored.search is None else ("a search", "a grid")
        raise UsageError(f"the sweep {stored.name} is stored as {was}, not {now}. --name starts another sweep")
    if stored.search is None or planned.search is None:
        old, new = ({run.name: run.digest for run in sweep.runs} for sweep in (stored, planned))
        same, grows, added = old == new, old.items() <= new.items(), len(new) - len(old)
    else:
        same, grows = (_searched(stored, planned, trials=trials) for trials in (True, False))
        grows = grows and stored.search.trials <= planned.search.trials
        added = planned.num_runs - stored.num_runs
    if same or (grows and extend):
        return
    differences = [f"{what}: {_shown(a)} before, {_shown(b)} now" for what, a, b in _parts(stored, planned) if a != b]
    differences = differences or [f"{stored.recipe} has changed"]
    extends = f"--extend (in Python: extend=True) adds the {added} new runs to it. " if grows else ""
    raise UsageError(
        f"the sweep {stored.name} is stored with different arguments. {'; '.join(differences)}. {extends}Use --name to "
        "start another sweep"
    )


def _parts(stored: Sweep, planned: Sweep) -> Iterable[tuple[str, object, object]]:
    """Yield the name, stored value and planned value of each part of a sweep."""
    for what in ("seeds", "grid", "settings", "recipe"):
        yield what, getattr(stored, what), getattr(planned, what)
    if stored.search is not None and planned.search is not None:
        yield "search", stored.search.space, planned.search.space
        yield "metric", stored.search.metric, planned.search.metric
        yield "trials", stored.search.trials, planned.search.trials


def _searched(stored: Sweep, planned: Sweep, *, trials: bool) -> bool:
    """Return True if two searches are the same; the number of trials is compared only if `trials` is True."""
    # The metric may still change before the first trial is scored.
    free = {"trials": not trials, "metric": len(stored.runs) <= len(stored.seeds)}
    return all(a == b for what, a, b in _parts(stored, planned) if not free.get(what))


def _place(recipe: str, name: str | None) -> tuple[Path, str]:
    """Return the runs folder and the sweep's name, which defaults to the recipe's name followed by `-sweep`."""
    root, name = runs_root(), name or f"{Path(recipe).stem}-sweep"
    if (url := url_of(root)) is not None:
        raise UsageError(f"the runs folder is {url}, but sweeps need a folder on this machine. Set METALOOM_RUNS")
    if len(check_run_name(name)) > _LONGEST_NAME:
        raise UsageError(f"the sweep name has {len(name)} characters; use at most {_LONGEST_NAME}")
    if storage.run_exists(root / name):
        raise UsageError(f"{name} is the name of a run in {root}; choose another with --name NAME")
    return root, name


def _check_keys(option: str, keys: Iterable[str], settings: Sequence[str]) -> None:
    given = {assignment.partition("=")[0] for assignment in settings}
    for key in keys:
        if key == "seed":
            raise UsageError(f"{option} cannot set seed; use --seeds, such as --seeds 5 or --seeds 1,2,3")
        if key in given:
            raise UsageError(f"{key} is set by both {option} and --set; remove one of them")


def _check_count(count: int, *, many: bool) -> None:
    if count > MOST_UNASKED and not many:
        raise UsageError(
            f"the sweep has {count:,} runs; more than {MOST_UNASKED:,} require --yes (in Python: many=True)"
        )


def _seeds(seeds: int | Sequence[int], first: int) -> tuple[int, ...]:
    if not isinstance(seeds, Sized):
        if not 1 <= (count := check_seed(seeds)) <= 10**6:  # also accepts NumPy integers
            raise UsageError(f"the number of seeds must be at least 1, got {seeds}")
        return tuple(check_seed(first + n) for n in range(count))
    chosen = tuple(check_seed(seed) for seed in seeds)
    if not chosen or len({*chosen}) < len(chosen):
        raise UsageError(f"seeds must be one or more different integers, got {', '.join(map(str, chosen)) or 'none'}")
    return chosen


def _refuse_equal(option: str, points: Iterable[tuple[Mapping[str, str], str]]) -> None:
    seen: dict[str, Mapping[str, str]] = {}
    for point, digest in points:
        if digest in seen:
            twice = " and ".join(" ".join(f"{k}={v}" for k, v in p.items()) for p in (seen[digest], point))
            raise UsageError(f"{twice} in {option} are the same settings; remove one of them")
        seen[digest] = point


def _run_names(sweep: str, rows: Sequence[tuple[Mapping[str, str], int]], digests: Sequence[str]) -> list[str]:
    """Return run names that contain the settings, or digests if those names would be too long or not unique."""
    keys = [*rows[0][0]]
    last = [key.rpartition(".")[2] for key in keys]
    short = dict(zip(keys, last if len({*last}) == len(last) else keys, strict=True))
    names: list[str] = []
    for point, seed in rows:
        plain = ((key, re.sub(r"[^A-Za-z0-9_.\-]+", "_", text).strip("_") or "_") for key, text in point.items())
        names.append("-".join([sweep, *(f"{short[key]}-{text}" for key, text in plain), f"seed-{seed}"]))
    if len({name.lower() for name in names}) == len(names) and all(len(name) <= 100 for name in names):
        return names
    return [f"{sweep}-{digest[:12]}-seed-{seed}" for (_, seed), digest in zip(rows, digests, strict=True)]


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        items = ((key, values if isinstance(values, str) else ",".join(values)) for key, values in value.items())
        return " ".join(f"{key}={text}" for key, text in items) or "none"
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
