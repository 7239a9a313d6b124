"""Which episodes an evaluation asks for, and what it keeps of them."""

from types import SimpleNamespace

import numpy as np

from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.dataflow.stage import At
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.tasks.evaluation import EvaluationPlan
from metaloom.stages.evaluate import evaluate, unseen


def evaluated(batch, steps: int):
    """Evaluate with so many adaptation steps; return the positions of all rollouts, their sizes and the result."""
    asked, sizes = [], []

    def sampling(episodes, **about):
        def collect(params, tasks, position):
            asked.append(position)
            sizes.append(episodes)
            shape = (len(tasks), episodes, 1)
            return batch(np.zeros((*shape[:2], 2, 1)), np.full(shape, len(asked)), np.ones(shape[:2]))

        return SimpleNamespace(collect=collect)

    asks = {"adaptation_steps": steps, "episodes": 2, "test_episodes": 3}
    settings = {"env": "point-2d-goal", "algorithm": {"name": "promp"}, "num_tasks": 4, "iterations": 3}
    config = build_config({**settings, "evaluation": asks})
    learner = SimpleNamespace(acting_params=lambda state, num_tasks: None)
    adaptation = SimpleNamespace(adapt=lambda state, params, rounds, run_seed: params)
    tools = (learner, config, make_env(config.env), SimpleNamespace(sampling=sampling), adaptation, unseen, At(1, 0))
    found = evaluate(*tools, state=SimpleNamespace(learner=None))
    assert {position.run_seed for position in asked} == {EvaluationPlan.of(config).run_seed}
    return [(position.iteration, position.step) for position in asked], sizes, found


def test_episodes_of_adaptation_and_test_episodes_have_their_own_random_streams(batch) -> None:
    asked, sizes, found = evaluated(batch, 2)
    assert asked == [(1, 0), (0, 0), (1, 1), (0, 1), (1, 2)]
    assert sizes == [3, 2, 3, 2, 3]
    # Rewards count the rollouts.
    assert found.test_returns[3].tolist() == [[1] * 3, [3] * 3, [5] * 3]
    assert found.adaptation_returns[3].tolist() == [[2] * 2, [4] * 2]


def test_without_adaptation_nothing_is_kept_of_it(batch) -> None:
    asked, _, found = evaluated(batch, 0)
    assert asked == [(1, 0)]
    assert found.test_returns.shape == (4, 1, 3)
    assert found.adaptation_returns.shape == (4, 0, 0)
