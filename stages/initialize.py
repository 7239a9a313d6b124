"""The learner before the first iteration."""

import numpy as np

from pipeline.algorithms import Algorithm
from pipeline.policies.gaussian import GaussianPolicy
from pipeline.types import LearnerState, Update
from stages.meta_optimize import ENV_STEPS, ENV_STEPS_NOMINAL


def initialize(policy: GaussianPolicy, algorithm: Algorithm, *, run_seed: int) -> Update:
    """The learner that iteration 0 starts from, with no metrics and all counters at zero."""
    learner = algorithm.initialize(policy, run_seed=run_seed)
    counters = {name: np.zeros((), np.int64) for name in (ENV_STEPS, ENV_STEPS_NOMINAL)}
    return Update(LearnerState(learner.params, learner.optimizer, learner.extra | counters), {})
