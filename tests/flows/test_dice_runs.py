"""Runs whose samples are not the common ones: DiCE, and value networks as baselines."""

import pytest

from metaloom import storage
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import resume, train
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.recipes import RECIPES
from metaloom.flows.rollouts.workers import Backend

SERIAL = Backend(workers=0)
NETWORK = {"name": "value_network", "num_epochs": 2}
RUNS = {
    "dice-maml": {"algorithm": {"name": "dice-maml"}, "baseline": "linear_time"},
    "vpg-dice": {
        "algorithm": {"name": "vpg-dice", "num_minibatches": 2},
        "baseline": "linear_time",
        "processing": {"return_baseline": NETWORK},
    },
    "promp with a value network": {"baseline": NETWORK},
    "promp with a shared value network": {"baseline": {**NETWORK, "shared": True}},
}


@pytest.fixture(params=RUNS)
def config(request, tiny_config):
    return tiny_config(iterations=2, **RUNS[request.param])


def test_a_run_resumes_and_replays_to_the_same_bits_on_any_number_of_threads(config, tmp_path, digests):
    train(config, tmp_path / "whole", backend=SERIAL)
    first = config.model_copy(update={"iterations": 1})
    train(first, tmp_path / "parts", backend=Backend(workers=0, threads=2))
    resume(tmp_path / "parts", iterations=2, backend=SERIAL)
    assert digests(tmp_path / "parts") == digests(tmp_path / "whole")
    assert all(outcome.identical for outcome in replay(tmp_path / "whole"))
    assert storage.verify_run(tmp_path / "whole") == []


def test_a_run_can_be_evaluated(config, tmp_path):
    train(config, tmp_path / "run", backend=SERIAL)
    first, again = (evaluate(tmp_path / "run", num_tasks=2, backend=SERIAL) for _ in range(2))
    assert first.evaluation.test_returns.shape[:2] == (2, 2)
    assert (first.evaluation.test_returns == again.evaluation.test_returns).all()


def test_adjusted_rewards_are_stored_for_dice_and_for_nothing_else(tmp_path, tiny_config):
    for name, adjusted in (("dice-maml", True), ("promp with a value network", False)):
        train(tiny_config(iterations=1, **RUNS[name]), tmp_path / name, backend=SERIAL)
        run = storage.open_run(tmp_path / name)
        assert (run[0].samples(1).adjusted_rewards is not None) == adjusted
        assert ("adjusted_reward" in run.steps().column_names) == adjusted


def test_the_seed_of_a_run_and_the_position_in_it_decide_a_value_network(tmp_path, tiny_config):
    settings = RUNS["promp with a value network"]
    for seed in (7, 8):
        train(tiny_config(iterations=2, seed=seed, **settings), tmp_path / str(seed), backend=SERIAL)
    run, other = (storage.open_run(tmp_path / str(seed)) for seed in (7, 8))
    values = [run[0].samples(0).values, run[0].samples(1).values, run[1].samples(0).values, other[0].samples(0).values]
    assert len({value.tobytes() for value in values}) == 4


@pytest.mark.parametrize("algorithm", ["dice-maml", "vpg-dice"])
def test_recipes_have_the_sizes_of_their_source(algorithm):
    for env in ("point-corner", "half-cheetah-dir"):
        config = RECIPES[f"{algorithm}-{env}"]()
        assert (config.env.name, config.processing.name, config.baseline.name) == (env, "dice", "linear_time")
        sizes = (config.num_tasks, config.episodes_per_task, config.max_episode_steps, config.iterations)
        assert sizes == (40, 20 if algorithm == "dice-maml" else 80, 100, 300)
        assert (config.algorithm.inner_lr, config.algorithm.outer_lr, config.algorithm.num_epochs) == (0.1, 1e-3, 1)
