"""Two runs compared: settings, code and packages, and the first output that differs, by how much."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from metaloom import storage
from metaloom.flows.commands.replay import ArrayDifference, compare, compare_digests
from metaloom.flows.trust import names_of_run
from metaloom.flows.views.formatting import dotted
from metaloom.flows.views.tables import difference_info
from metaloom.pipeline.config.run import build_stored
from metaloom.pipeline.schema import ConfigError
from metaloom.storage import Run, StageRef
from metaloom.storage.format.codec import flatten


@dataclass(frozen=True)
class Difference:
    """A setting or version that differs; None where one run has none of that name."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True)
class RunDiff:
    """Differences between two runs.

    Attributes:
        a, b: their folders.
        settings: those that differ.
        environment: code digest, package versions and machine, where they differ. They explain and do not decide.
        first: the first output that both have and whose digests differ.
        arrays: the arrays of that output that differ; only their names are known if the output was thinned.
        compared: outputs that both have.
        different: how many of them differ.
        only_a, only_b: how many outputs one run has and the other lacks.
    """

    a: Path
    b: Path
    settings: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    first: StageRef | None
    arrays: tuple[ArrayDifference, ...]
    compared: int
    different: int
    only_a: int
    only_b: int

    @property
    def equal(self) -> bool:
        """True if settings and outputs are the same."""
        return not (self.settings or self.different or self.only_a or self.only_b)

    def as_dict(self) -> dict[str, Any]:
        """The comparison as plain data."""
        first = self.first
        return {
            "a": str(self.a),
            "b": str(self.b),
            "equal": self.equal,
            "settings": {d.name: {"a": d.a, "b": d.b} for d in self.settings},
            "environment": {d.name: {"a": d.a, "b": d.b} for d in self.environment},
            "first": first and {**asdict(first), "arrays": [difference_info(array) for array in self.arrays]},
            "compared": self.compared,
            "different": self.different,
            "only_a": self.only_a,
            "only_b": self.only_b,
        }


def diff_runs(path_a: Path, path_b: Path) -> RunDiff:
    """Compare two runs by their records; arrays are read of the first output that differs.

    Raises:
        storage.StoreError: one of them cannot be read.
    """
    a, b = storage.open_run(path_a), storage.open_run(path_b)
    refs_a, refs_b = set(a.refs()), set(b.refs())
    shared = a.stages.sort(refs_a & refs_b)
    different = [ref for ref in shared if a.record(ref).digest != b.record(ref).digest]
    first = different[0] if different else None
    return RunDiff(
        a=path_a,
        b=path_b,
        settings=tuple(_differences(settings_of(a), settings_of(b))),
        environment=tuple(_differences(_environment(a), _environment(b))),
        first=first,
        arrays=tuple(_array_differences(a, b, first)) if first else (),
        compared=len(shared),
        different=len(different),
        only_a=len(refs_a - refs_b),
        only_b=len(refs_b - refs_a),
    )


def settings_of(run: Run) -> dict[str, str]:
    """Return a run's settings as names and values; those that its version did not have stand for what it did."""
    # As many iterations as it is to have by now: `resume --iterations` does not change what it was created with.
    config = {**run.config, "iterations": run.capacity}
    # To look at a run, nothing that it names is imported, whoever made it.
    if names_of_run(run):
        return dict(dotted(config))
    try:
        return dict(dotted(build_stored(config).model_dump(mode="json")))
    except ConfigError:
        return dict(dotted(config))


def _environment(run: Run) -> dict[str, str]:
    parts = {name: run.info[name] for name in ("environment", "versions", "system")}
    facts = dict(dotted(parts))
    # Up to version 0.1 the package was four, each with its own name.
    place = facts.get("environment.env.class", "")
    return facts | ({"environment.env.class": f"metaloom.{place}"} if place.startswith("pipeline.") else {})


def _differences(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[Difference]:
    for name in sorted({*a, *b}):
        if a.get(name) != b.get(name):
            yield Difference(name, a.get(name), b.get(name))


def _array_differences(a: Run, b: Run, ref: StageRef) -> Iterator[ArrayDifference]:
    try:
        values = flatten(a.load(ref)), flatten(b.load(ref))
    except storage.StageThinned:
        # Thinned: the records still tell which arrays differ.
        yield from compare_digests(ref, a.record(ref).arrays, b.record(ref).arrays)
        return
    yield from compare(ref, *values)
