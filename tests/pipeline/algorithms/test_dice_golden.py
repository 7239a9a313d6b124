"""DiCE against the numbers of the original ProMP code; tests/golden/README.md says how they were made."""

import numpy as np
import pytest

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.maml.meta_gradient import meta_gradient
from metaloom.pipeline.algorithms.maml.rows import build_chunks
from metaloom.pipeline.algorithms.maml.settings import DiceMAML, VPGDice
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.build import GaussianPolicy
from metaloom.pipeline.types import EpisodeBatch, LearnerState, Samples, Step, TaskParams

POLICY = GaussianPolicy(Spaces((3,), 1.0, 2, 0), PolicyConfig(hidden_sizes=(8, 8)))


def build(settings, policy=POLICY):
    sizes = ((3,), 1.0, policy.action_size, 0, "toy", 5)
    return settings.build(Setup(*sizes, policy.config, BaselineConfig(), ProcessingConfig(), "cpu", np.negative))


ALGORITHMS = {"dice_maml": DiceMAML, "vpg_dice_maml": VPGDice}


@pytest.fixture(params=ALGORITHMS)
def name(request):
    return request.param


@pytest.fixture
def arrays(name, golden):
    return golden(name)


@pytest.fixture
def steps(arrays):
    return [golden_step(arrays, k) for k in range(2)]


@pytest.fixture
def learner(name, arrays, golden_params):
    fresh = build(algorithm(name, arrays)).initialize(run_seed=0)
    return LearnerState(golden_params(arrays, "theta"), fresh.optimizer, fresh.extra)


def algorithm(name, arrays, **settings):
    return ALGORITHMS[name](inner_lr=float(arrays["inner_lr"]), outer_lr=float(arrays["learning_rate"]), **settings)


def golden_step(arrays, k):
    def stacked(field):
        return np.stack([arrays[f"step{k}_task{i}_{field}"] for i in range(3)])

    mask, observations = stacked("mask"), stacked("obs")
    zeros = np.zeros_like(mask)
    episodes = EpisodeBatch(
        observations=np.pad(observations, [(0, 0), (0, 0), (0, 1), (0, 0)]),
        actions=stacked("act"),
        rewards=zeros,
        terminated=np.zeros(mask.shape[:2], bool),
        truncated=np.ones(mask.shape[:2], bool),
        lengths=mask.sum(-1).astype(np.int32),
        behavior={"mean": stacked("old_mean"), "log_std": stacked("old_log_std")},
        reward_terms={},
        initial_state=np.zeros((*mask.shape[:2], 0)),
    )
    advantages = stacked("advantages") if f"step{k}_task0_advantages" in arrays else zeros
    # Task 2's adjusted rewards are not zero on padding, as the original's are after normalizing: the mask must do.
    return Step(episodes, Samples(zeros, zeros, advantages, mask, stacked("adjusted_rewards")), k)


def flat(params):
    return np.concatenate([value.ravel() for value in params.values()])


def test_padding_of_the_golden_files_is_not_all_zero(steps):
    samples = steps[1].samples
    assert (samples.mask == 0).any()
    assert samples.adjusted_rewards[samples.mask == 0].any()


def test_adapted_parameters_agree_to_1e_5(name, arrays, steps, learner, golden_params):
    before = TaskParams.broadcast(learner.params, 3)
    adapted = build(algorithm(name, arrays)).adapt(learner, before, steps[0])
    for i in range(3):
        for parameter, expected in golden_params(arrays, f"adapted_step1_task{i}").items():
            np.testing.assert_allclose(adapted.params[parameter][i], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tasks_per_chunk", [1, 2, 3])
def test_loss_and_gradient_agree_to_1e_6(name, arrays, steps, learner, tasks_per_chunk):
    problem = build(algorithm(name, arrays)).problem(learner, steps)
    gradients, values, _ = meta_gradient(problem, learner.params, build_chunks(steps, tasks_per_chunk))
    gradient, expected = flat(gradients), arrays["grad_flat"]
    assert np.linalg.norm(gradient - expected) < 1e-6 * np.linalg.norm(expected)
    np.testing.assert_allclose(values["loss"].mean(), arrays["loss"], rtol=1e-6, atol=1e-7)


def test_parameters_and_loss_after_one_adam_step_agree(name, arrays, steps, learner):
    updated, metrics = build(algorithm(name, arrays)).update(learner, steps, run_seed=0, iteration=0)
    np.testing.assert_allclose(flat(updated.params), arrays["theta_flat_after_adam_epoch1"], atol=1e-6)
    np.testing.assert_allclose(metrics["loss_before"], arrays["loss"], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(metrics["loss_after"], arrays["loss_after"], rtol=1e-5, atol=1e-7)
