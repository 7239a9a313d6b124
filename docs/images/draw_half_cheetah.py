"""Picture of RL2 and ProMP on the half-cheetah that runs in either direction, by environment steps, from stored runs.

    python docs/images/draw_half_cheetah.py FOLDER RUNS

RUNS holds half-promp-1 ... -5 and half-rl2-1 ...: the recipes with 32 and 30 million steps, and their seeds. FOLDER
gets half_cheetah_memory.png: the return of an episode in training, a moving mean over a million steps, a line for each
seed.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

import metaloom
from metaloom.flows.views.charts import INK
from metaloom.flows.views.series import CLASS_COLORS

CURVES = {
    "ProMP, after adaptation": ("half-promp", "step_1.average_return"),
    "RL², second episode of a trial": ("half-rl2", "last_episode_return"),
}
SMOOTHED_STEPS = 1_000_000


def main() -> None:
    folder, runs = map(Path, sys.argv[1:])
    figure, panel = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for (label, (name, metric)), color in zip(CURVES.items(), CLASS_COLORS, strict=False):
        for n, path in enumerate(sorted(runs.glob(f"{name}-*"))):
            metrics = metaloom.open_run(path).metrics().to_pandas()
            steps = metrics["env_steps"]
            window = max(1, round(SMOOTHED_STEPS / steps.diff().mean()))
            means = metrics[metric].rolling(window, min_periods=1).mean()
            panel.plot(steps / 1e6, means, color=color, lw=1, label=None if n else label)
    panel.set_title("half-cheetah, forwards or backwards", color=INK, fontsize=10)
    panel.set_xlabel("million environment steps", color=INK)
    panel.set_ylabel("return of an episode", color=INK)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8)
    figure.savefig(folder / "half_cheetah_memory.png", dpi=110)


if __name__ == "__main__":
    main()
