"""A small PEARL whose tasks do not divide evenly into parts."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from small_setups import A, O, small_setup

from metaloom.pipeline.algorithms.pearl.learner import PEARLLearner
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.types import LearnerState, Minibatch, Transitions

K, N, C, Z = 5, 7, 6, 2
DISCOUNT = 0.9
SIZES = {"latent_size": Z, "encoder_hidden_sizes": (8, 7), "critic_hidden_sizes": (9, 8)}
SETUP = small_setup(
    PolicyConfig(hidden_sizes=(10, 6)),
    processing=ProcessingConfig(discount=DISCOUNT),
    sparse_rewards=lambda rewards: (rewards > 0).astype(np.float32),
)


def small(**settings) -> PEARL:
    return PEARL(**(SIZES | settings))


def build(settings: PEARL, discount: float = DISCOUNT) -> PEARLLearner:
    learner = settings.build(replace(SETUP, processing=ProcessingConfig(discount=discount)))
    assert isinstance(learner, PEARLLearner)
    return learner


@dataclass(frozen=True)
class Draw:
    """Random batches, each different from the last."""

    rng: np.random.Generator

    def transitions(self, *shape: int) -> Transitions:
        def normal(*sizes: int) -> np.ndarray:
            return self.rng.standard_normal(sizes).astype(np.float32)

        return Transitions(
            observations=normal(*shape, O),
            actions=np.tanh(normal(*shape, A)),
            rewards=normal(*shape),
            next_observations=normal(*shape, O),
            terminated=self.rng.random(shape) < 0.3,
        )

    def minibatch(self) -> Minibatch:
        return Minibatch(self.transitions(K, N), self.transitions(K, C))

    def learner(self, settings: PEARL, dtype=np.float32) -> LearnerState:
        """One whose parameters are large, so that no derivative is near zero."""
        initial = build(settings).initialize(run_seed=0)

        def redrawn(name: str, value: np.ndarray) -> np.ndarray:
            if not np.issubdtype(value.dtype, np.floating):
                return value
            return (self.rng.standard_normal(value.shape) * (0.6 if name.endswith("kernel") else 0.3)).astype(dtype)

        optimizer = {n: v.astype(dtype) if v.dtype == np.float32 else v for n, v in initial.optimizer.items()}
        return LearnerState(
            {name: redrawn(name, value) for name, value in initial.params.items()},
            optimizer,
            {name: redrawn(name, value) for name, value in initial.extra.items()},
        )


@pytest.fixture
def draw() -> Draw:
    return Draw(np.random.default_rng(0))
