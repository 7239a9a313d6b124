"""Picture of RL2 and ProMP on the half-cheetah that runs in either direction, by environment steps, from stored runs.

    python docs/images/draw_half_cheetah.py FOLDER --promp RUN ... --gru RUN ... --attention RUN ...

FOLDER gets half_cheetah_memory.png, moving means over a million steps, a line for each run: the return of an episode in
training, and the gain of the last episode of a trial over the first. docs/algorithms/rl2_results.md and
docs/references.md have the commands that train the runs; a fork is a separate run.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import metaloom
from metaloom.flows.views.charts import INK
from metaloom.flows.views.series import CLASS_COLORS
from metaloom.storage import StoreError

LAST, FIRST = "last_episode_return", "first_episode_return"
CURVES = {
    "promp": ("ProMP, after adaptation", "step_1.average_return"),
    "gru": ("RL², GRU, second episode of a trial", LAST),
    "attention": ("RL², linear attention, second episode", LAST),
}
SMOOTHED_STEPS = 1_000_000


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if not args.folder.is_dir():
        parser.error(f"{args.folder}: no such folder; create it first, or choose another")
    try:
        curves = {kind: [read(run, metric) for run in getattr(args, kind)] for kind, (_, metric) in CURVES.items()}
    except (StoreError, ValueError) as error:
        parser.error(str(error))
    if not any(curves.values()):
        parser.error(f"no runs given; pass at least one of {', '.join(f'--{kind}' for kind in CURVES)}")
    draw(curves, args.folder / "half_cheetah_memory.png")


def read(run: str, metric: str) -> pd.DataFrame:
    """Read the metrics of a run, by name or path.

    Raises:
        StoreError: there is no such run, or nothing in it.
        ValueError: it is of another algorithm.
    """
    metrics = metaloom.open_run(run).metrics().to_pandas()
    if metric not in metrics:
        raise ValueError(f"{run}: no metric {metric!r}; pass a run of the algorithm that the option names")
    return metrics


def draw(curves: dict[str, list[pd.DataFrame]], picture: Path) -> None:
    """Draw the metrics of all runs by kind."""
    figure, (returns, gains) = plt.subplots(1, 2, figsize=(10, 3.9), layout="constrained")
    for (kind, (label, metric)), color in zip(CURVES.items(), CLASS_COLORS, strict=False):
        for n, metrics in enumerate(curves[kind]):
            millions = metrics["env_steps"] / 1e6
            returns.plot(millions, smooth(metrics, metrics[metric]), color=color, lw=1, label=None if n else label)
            if FIRST in metrics:
                gains.plot(millions, smooth(metrics, metrics[metric] - metrics[FIRST]), color=color, lw=1)
    returns.set_title("half-cheetah, forwards or backwards", color=INK, fontsize=10)
    returns.set_ylabel("return of an episode", color=INK)
    returns.legend(frameon=False, fontsize=8)
    gains.set_title("second episode of a trial, over the first", color=INK, fontsize=10)
    gains.set_ylabel("difference of returns", color=INK)
    gains.axhline(0, color=INK, lw=0.6)
    for panel in (returns, gains):
        panel.set_xlabel("million environment steps", color=INK)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)


def smooth(metrics: pd.DataFrame, values: pd.Series) -> pd.Series:
    """Moving mean over a million steps, of fewer at first."""
    window = max(1, round(SMOOTHED_STEPS * len(metrics) / metrics["env_steps"].iloc[-1]))
    return values.rolling(window, min_periods=1).mean()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a folder that is there")
    for kind, (label, _) in CURVES.items():
        parser.add_argument(f"--{kind}", metavar="RUN", nargs="+", default=[], help=f"names or paths of runs: {label}")
    return parser


if __name__ == "__main__":
    main()
