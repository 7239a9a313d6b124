"""Grouping runs by their settings, without importing the modules that the settings name."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import dotted, plural
from metaloom.flows.trust import names_of_run
from metaloom.pipeline.config.run import build_stored
from metaloom.pipeline.shown import ConfigError, suggestion
from metaloom.storage import Run

BESIDE = ("seed", "iterations", "stop", "evaluation", "retention", "replay")
"""Settings that do not distinguish groups: seed, run length, evaluation and storage."""
ENVIRONMENT = ("env", "max_episode_steps")  # sections of settings that define the meaning of a return
OF_THE_POLICY = ("env.action_scale", "env.diagnostics")
"""Settings in these sections that do not affect the meaning of a return: the mapping of a policy's actions, which
depends on the algorithm, and additional measurements."""


@dataclass(frozen=True)
class RunGroup:
    """Group of runs, sorted by seed, with the settings that distinguish it from other groups."""

    settings: Mapping[str, str]
    runs: tuple[Run, ...]


def settings_of(run: Run) -> dict[str, str]:
    """Return a run's settings as text, keyed by name; missing ones get old defaults if the run has no plug-ins."""
    # Use the current number of iterations, since `resume --iterations` does not change the stored settings.
    config = {**run.config, "iterations": run.capacity}
    # Reading a run must not import the modules that its settings name.
    if not names_of_run(run):
        with suppress(ConfigError):
            config = build_stored(config).model_dump(mode="json")
    return dict(dotted(config))


def section(setting: str) -> str:
    """Return the top-level section of a setting, such as `env` for env.options.reward."""
    return setting.partition(".")[0]


def environment_settings(run: Run) -> dict[str, str]:
    """Return the settings that define a run's environment, and therefore the meaning of its returns."""
    return {name: value for name, value in sorted(settings_of(run).items()) if _of_environment(name)}


def _of_environment(setting: str) -> bool:
    return section(setting) in ENVIRONMENT and setting not in OF_THE_POLICY


def environment_of(run: Run) -> str:
    """Return a run's environment settings as a single string."""
    return " ".join(f"{name}={value}" for name, value in environment_settings(run).items())


def check_comparable(runs: Sequence[Run], *, mixed: bool) -> None:
    """Raise UsageError if there are no runs, one is given twice or, unless `mixed` is True, environments differ."""
    if not runs:
        raise UsageError("there are no runs to compare; pass one or more by name, path, pattern or sweep")
    paths = [str(run.path.resolve()) for run in runs]
    if twice := next((path for n, path in enumerate(paths) if path in paths[:n]), None):
        raise UsageError(f"the run {twice} is given twice; name it once")
    environments = {run.name: environment_settings(run) for run in runs}
    if not mixed and len({tuple(found.items()) for found in environments.values()}) > 1:
        names = list(dict.fromkeys(name for found in environments.values() for name in found))
        differ = [name for name in names if len({found.get(name) for found in environments.values()}) > 1]
        setting = "env.name" if "env.name" in differ else differ[0]
        examples = _examples({run: f"{setting}={found.get(setting, '-')}" for run, found in environments.items()})
        raise UsageError(
            f"the runs have different environments: {examples}; their returns mean different things. Compare runs of "
            "one environment, or pass --mixed (in Python: mixed=True)"
        )


