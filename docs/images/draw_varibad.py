"""Pictures of VariBAD on the grid with a hidden goal, from stored runs: how it learns, and what it comes to believe.

    PYTHONPATH=tests/helpers python docs/images/draw_varibad.py FOLDER RUN ...

FOLDER gets two pictures (docs/images has those of the page).

varibad_grid.png: the return of a trial in every evaluation of the runs, beside computed references; not drawn where a
run has no evaluation.

varibad_belief.png: of the last iteration of the first run, the probability of a reward in every cell, as the decoder
tells it of latent variables drawn from the posteriors that were acted on, in the course of a trial: the one of the
iteration that found its goal last within the first two episodes.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from grid_references import (
    GridTrials,
    bayes_optimal_return,
    nearest_unvisited,
    strategy_return,
)

import metaloom
from metaloom.flows.trained.blueprint import Blueprint
from metaloom.flows.views.charts import INK
from metaloom.flows.views.series import CLASS_COLORS
from metaloom.pipeline.algorithms.varibad.model import DecodedSteps, Decoders
from metaloom.pipeline.config.run import build_stored
from metaloom.pipeline.estimation.trials import Trials

DRAWS = 200


def trial_return(evaluation):
    """The mean return of a whole trial over all goals, of which a deterministic evaluation has some more often."""
    goals = np.unique(evaluation.task_params, axis=0)
    assert len(goals) == len(GridTrials().goals)
    trials = evaluation.test_returns.mean(2).sum(1)
    return np.mean([trials[(evaluation.task_params == goal).all(1)].mean() for goal in goals])


def trial_returns(run):
    """Environment steps and the return of a trial, of every evaluation of a run."""
    every, steps = run.config["evaluation"]["every"], build_stored(run.config).nominal_steps_per_iteration
    iterations = range(every - 1, len(run.iterations), every)
    returns = [trial_return(run[i].evaluation()) for i in iterations]
    return np.array([(i + 1) * steps for i in iterations]), np.array(returns)


def draw_curves(runs, picture):
    """Draw the runs' evaluations."""
    figure, panel = plt.subplots(figsize=(7, 4), layout="constrained")
    best = bayes_optimal_return(GridTrials())
    for run, color in zip(runs, CLASS_COLORS, strict=False):
        steps, returns = trial_returns(run)
        panel.plot(
            steps / 1e6, returns, color=color, label=f"seed {run.config['seed']}, at the end {returns[-1] / best:.3f}"
        )
    for level, style, label in (
        (best, "-", "Bayes-optimal"),
        (0.9 * best, ":", "0.9 of it"),
        (strategy_return(GridTrials(), nearest_unvisited), "--", "the nearest cell not visited yet"),
    ):
        panel.axhline(level, color=INK, linestyle=style, linewidth=1, label=label)
    panel.set(xlabel="million environment steps", ylabel="return of a trial of 4 episodes")
    panel.legend(frameon=False, fontsize=9)
    figure.savefig(picture, dpi=110)


def cell_probabilities(run, iteration, mean, log_std):
    """P(reward) [T, size²] in every cell, under T posteriors [T, Z]."""
    config = build_stored(run.config)
    decoders = Decoders(config.algorithm, Blueprint.of(config).spaces)
    params = {name: torch.tensor(value) for name, value in run[iteration].learner().extra.items()}
    noise = np.random.default_rng(0).standard_normal((DRAWS, *mean.shape), np.float32)
    cells = torch.eye(run[iteration].rollouts(0).observations.shape[-1]).expand(len(mean), -1, -1)
    none = cells[..., :0]
    latents = torch.tensor(mean + np.exp(log_std) * noise)
    logits = decoders.rewards(params, latents, DecodedSteps(none, none, cells, none))
    return torch.sigmoid(logits).mean(0).detach().numpy()


def draw_beliefs(run, picture):
    """Draw eight beliefs of a trial."""
    iteration, settings = len(run.iterations) - 1, run.config["algorithm"]
    batch = run[iteration].rollouts(0)
    trials, horizon = Trials(batch, settings["episodes_per_trial"], 5), batch.rewards.shape[2]
    hit = trials.rewards > 0
    found = np.where(hit.any(1), hit.argmax(1), hit.shape[1])
    n = int(np.where(found < 2 * horizon, found, -1).argmax())
    last = int(found[n])
    steps = [*np.linspace(0, last, 6).round().astype(int).tolist(), last + 1, 2 * horizon]
    mean, log_std = (trials.behavior[f"posterior_{part}"][n, steps] for part in ("mean", "log_std"))
    probabilities = cell_probabilities(run, iteration, mean, log_std)
    size = int(np.sqrt(probabilities.shape[1]))
    cells, led_to = trials.inputs[n, :, : size**2].argmax(-1), trials.next_observations[n].argmax(-1)
    goal = int(led_to[last])

    figure, panels = plt.subplots(2, 4, figsize=(10, 5.4), layout="constrained")
    for panel, t, of_cells in zip(panels.flat, steps, probabilities, strict=True):
        image = panel.imshow(of_cells.reshape(size, size).T, origin="lower", vmin=0, vmax=1, cmap="Blues")
        episode, step = divmod(t, horizon)
        way = cells[episode * horizon : t + 1]
        visited = np.unique(np.concatenate([cells[: t + 1], led_to[:t]]))
        missed = visited[visited != goal]
        panel.plot(missed // size, missed % size, "x", color="#57606a", markersize=9)
        panel.plot(way // size, way % size, "-", color="#d55e00", linewidth=1.5)
        panel.plot(cells[t] // size, cells[t] % size, "o", color="#d55e00", markersize=9)
        panel.plot(goal // size, goal % size, "*", markerfacecolor="none", markeredgecolor="black", markersize=17)
        panel.set_title(f"episode {episode + 1}, step {step}", fontsize=10)
        panel.set(xticks=[], yticks=[])
    figure.colorbar(image, ax=panels, label="probability of a reward", shrink=0.8)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    opened = [metaloom.open_run(name) for name in names]
    if all(len(run.iterations) >= (run.config["evaluation"]["every"] or np.inf) for run in opened):
        draw_curves(opened, Path(folder) / "varibad_grid.png")
    draw_beliefs(opened[0], Path(folder) / "varibad_belief.png")
