"""initialize, adapt and meta_optimize around a small ProMP."""

import numpy as np
import pytest

from metaloom.pipeline.algorithms.maml.settings import ProMP
from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.gaussian import GaussianPolicy
from metaloom.pipeline.types import EpisodeBatch, Samples, Step, TaskParams
from metaloom.stages.adapt import adapt
from metaloom.stages.counters import ENV_STEPS, ENV_STEPS_NOMINAL
from metaloom.stages.initialize import initialize
from metaloom.stages.meta_optimize import meta_optimize

POLICY = GaussianPolicy(2, 1, PolicyConfig(hidden_sizes=(4,)))
SIZES = ((2,), 1.0, 1, 0, "toy", 4)
PROMP = ProMP(inner_steps=1).build(
    Setup(*SIZES, POLICY.config, BaselineConfig(), ProcessingConfig(), "cpu", np.negative)
)
B, E, T = 3, 2, 4
LENGTHS = np.array([[4, 1], [2, 3], [4, 4]], np.int32)


@pytest.fixture
def steps() -> list[Step]:
    rng = np.random.default_rng(0)
    return [random_step(rng, k) for k in range(2)]


def random_step(rng, k):
    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    mask = (np.arange(T) < LENGTHS[..., None]).astype(np.float32)
    rewards = normal(B, E, T) * mask
    episodes = EpisodeBatch(
        observations=normal(B, E, T + 1, 2),
        actions=normal(B, E, T, 1),
        rewards=rewards,
        terminated=np.zeros((B, E), bool),
        truncated=np.ones((B, E), bool),
        lengths=LENGTHS,
        behavior={"mean": 0.1 * normal(B, E, T, 1), "log_std": np.zeros((B, 1), np.float32)},
        reward_terms={},
        initial_state=np.zeros((B, E, 0)),
    )
    return Step(episodes, Samples(rewards, rewards, normal(B, E, T) * mask, mask), k)


def test_the_first_learner_has_no_metrics_and_all_counters_at_zero():
    update = initialize(POLICY, PROMP, run_seed=3)
    assert update.metrics == {}
    assert update.learner.extra[ENV_STEPS] == update.learner.extra[ENV_STEPS_NOMINAL] == 0
    assert list(update.learner.params)[-1] == "log_std"


def test_adapt_moves_every_task_on_its_own_samples(steps):
    learner = initialize(POLICY, PROMP, run_seed=3).learner
    adapted = adapt(PROMP, learner, TaskParams.broadcast(learner.params, B), steps[0])
    for name, value in learner.params.items():
        assert adapted.params[name].shape == (B, *value.shape)
        assert adapted.params[name].dtype == np.float32
    kernel = adapted.params["mean_network.output.kernel"]
    assert not np.array_equal(kernel[0], kernel[1])


def test_a_task_adapts_alike_whatever_the_other_tasks_are(steps):
    learner = initialize(POLICY, PROMP, run_seed=3).learner
    adapted = adapt(PROMP, learner, TaskParams.broadcast(learner.params, B), steps[0])
    rng = np.random.default_rng(9)
    other = random_step(rng, 0)
    mixed = Step(*mix(steps[0], other, keep=1), 0)
    again = adapt(PROMP, learner, TaskParams.broadcast(learner.params, B), mixed)
    for name, value in adapted.params.items():
        np.testing.assert_array_equal(again.params[name][1], value[1])


def mix(step, other, keep):
    """The other step's episodes and samples with task `keep` replaced by the first's."""
    own = np.arange(B) == keep

    def choose(a, b):
        return np.where(own.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    a, b = step.episodes, other.episodes
    names = ("observations", "actions", "rewards", "terminated", "truncated", "lengths", "initial_state")
    behavior = {name: choose(a.behavior[name], b.behavior[name]) for name in a.behavior}
    episodes = EpisodeBatch(
        **{name: choose(getattr(a, name), getattr(b, name)) for name in names}, behavior=behavior, reward_terms={}
    )
    names = ("returns", "values", "advantages", "mask")
    samples = Samples(**{name: choose(getattr(step.samples, name), getattr(other.samples, name)) for name in names})
    return episodes, samples


def test_meta_optimize_counts_actual_and_nominal_steps_over_iterations(steps):
    learner = initialize(POLICY, PROMP, run_seed=3).learner
    for iteration in range(2):
        update = meta_optimize(POLICY, PROMP, learner, steps, run_seed=3, iteration=iteration)
        learner = update.learner
        assert update.metrics[ENV_STEPS] == learner.extra[ENV_STEPS] == 2 * LENGTHS.sum() * (iteration + 1)
        assert update.metrics[ENV_STEPS_NOMINAL] == 2 * B * E * T * (iteration + 1)


def test_metrics_describe_every_round_and_the_update(steps):
    learner = initialize(POLICY, PROMP, run_seed=3).learner
    metrics = meta_optimize(POLICY, PROMP, learner, steps, run_seed=3, iteration=0).metrics
    for k in range(2):
        expected = steps[k].episodes.episode_returns.mean()
        assert metrics[f"step_{k}.average_return"] == pytest.approx(expected)
    wanted = {"loss_before", "loss_after", "inner_kl", "inner_kl_coeff", "outer_kl", "clip_fraction"}
    assert wanted | {"meta_gradient_norm"} <= set(metrics)
    assert all(type(value) is float and np.isfinite(value) for value in metrics.values())


def test_meta_optimize_is_a_function_of_its_inputs(steps):
    learner = initialize(POLICY, PROMP, run_seed=3).learner
    first, again = (meta_optimize(POLICY, PROMP, learner, steps, run_seed=3, iteration=0) for _ in range(2))
    assert first.metrics == again.metrics
    for name, value in first.learner.params.items():
        np.testing.assert_array_equal(again.learner.params[name], value)
        assert not np.array_equal(value, learner.params[name]) or name.endswith("bias")
