"""`diff`: finds the first output in which two runs differ."""

from collections.abc import Iterable, Iterator, Mapping

from metaloom import storage
from metaloom.flows.arguments import checked
from metaloom.flows.formatting import dotted
from metaloom.flows.operations import late
from metaloom.flows.operations.options import RunArgument
from metaloom.flows.results.replay import ArrayDifference, Difference, RunDiff
from metaloom.flows.runs import folder_of
from metaloom.storage import Run
from metaloom.storage.format.codec import flatten


@checked
def diff(run_a: RunArgument, run_b: RunArgument) -> RunDiff:
    """Find the first output in which two runs differ.

    It also compares settings, code and packages. Exit code 0 if settings and outputs are equal, 1 if they differ.

    Example: `metaloom diff first second`

    Args:
        run_a: First run.
        run_b: Second run.
    """
    path_a, path_b = folder_of(run_a), folder_of(run_b)
    a, b = storage.open_run(path_a), storage.open_run(path_b)
    refs_a, refs_b = set(a.refs()), set(b.refs())
    shared = a.stages.sort(refs_a & refs_b)
    different = [ref for ref in shared if a.record(ref).digest != b.record(ref).digest]
    first = different[0] if different else None
    arrays: Iterable[ArrayDifference] = ()
    if first:
        try:
            arrays = late.compare_arrays(first, flatten(a.load(first)), flatten(b.load(first)))
        except storage.StageThinned:  # the records still show which arrays differ
            arrays = late.compare_digests(first, a.record(first).arrays, b.record(first).arrays)
    return RunDiff(
        a=path_a,
        b=path_b,
        settings=tuple(_differences(late.settings_of(a), late.settings_of(b))),
        environment=tuple(_differences(_environment(a), _environment(b))),
        first=first,
        arrays=tuple(arrays),
        compared=len(shared),
        different=len(different),
        only_a=len(refs_a - refs_b),
        only_b=len(refs_b - refs_a),
    )


def _environment(run: Run) -> dict[str, str]:
    facts = dict(dotted({name: run.info[name] for name in ("environment", "versions", "system")}))
    # Up to version 0.1, `pipeline` was a top-level package.
    place = facts.get("environment.env.class", "")
    return facts | ({"environment.env.class": f"metaloom.{place}"} if place.startswith("pipeline.") else {})


def _differences(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[Difference]:
    for name in sorted({*a, *b}):
        if a.get(name) != b.get(name):
            yield Difference(name, a.get(name), b.get(name))
