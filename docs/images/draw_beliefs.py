"""Draw what a stored VariBAD run believes about a hidden goal in the course of a trial: varibad_belief.png.

    python docs/images/draw_beliefs.py RUN@ITERATION docs/images/varibad_belief.png

The probability of a reward in every cell, as the decoder tells it of latent variables drawn from the posteriors that
were acted on. The trial is the one, among those of the iteration, that found its goal last within the first two
episodes.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import metaloom
from metaloom.flows.trained.blueprint import Blueprint
from metaloom.pipeline.algorithms.varibad.decoders import DecodedSteps, Decoders
from metaloom.pipeline.config.run import build_stored
from metaloom.pipeline.estimation.trials import Trials

DRAWS = 200


def cell_probabilities(run, iteration, mean, log_std):
    """P(reward) [T, size²] in every cell, under T posteriors [T, Z]."""
    config = build_stored(run.config)
    decoders = Decoders(config.algorithm, Blueprint.of(config).spaces)
    params = {name: torch.tensor(value) for name, value in run[iteration].learner().extra.items()}
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((DRAWS, *mean.shape), np.float32)
    cells = torch.eye(run[iteration].rollouts(0).observations.shape[-1]).expand(len(mean), -1, -1)
    none = cells[..., :0]
    logits = decoders.rewards(
        params, torch.tensor(mean + np.exp(log_std) * noise), DecodedSteps(none, none, cells, none)
    )
    return torch.sigmoid(logits).mean(0).detach().numpy()


def found_at(trials):
    """[N], the step in which each trial first reaches its goal; the trial's length where it never does."""
    hit = trials.rewards > 0
    return np.where(hit.any(1), hit.argmax(1), hit.shape[1])


def draw(name, picture):
    """Draw eight beliefs of a trial."""
    place, _, iteration = name.rpartition("@")
    run, iteration = metaloom.open_run(place), int(iteration)
    settings, batch = run.config["algorithm"], run[iteration].rollouts(0)
    trials, horizon = Trials(batch, settings["episodes_per_trial"], 5), batch.rewards.shape[2]
    at = found_at(trials)
    n = int(np.where(at < 2 * horizon, at, -1).argmax())
    steps = np.linspace(0, at[n], 6).round().astype(int)
    steps = [*steps.tolist(), int(at[n]) + 1, 2 * horizon]
    mean, log_std = (trials.behavior[f"posterior_{part}"][n, steps] for part in ("mean", "log_std"))
    probabilities = cell_probabilities(run, iteration, mean, log_std)
    size = int(np.sqrt(probabilities.shape[1]))
    cells = trials.inputs[n, :, : size**2].argmax(-1)
    goal = int(trials.next_observations[n, at[n]].argmax())

    figure, panels = plt.subplots(2, 4, figsize=(10, 5.4), layout="constrained")
    for panel, t, of_cells in zip(panels.flat, steps, probabilities, strict=True):
        image = panel.imshow(of_cells.reshape(size, size).T, origin="lower", vmin=0, vmax=1, cmap="Blues")
        episode, step = divmod(t, horizon)
        way = cells[episode * horizon : t + 1]
        visited = np.unique(np.concatenate([cells[: t + 1], trials.next_observations[n, :t].argmax(-1)]))
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
    draw(sys.argv[1], Path(sys.argv[2]))
