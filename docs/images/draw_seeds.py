"""Picture of what an initial policy and the draws each do to learning, from the stored runs of docs/seeds.md.

    python docs/images/draw_seeds.py FOLDER RUNS

RUNS holds p1d1, p1d2, ..., p3d3: pNdM begins with the policy of seed N and continues with the draws of seed M.
FOLDER gets seeds.png: what adaptation gains in every iteration, on a logarithmic scale.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

import metaloom
from metaloom.flows.views.charts import INK
from metaloom.flows.views.series import CLASS_COLORS

SEEDS = (1, 2, 3)
DASHES = ("-", "--", ":")


def gains(run):
    """Average return after adaptation less that before it, of every iteration."""
    metrics = [run[i].metrics() for i in range(len(run.iterations))]
    return [m["step_1.average_return"] - m["step_0.average_return"] for m in metrics]


def main() -> None:
    folder, runs = map(Path, sys.argv[1:])
    figure, panel = plt.subplots(figsize=(8, 4), layout="constrained")
    for policy, color in zip(SEEDS, CLASS_COLORS, strict=False):
        for draws, dash in zip(SEEDS, DASHES, strict=True):
            values = gains(metaloom.open_run(runs / f"p{policy}d{draws}"))
            label = f"policy of seed {policy}, draws of {draws}"
            panel.semilogy(range(len(values)), values, dash, color=color, label=label)
    panel.set_xlabel("iteration", color=INK)
    panel.set_ylabel("what adaptation gains (return)", color=INK)
    panel.set_xticks(range(0, 20, 2))
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(folder / "seeds.png", dpi=110)


if __name__ == "__main__":
    main()
