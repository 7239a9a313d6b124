"""Every algorithm of the meta family trains, is stored, and is computed again to the bit, through the same stages."""

import numpy as np
import pytest

from metaloom import storage
from metaloom.flows.commands.evaluate import evaluate
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import train
from metaloom.flows.recipes import RECIPES
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config

ALGORITHMS = sorted({name.removesuffix("-point-corner") for name in RECIPES if name.endswith("-point-corner")})
SMALL = [
    "env.options={reward: dense}",
    "policy.hidden_sizes=[8, 8]",
    "iterations=2",
    "num_tasks=3",
    "episodes_per_task=3",
    "max_episode_steps=8",
]


@pytest.mark.parametrize("inner_steps", [1, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_trains_and_replays_bit_for_bit(tmp_path, algorithm, inner_steps):
    settings = RECIPES[f"{algorithm}-point-corner"]().model_dump(mode="json")
    config = build_config(override(settings, [*SMALL, f"algorithm.inner_steps={inner_steps}"]))
    path = tmp_path / "run"
    train(config, path, backend=Backend(workers=0))
    run = storage.open_run(path)
    start, end = run[0].learner(), run[1].update().learner
    assert any(not np.array_equal(start.params[name], end.params[name]) for name in start.params)
    assert storage.verify_run(path) == []
    assert all(outcome.identical for outcome in replay(path))
    outcome = evaluate(path, adaptation_steps=2, backend=Backend(workers=0))
    assert len(outcome.summary()) == 3
