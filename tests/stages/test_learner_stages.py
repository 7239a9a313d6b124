"""initialize, meta_optimize and update around a learner that counts."""

import numpy as np
import pytest

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.types import EpisodeBatch, LearnerState, Samples, Step
from metaloom.stages.counters import ENV_STEPS, ENV_STEPS_NOMINAL
from metaloom.stages.faults import StageFault
from metaloom.stages.initialize import initialize
from metaloom.stages.meta_optimize import meta_optimize
from metaloom.stages.update import update as update_stage

B, E, T = 3, 2, 4
LENGTHS = np.array([[4, 1], [2, 3], [4, 4]], np.int32)


class Counting(Learner):
    """Adds the number of the iteration to its only parameter, and says how many steps it was shown."""

    def initialize(self, *, run_seed):
        return LearnerState({"weight": np.full(2, run_seed, np.float32)}, {}, {})

    def update(self, state, experience, *, run_seed, iteration, parallel=map):
        weight = state.params["weight"] + np.float32(iteration)
        return LearnerState({"weight": weight}, {}, {}), {"shown": float(len(experience))}


LEARNER = Counting()


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


def test_the_first_state_has_no_metrics_and_all_counters_at_zero():
    update = initialize(LEARNER, run_seed=3)
    assert update.metrics == {}
    assert update.learner.extra[ENV_STEPS] == update.learner.extra[ENV_STEPS_NOMINAL] == 0
    assert update.learner.params["weight"].tolist() == [3, 3]


def test_a_warm_start_takes_the_parameters_of_another_state_that_fit():
    start = LearnerState({"weight": np.zeros(2, np.float32)}, {"moment": np.ones(2)}, {"count": np.array(7)})
    update = initialize(LEARNER, run_seed=3, start=start)
    assert update.learner.params["weight"].tolist() == [0, 0]
    assert set(update.learner.extra) == {ENV_STEPS, ENV_STEPS_NOMINAL}
    with pytest.raises(ConfigError, match=r"policy parameter weight has shape \(3,\) there; required \(2,\)"):
        initialize(LEARNER, run_seed=3, start=LearnerState({"weight": np.zeros(3, np.float32)}, {}, {}))


def test_meta_optimize_counts_actual_and_nominal_steps_over_iterations(steps):
    state = initialize(LEARNER, run_seed=3).learner
    for iteration in range(2):
        update = meta_optimize(LEARNER, state, steps, run_seed=3, iteration=iteration)
        state = update.learner
        assert update.metrics[ENV_STEPS] == state.extra[ENV_STEPS] == 2 * LENGTHS.sum() * (iteration + 1)
        assert update.metrics[ENV_STEPS_NOMINAL] == 2 * B * E * T * (iteration + 1)
    assert state.params["weight"].tolist() == [4, 4]


def test_metrics_describe_every_inner_step_and_the_update(steps):
    state = initialize(LEARNER, run_seed=3).learner
    metrics = meta_optimize(LEARNER, state, steps, run_seed=3, iteration=0).metrics
    for k in range(2):
        expected = steps[k].episodes.episode_returns.mean()
        assert metrics[f"step_{k}.average_return"] == pytest.approx(expected)
    assert metrics["shown"] == 2
    assert all(type(value) is float and np.isfinite(value) for value in metrics.values())


def test_update_counts_what_filled_the_buffer_and_describes_episodes_by_posterior(steps):
    state = initialize(LEARNER, run_seed=3).learner
    first, second = (step.episodes for step in steps)
    update = update_stage(LEARNER, state, [], {0: [first], 1: [second]}, fill=[first], run_seed=3, iteration=1)
    assert update.metrics[ENV_STEPS] == 3 * LENGTHS.sum()
    assert update.metrics["step_1.average_return"] == pytest.approx(second.episode_returns.mean())
    assert update.learner.params["weight"].tolist() == [4, 4]


class Odd(Counting):
    """Returns what it is told to."""

    def __init__(self, params, metrics):
        self.returned = LearnerState(params, {}, {}), metrics

    def update(self, state, experience, *, run_seed, iteration, parallel=map):
        return self.returned


@pytest.mark.parametrize(
    ("params", "metrics", "told"),
    [
        ({"weight": np.zeros(2)}, {}, r"params\['weight'\] as float64\[2\]; required float32\[2\]"),
        ({"weight": np.zeros(3, np.float32)}, {}, r"as float32\[3\]; required float32\[2\]"),
        ({}, {}, r"as absent; required float32\[2\]"),
        ({"weight": np.zeros(2, np.float32)}, {ENV_STEPS: -1.0}, "the metrics env_steps, which every run has"),
        ({"weight": np.zeros(2, np.float32)}, {"step_0.average_return": 9.0}, "metrics step_0.average_return"),
    ],
)
def test_an_update_that_no_run_could_go_on_with_or_that_hides_metrics_is_refused(steps, params, metrics, told):
    state = initialize(LEARNER, run_seed=3).learner
    with pytest.raises(StageFault, match=told):
        meta_optimize(Odd(params, metrics), state, steps, run_seed=3, iteration=0)
    with pytest.raises(StageFault, match=told):
        update_stage(Odd(params, metrics), state, [], {0: [steps[0].episodes]}, run_seed=3, iteration=0)