def grouped(runs: Sequence[Run], by: Sequence[str], *, mixed: bool) -> dict[str, RunGroup]:
    """Group runs that differ only in their seed or, with `by`, that have equal values for those settings.

    A group's name lists the settings in which the groups differ, or the algorithm and the environment if there is only
    one group. With `mixed`, runs from different environments may share a group. Raises UsageError if a setting is
    unknown, two runs are duplicates, or the groups cannot be compared.
    """
    settings = {run.path: settings_of(run) for run in runs}
    known = {name: None for found in settings.values() for name in found}
    for key in by:
        if key not in known:
            hint = suggestion(key, known)
            raise UsageError(f"--group {key}: expected a setting such as algorithm.inner_lr{hint}")
    keys = [*by] or [name for name in known if section(name) not in BESIDE and not (mixed and _of_environment(name))]
    found: dict[tuple[str, ...], list[Run]] = {}
    for run in sorted(runs, key=lambda run: (int(run.config["seed"]), run.name)):
        found.setdefault(tuple(settings[run.path].get(key, "-") for key in keys), []).append(run)
    _refuse_repeated(found.values(), settings)
    distinguishing = [*by] if by else _distinguishing(keys, [*found])
    groups: dict[str, RunGroup] = {}
    for values, members in found.items():
        own = {key: value for key, value in zip(keys, values, strict=True) if key in distinguishing}
        name = " ".join(f"{key}={value}" for key, value in own.items()) or ", ".join(
            " | ".join(dict.fromkeys(settings[run.path].get(key, "unknown") for run in members))
            for key in ("algorithm.name", "env.name")
        )
        groups[name] = RunGroup(own, tuple(members))
    if mixed and not any(section(key) in ENVIRONMENT for key in by):
        tested = {name: " | ".join(sorted({environment_of(run) for run in g.runs})) for name, g in groups.items()}
        if len(set(tested.values())) > 1:
            raise UsageError(
                f"the groups were trained in different environments: {_examples(tested)}. They must be the same; "
                "otherwise use --group env.name"
            )
    return groups


def _distinguishing(keys: Sequence[str], groups: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the settings in which groups differ, without differences that only follow from the algorithm."""
    differ = [n for n in range(len(keys)) if len({values[n] for values in groups}) > 1]
    names = [keys[n] for n in differ]
    if "algorithm.name" not in names:
        return names
    algorithm = keys.index("algorithm.name")
    within = [n for n in differ if len({(v[algorithm], v[n]) for v in groups}) > len({v[algorithm] for v in groups})]
    return ["algorithm.name", *(keys[n] for n in within if n != algorithm)]


def _refuse_repeated(groups: Iterable[Sequence[Run]], settings: Mapping[Path, Mapping[str, str]]) -> None:
    for runs in groups:
        seen: dict[tuple[tuple[str, str], ...], Run] = {}
        for run in runs:
            decisive = {k: v for k, v in settings[run.path].items() if k == "seed" or section(k) not in BESIDE}
            other = seen.setdefault(tuple(sorted(decisive.items())), run)
            if other is not run:
                raise UsageError(
                    f"runs {other.name} and {run.name} have the same settings and seed {run.config['seed']}: "
                    "the same seed would count twice. Name only one of them"
                )


def _examples(by_name: Mapping[str, str]) -> str:
    """Return text that names one run or group as an example of each distinct value."""
    first: dict[str, str] = {}
    for name, value in by_name.items():
        first.setdefault(value, name)
    return "; ".join(f"{name} has {value}" for value, name in first.items())


def difference_notes(groups: Collection[RunGroup]) -> Iterator[str]:
    """Yield a note if groups differ in settings that their names do not show."""
    settings = [settings_of(group.runs[0]) for group in groups]
    named = {name for group in groups for name in group.settings}
    shared = (name for name in settings[0] if all(name in found for found in settings))
    values = {name: dict.fromkeys(found[name] for found in settings) for name in shared}
    more = [
        f"{name} ({', '.join(found)})"
        for name, found in values.items()
        if len(found) > 1 and name not in named and section(name) not in BESIDE and not _of_environment(name)
    ]
    if more:
        yield f"the groups differ in more than the settings that name them: {', '.join(more)}"


def fork_notes(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a note for each fork, since its first iterations used its parent's settings."""
    for run in runs:
        parent = run.info.get("parent")
        if parent is not None and parent["iteration"]:
            shared = plural(parent["iteration"], "iteration")
            yield f"{run.path.name} was forked from {parent['name']}, whose settings apply to its first {shared}"


def kin_notes(groups: Mapping[str, RunGroup]) -> Iterator[str]:
    """Yield a note for each set of runs in a group that begin with the same policy and are thus not independent."""
    for group in groups.values():
        kin: dict[str, list[str]] = {}
        for run in group.runs:
            oldest, *_ = [*run.info.get("ancestors", []), run.info]
            kin.setdefault(str(oldest["id"]), []).append(run.path.name)
        for names in kin.values():
            if len(names) > 1:
                yield (
                    f"{', '.join(names)} begin with the same policy, as forks of one run do, and are counted as "
                    f"{len(names)} independent seeds, so intervals are too narrow and differences look significant "
                    "too easily"
                )
