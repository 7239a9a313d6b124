"""Picture of RL2 and ProMP on the half-cheetah that runs in either direction, by environment steps, from stored runs.

    python docs/images/draw_half_cheetah.py FOLDER RUNS

RUNS holds half-promp-1 ... -5, half-rl2-1 ... and half-attention-1 ... -3: the recipes with 32 and 30 million steps,
the last with another memory (docs/algorithms/rl2.md), and their seeds. FOLDER gets half_cheetah_memory.png, moving
means over a million steps, a line for each seed: the return of an episode in training, and what the second episode of a
trial earns more than the first.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import metaloom
from metaloom.flows.views.charts import INK
from metaloom.flows.views.series import CLASS_COLORS

CURVES = {
    "ProMP, after adaptation": ("half-promp", "step_1.average_return"),
    "RL², GRU, second episode of a trial": ("half-rl2", "last_episode_return"),
    "RL², linear attention, second episode": ("half-attention", "last_episode_return"),
}
FIRST = "first_episode_return"
SMOOTHED_STEPS = 1_000_000


def main() -> None:
    folder, runs = map(Path, sys.argv[1:])
    figure, (returns, gains) = plt.subplots(1, 2, figsize=(10, 3.9), layout="constrained")
    for (label, (name, metric)), color in zip(CURVES.items(), CLASS_COLORS, strict=False):
        for n, path in enumerate(sorted(runs.glob(f"{name}-*"))):
            metrics = metaloom.open_run(path).metrics().to_pandas()
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
    figure.savefig(folder / "half_cheetah_memory.png", dpi=110)


def smooth(metrics: pd.DataFrame, values: pd.Series) -> pd.Series:
    """Moving mean over a million steps, of fewer at first."""
    window = max(1, round(SMOOTHED_STEPS / metrics["env_steps"].diff().mean()))
    return values.rolling(window, min_periods=1).mean()


if __name__ == "__main__":
    main()
