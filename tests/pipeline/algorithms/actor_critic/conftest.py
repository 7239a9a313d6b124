"""Small episodes by a random policy, for tests of actor-critics."""

from collections.abc import Callable

import numpy as np
import pytest
from small_setups import CHOICES, DISCRETE_ACTIONS, A, O, small_setup

from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.inference import log_softmax
from metaloom.pipeline.types import EpisodeBatch

T = 7
LENGTHS = [[7, 3, 5], [2, 7, 0]]
GAUSSIAN = PolicyConfig(hidden_sizes=(5, 4), init_std=0.7)
CATEGORICAL = PolicyConfig(hidden_sizes=(5, 4))
POLICIES = {"gaussian": GAUSSIAN, "categorical": CATEGORICAL}
PROCESSING = ProcessingConfig(discount=0.9, gae_lambda=0.8)


def learner_of(settings, policy=GAUSSIAN, processing=PROCESSING, **changes):
    """The learner of an algorithm with continuous actions, or with discrete ones if the policy is CATEGORICAL."""
    changes = (DISCRETE_ACTIONS if policy is CATEGORICAL else {}) | changes
    return settings.build(small_setup(policy, **{"max_episode_steps": T, "processing": processing} | changes))


@pytest.fixture
def episodes_of() -> Callable[..., EpisodeBatch]:
    """Episodes that a policy could have acted in; the second of the first task came to its end, the others were cut."""

    def build(policy, seed: int = 0, lengths=None) -> EpisodeBatch:
        rng = np.random.default_rng(seed)
        lengths = np.array(LENGTHS if lengths is None else lengths, np.int32)
        B, E = lengths.shape
        mask = np.arange(T) < lengths[..., None]
        steps = np.arange(T + 1) <= lengths[..., None]
        observations = (rng.normal(size=(B, E, T + 1, O)) * steps[..., None]).astype(np.float32)
        if policy is CATEGORICAL:
            behavior = {"log_probs": log_softmax(rng.normal(size=(B, E, T, CHOICES)).astype(np.float32))}
            actions = rng.integers(CHOICES, size=(B, E, T)) * mask
        else:
            mean = rng.normal(size=(B, E, T, A)).astype(np.float32) * mask[..., None]
            log_std = rng.normal(size=(B, A)).astype(np.float32) * np.float32(0.1)
            actions = (mean + rng.normal(size=mean.shape)).astype(np.float32) * mask[..., None]
            behavior = {"mean": mean, "log_std": log_std}
        terminated = np.zeros((B, E), bool)
        terminated[0, 1] = True
        return EpisodeBatch(
            observations=observations,
            actions=actions,
            rewards=(rng.normal(size=(B, E, T)) * mask).astype(np.float32),
            terminated=terminated,
            truncated=~terminated & (lengths > 0),
            lengths=lengths,
            behavior=behavior,
            reward_terms={},
            initial_state=np.zeros((B, E, 0)),
        )

    return build
