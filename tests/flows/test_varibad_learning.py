"""VariBAD searches a grid for its goal, and goes back to it, about as well as can be."""

import pytest
from grid_references import GridTrials, bayes_optimal_return

import metaloom
from metaloom.flows.rollouts.workers import Backend


@pytest.mark.learning
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_varibad_comes_near_what_the_best_strategy_earns_in_a_trial(tmp_path, seed):
    run = metaloom.train(
        "varibad-hidden-goal-grid", tmp_path / "run", progress=False, seed=seed, backend=Backend(workers=0)
    )
    evaluation = metaloom.evaluate(run, -1, num_tasks=2100, test_episodes=1).evaluation
    trial = evaluation.test_returns.mean((0, 2)).sum()
    assert trial >= 0.85 * bayes_optimal_return(GridTrials())
