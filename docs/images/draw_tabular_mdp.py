"""Picture of what RL2 earns in the episodes of unknown processes, beside known strategies, from stored runs.

    PYTHONPATH=tests/helpers python docs/images/draw_tabular_mdp.py FOLDER RUN ...

RUN: runs of the recipe rl2-tabular-mdp. FOLDER gets rl2_tabular_mdp.png: returns of the episodes of a trial of most
likely actions, a line for each run, and of strategies that know the prior, in the processes of the first run.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from mdp_references import REFERENCES, earned

import metaloom
from metaloom.flows.views.charts import INK
from metaloom.flows.views.series import CLASS_COLORS
from metaloom.pipeline.envs.tabular_mdp import Tables, draw_tables

EPISODES, HORIZON, NUM_MDPS, STATES, ACTIONS = 10, 10, 2000, 10, 5
STRATEGIES = [("greedy", True, "-"), ("greedy", False, "--"), ("opsrl", False, "-."), ("psrl", False, ":")]
"""Strategies: name, True if it plans at every step, line style."""


def main() -> None:
    folder, runs = Path(sys.argv[1]), sys.argv[2:]
    figure, panel = plt.subplots(figsize=(7, 3.6), layout="constrained")
    episodes = np.arange(1, EPISODES + 1)
    processes: list[Tables] = []
    for run in runs:
        found = metaloom.evaluate(
            run, -1, num_tasks=NUM_MDPS, test_episodes=1, deterministic=True, remembered="as-tested"
        ).evaluation
        label = None if processes else f"RL², {len(runs)} seeds"
        processes = processes or [draw_tables(int(task), STATES, ACTIONS) for task in found.task_params[:, 0]]
        panel.plot(episodes, found.test_returns.mean((0, 2)), color=CLASS_COLORS[0], lw=1.5, label=label)
    tables = Tables(*map(np.stack, zip(*processes, strict=True)))
    for name, replan, style in STRATEGIES:
        rng = np.random.default_rng(0)
        returns = earned(REFERENCES[name], tables, episodes=EPISODES, horizon=HORIZON, rng=rng, replan=replan)
        label = f"{name}, planning at every step" if replan else name
        panel.plot(episodes, returns.mean(0), color=INK, lw=1, ls=style, label=label)
    panel.set_xticks(episodes)
    panel.set_xlabel("episode of a trial", color=INK)
    panel.set_ylabel("return of an episode", color=INK)
    panel.set_title("unknown processes of ten states and five actions", color=INK, fontsize=10)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8)
    figure.savefig(folder / "rl2_tabular_mdp.png", dpi=100)


if __name__ == "__main__":
    main()
