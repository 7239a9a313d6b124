"""Write docs/results.md and its pictures from the reference runs.

    python benchmarks/results.py

Runs that differ only in their seed are a group, by the name of the reference. Groups of one environment are compared as
`metaloom compare` does: interquartile means with intervals over whole runs, and an order only where a permutation test
of all pairs together shows one.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from metaloom import storage
from metaloom.flows.commands.compare import Comparison, compare
from metaloom.flows.references.archive import opened
from metaloom.flows.references.index import Reference, read_index, shipped
from metaloom.flows.views import charts
from metaloom.flows.views.class_returns import classes_of, returns_by_class
from metaloom.flows.views.formatting import by_inner_step, count, number
from metaloom.flows.views.series import AFTER, BEFORE, BETWEEN
from metaloom.pipeline.comparison.groups import Estimate
from metaloom.storage import Run

DOCS = Path(__file__).parents[1] / "docs"
LAST, SMOOTH = 10, 5
EARLY, LATE = slice(50, 100), slice(150, 200)
COLORS = (AFTER, BEFORE, *BETWEEN, charts.INK)

Groups = Mapping[str, Sequence[tuple[Reference, Run]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="folder", type=Path, default=shipped())
    parser.add_argument("--to", type=Path, default=DOCS)
    args = parser.parse_args()
    with ExitStack() as stack:
        environments: dict[str, dict[str, list[tuple[Reference, Run]]]] = defaultdict(lambda: defaultdict(list))
        for reference in read_index(args.folder):
            run = storage.open_run(stack.enter_context(opened(args.folder, reference)))
            environments[_environment(run)][group_of(reference.name)].append((reference, run))
        sections = [line for name, groups in environments.items() for line in section(name, groups, args.to)]
    page = (args.to / "results.md").read_text(encoding="utf-8")
    (args.to / "results.md").write_text(_replaced(page, "\n".join(sections)), encoding="utf-8")


def group_of(name: str) -> str:
    """The name of a reference without its seed."""
    return re.sub(r"-seed-\d+$", "", name)


def section(environment: str, groups: Groups, out: Path) -> Iterator[str]:
    """The lines of an environment, and its picture."""
    found = compare([run for runs in groups.values() for _, run in runs], last=LAST)
    names = {run.name: name for name, runs in groups.items() for _, run in runs}
    labels = {group.name: names[group.histories[0].name] for group in found.groups}
    slug = re.sub(r"\W+", "_", environment.split(",")[0]).lower()
    figure = curves(environment, found, labels)
    (out / "images" / f"results_{slug}.png").write_bytes(charts.png_bytes(figure))
    yield from (f"## {environment}", "", f"![{environment}](images/results_{slug}.png)", "")
    steps = count(float(found.env_steps))
    yield f"After {steps} environment steps, interquartile mean and its 95 % interval over seeds: {found.about}."
    yield ""
    level = _level(found)
    head = ("group", "seeds", "return", "before adaptation", "lowest to highest seed", f"steps to {number(level)}")
    yield f"| {' | '.join(head)} | s per iteration |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for group in found.groups:
        runs = groups[labels[group.name]]
        means = group.scores.run_means
        cells = (
            f"`{labels[group.name]}`",
            str(len(runs)),
            _with_ends(group.iqm),
            _before(runs, found.env_steps),
            f"{number(float(means.min()))} to {number(float(means.max()))}",
            _steps_to(runs, level),
            number(float(np.median([reference.wall_seconds / reference.iterations for reference, _ in runs]))),
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from by_class({labels[group.name]: groups[labels[group.name]] for group in found.groups})
    yield from stability(groups)
    yield from orders(found, labels)


def orders(found: Comparison, labels: Mapping[str, str]) -> Iterator[str]:
    """What can be said of the order of groups: the pairs that have one, and how many have none."""
    if not found.pairs:
        return
    kinds = [(pair.shown, pair.attainable) for pair in found.pairs]
    shown = sum(order for order, _ in kinds)
    too_few = sum(not attainable for _, attainable in kinds)
    yield (
        f"Order: shown for {shown} of {len(kinds)} pairs, tested all together; {too_few} have too few seeds to tell, "
        f"{len(kinds) - shown - too_few} could tell and do not."
    )
    yield ""
    for (order, _), verdict in zip(kinds, found.verdicts, strict=False):
        if order:
            yield f"- {_named(verdict, labels)}"
    if shown:
        yield ""


def curves(environment: str, found: Comparison, labels: Mapping[str, str]) -> charts.Figure:
    """Returns over environment steps: a line per group, its seeds between the edges of a band."""
    series: list[charts.Series] = []
    for n, group in enumerate(found.groups):
        seeds = np.array([history.at(found.curve_steps) for history in group.histories])
        band = (seeds.min(axis=0), seeds.max(axis=0))
        series.append(charts.Series(labels[group.name], COLORS[n % len(COLORS)], group.curve.values, band))
    figure = charts.line_chart(
        f"Return, {environment}",
        found.curve_steps,
        "environment steps",
        "average episode return",
        series,
        note="line: interquartile mean over seeds; band: lowest to highest seed",
        size=(8.6, 5.2),
    )
    (axes,) = figure.axes
    if legend := axes.get_legend():  # of one group there is none; of many it would lie on the lines
        legend.remove()
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def by_class(groups: Groups) -> Iterator[str]:
    """A table of returns after adaptation by class of task, where the environment has classes."""
    rows: dict[str, list[str]] = {}
    head: list[str] = []
    for name, runs in groups.items():
        classes = classes_of(runs[0][1])
        if classes is None:
            return
        head = [*classes.names]
        means = [_class_means(run, len(head)) for _, run in runs]
        rows[name] = [_with_error(values) for values in np.array(means).T]
    yield from (f"By class of task, last {LAST} iterations of each run, mean over seeds ± its standard error:", "")
    yield f"| group | {' | '.join(head)} |"
    yield "| --- |" + " --- |" * len(head)
    yield from (f"| `{name}` | {' | '.join(cells)} |" for name, cells in rows.items())
    yield ""


def stability(groups: Groups) -> Iterator[str]:
    """Whether what was learned stays, for groups that are long enough to say."""
    long = {name: runs for name, runs in groups.items() if min(len(run.iterations) for _, run in runs) >= LATE.stop}
    if not long:
        return
    yield "Whether it stays, mean return after adaptation of two spans of iterations, by seed:"
    yield ""
    yield f"| group | seed | {EARLY.start} to {EARLY.stop - 1} | {LATE.start} to {LATE.stop - 1} |"
    yield "| --- | --- | --- | --- |"
    for name, runs in long.items():
        spans = np.array([[_after(run)[span].mean() for span in (EARLY, LATE)] for _, run in runs])
        for (reference, _), row in zip(runs, spans, strict=True):
            yield f"| `{name}` | {reference.seed} | {number(row[0])} | {number(row[1])} |"
        early, late = (number(mean) for mean in spans.mean(axis=0))
        yield f"| | all: rises by {_with_error(spans[:, 1] - spans[:, 0])} | {early} | {late} |"
    yield ""


def _with_error(values: np.ndarray) -> str:
    """Mean and its standard error over seeds, where there are several."""
    error = f" ± {number(values.std(ddof=1) / np.sqrt(len(values)))}" if len(values) > 1 else ""
    return f"{number(values.mean())}{error}"


def _environment(run: Run) -> str:
    env = run.config["env"]
    options = ", ".join(f"{name} {value}" for name, value in env["options"].items())
    return f"{env['name']}{f', {options}' if options else ''}"


def _class_means(run: Run, classes: int) -> list[float]:
    found = returns_by_class(run, run.iterations[-LAST:], classes_of(run))
    values = [[estimate.mean for estimate in by_step[-1].estimates] for by_step in found.values()]
    return [float(mean) for mean in np.nanmean(np.array(values).reshape(-1, classes), axis=0)]


def _after(run: Run) -> np.ndarray:
    return np.array([by_inner_step(row, "average_return")[-1] for row in run.metrics().to_pylist()])


def _before(runs: Sequence[tuple[Reference, Run]], env_steps: int) -> str:
    if int(runs[0][1].config["algorithm"].get("inner_steps", 0) or 0) == 0:
        return "-"
    values: list[float] = []
    for _, run in runs:
        rows = [row for row in run.metrics().to_pylist() if row["env_steps"] <= env_steps][-LAST:]
        values += [float(np.mean([row["step_0.average_return"] for row in rows]))]
    return number(float(np.mean(values)))


def _level(found: Comparison) -> float:
    """Half way from the lowest first to the highest last value of all curves."""
    first = min(float(group.curve.values[0]) for group in found.groups)
    last = max(float(group.curve.values[-1]) for group in found.groups)
    return float(f"{(first + last) / 2:.2g}")


def _steps_to(runs: Sequence[tuple[Reference, Run]], level: float) -> str:
    """After how many steps the mean of five iterations reaches a level, median over seeds."""
    steps: list[float] = []
    for _, run in runs:
        smooth = np.convolve(_after(run), np.full(SMOOTH, 1 / SMOOTH), "valid")
        reached = np.flatnonzero(smooth >= level)
        if len(reached):
            steps.append(float(run.metrics()["env_steps"][int(reached[0]) + SMOOTH - 1].as_py()))
    if len(steps) < len(runs):
        return f"{len(steps)} of {len(runs)} seeds do"
    return count(float(np.median(steps)))


def _with_ends(estimate: Estimate) -> str:
    if np.isnan(estimate.low):
        return number(estimate.value)
    return f"{number(estimate.value)} ({number(estimate.low)} to {number(estimate.high)})"


def _named(verdict: str, labels: Mapping[str, str]) -> str:
    for name in sorted(labels, key=len, reverse=True):
        verdict = re.sub(rf"(?<!\S){re.escape(name)}(?![\w.=])", f"`{labels[name]}`", verdict)
    return verdict


def _replaced(page: str, generated: str) -> str:
    """The page with what is between its two marks replaced."""
    begin, end = "<!-- generated by benchmarks/results.py -->", "<!-- end of what is generated -->"
    head, _, rest = page.partition(begin)
    return f"{head}{begin}\n\n{generated}\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    main()
