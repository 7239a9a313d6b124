"""Tables of the page of results on whether what was learned stays."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from metaloom.flows.formatting import by_inner_step, number
from metaloom.storage import Run

EARLY, LATE = slice(50, 100), slice(150, 200)
FALL = 0.1

Groups = Mapping[str, Sequence[Run]]


def stability(groups: Groups) -> Iterator[str]:
    """Whether what was learned stays, for groups that are long enough to say."""
    long = {name: runs for name, runs in groups.items() if min(len(run.iterations) for run in runs) >= LATE.stop}
    if not long:
        return
    early, late = (f"{span.start} to {span.stop - 1}" for span in (EARLY, LATE))
    yield "Mean return after adaptation over seeds, in two spans of iterations:"
    yield ""
    yield f"| group | seeds | {early} | {late} | rises by |"
    yield "| --- | --- | --- | --- | --- |"
    for name, runs in long.items():
        spans = np.array([[returns_after(run)[span].mean() for span in (EARLY, LATE)] for run in runs])
        early, late = (number(mean) for mean in spans.mean(axis=0))
        yield f"| `{name}` | {len(runs)} | {early} | {late} | {with_error(spans[:, 1] - spans[:, 0])} |"
    yield ""


def falls(groups: Groups, last: int) -> Iterator[str]:
    """Yield the highest and last means of every seed, for groups in which a seed ends far below its highest."""
    means = {
        name: {run.config["seed"]: running_mean(returns_after(run), last) for run in runs}
        for name, runs in groups.items()
    }
    fallen = {
        name: seeds
        for name, seeds in means.items()
        if any(values.max() - values[-1] > FALL * abs(values.max()) for values in seeds.values())
    }
    if not fallen:
        return
    yield f"Groups in which a seed ends {100 * FALL:.0f}% below its highest mean over {last} successive iterations:"
    yield ""
    yield "| group | highest | last |"
    yield "| --- | --- | --- |"
    for name, seeds in fallen.items():
        highest = ", ".join(f"{seed}: {_whole(values.max())}" for seed, values in seeds.items())
        ends = ", ".join(f"{seed}: {_whole(values[-1])}" for seed, values in seeds.items())
        yield f"| `{name}` | {highest} | {ends} |"
    yield ""


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Means of so many successive values, or the one of all where there are fewer."""
    width = min(width, len(values))
    return np.convolve(values, np.full(width, 1 / width), "valid")


def returns_after(run: Run) -> np.ndarray:
    """[iterations] average return after adaptation, or of the only round."""
    return np.array([by_inner_step(row, "average_return")[-1] for row in run.metrics().to_pylist()])


def with_error(values: np.ndarray) -> str:
    """Mean and its standard error over seeds, where there are several."""
    error = f" ± {number(values.std(ddof=1) / np.sqrt(len(values)))}" if len(values) > 1 else ""
    return f"{number(values.mean())}{error}"


def _whole(value: float) -> str:
    return number(float(round(value)))
