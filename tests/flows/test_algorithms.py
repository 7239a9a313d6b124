"""Every algorithm of the meta family trains, is stored, and is computed again to the bit, through the same stages."""

import numpy as np
import pytest

import storage
from flows.evaluate import evaluate
from flows.recipes import RECIPES
from flows.replay import replay
from flows.train import train
from flows.workers import Backend
from pipeline.config import build_config, override

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
