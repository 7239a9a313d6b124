"""Picture of what ProMP learns on bandits and tabular MDPs, from stored runs.

    python docs/images/draw_small_worlds.py FOLDER RUNS

RUNS holds promp-bandit-1, -2, -3 and promp-tabular-mdp-1, -2, -3: the recipe and its seed. FOLDER gets
promp_small_worlds.png: average return of an episode before and after the inner step, a line for each seed.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

import metaloom
from metaloom.flows.views.charts import INK
from metaloom.flows.views.series import CLASS_COLORS

SEEDS = (1, 2, 3)
WORLDS = {
    "bandit": ("five arms, ten pulls", {"the best arm of each": 10 * 5 / 6}),
    "tabular-mdp": ("random MDPs, ten steps", {"psrl, episodes 11 to 25": (404.7 - 133.8) / 15}),
}


def main() -> None:
    folder, runs = map(Path, sys.argv[1:])
    figure, panels = plt.subplots(1, len(WORLDS), figsize=(8, 3.6), layout="constrained")
    for panel, (world, (title, bounds)) in zip(panels, WORLDS.items(), strict=True):
        for seed in SEEDS:
            metrics = metaloom.open_run(runs / f"promp-{world}-{seed}").metrics().to_pandas()
            for step, (name, color) in enumerate(zip(("before", "after"), CLASS_COLORS, strict=False)):
                label = f"{name} adaptation" if seed == SEEDS[0] else None
                panel.plot(metrics["iteration"], metrics[f"step_{step}.average_return"], color=color, lw=1, label=label)
        for name, value in bounds.items():
            panel.axhline(value, color=INK, lw=1, ls="--", label=name)
        panel.set_title(title, color=INK, fontsize=10)
        panel.set_xlabel("iteration", color=INK)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    panels[0].set_ylabel("return of an episode", color=INK)
    figure.savefig(folder / "promp_small_worlds.png", dpi=110)


if __name__ == "__main__":
    main()
