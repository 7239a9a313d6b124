"""Learning curves of several runs in one picture and one table, grouped by algorithm.

    python benchmarks/learning_curves.py --out point_corner.png runs/*-point-corner-seed?

A line is the mean over an algorithm's runs of the return after adaptation, its band their smallest and largest. The
table adds the return before adaptation and how much the last ten iterations gained on the first ten.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np

from metaloom import storage
from metaloom.flows.views import charts
from metaloom.flows.views.series import AFTER, BEFORE, BETWEEN, Chart, Series, alone

COLORS = (AFTER, BEFORE, *BETWEEN, "#8c959f")


def main() -> None:
    args = _arguments()
    curves: dict[str, list[np.ndarray]] = defaultdict(list)
    stored = [storage.open_run(path) for path in args.runs]
    iterations = min(args.iterations, *(len(run.iterations) for run in stored))
    for run in stored:
        curves[run.config["algorithm"]["name"]].append(returns(run, iterations))
    for line in table(curves):
        print(line)
    about = ("curves", "", "lines", args.title, "iteration", "average episode return after adaptation")
    series = (_series(name, runs, color) for (name, runs), color in zip(sorted(curves.items()), COLORS, strict=False))
    note, x = "line: mean over seeds; band: smallest to largest", np.arange(1, iterations + 1)
    figure = charts.draw(Chart(*about, note, "", x, alone(series), wide=True))
    args.out.write_bytes(charts.rendered(figure, "png"))


def returns(run: storage.Run, iterations: int) -> np.ndarray:
    """[iterations, K+1] average episode return of every round."""
    frame = run.episodes(range(iterations)).select(["iteration", "step", "return"]).to_pandas()
    return frame.groupby(["iteration", "step"])["return"].mean().unstack().to_numpy()


def table(curves: dict[str, list[np.ndarray]]) -> list[str]:
    """One markdown row per algorithm: means over the runs of ten iterations each."""
    rows = ["| algorithm | runs | before, last 10 | after, first 10 | after, last 10 | best 10 | rise of each run |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name, runs in sorted(curves.items()):
        after = np.stack([run[:, -1] for run in runs])
        smooth = np.stack([np.convolve(run, np.full(10, 0.1), "valid") for run in after])
        rises = ", ".join(f"{rise:+.1f}" for rise in smooth[:, -1] - smooth[:, 0])
        before = np.mean([run[-10:, 0].mean() for run in runs])
        numbers = (before, smooth[:, 0].mean(), smooth[:, -1].mean(), smooth.max(axis=1).mean())
        rows.append(f"| {name} | {len(runs)} | {' | '.join(f'{number:.1f}' for number in numbers)} | {rises} |")
    return rows


def _series(name: str, runs: list[np.ndarray], color: str) -> Series:
    after = np.stack([run[:, -1] for run in runs])
    return Series(name, color, after.mean(axis=0), (after.min(axis=0), after.max(axis=0)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("learning_curves.png"))
    parser.add_argument("--title", default="Return after adaptation")
    parser.add_argument("--iterations", type=int, default=100)
    return parser.parse_args()


if __name__ == "__main__":
    main()
