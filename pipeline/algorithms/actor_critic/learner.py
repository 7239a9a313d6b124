"""A2C, PPO and PPO2 as the stages use them: a policy and a critic that learn from an iteration's episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from metaloom.pipeline.algorithms.actor_critic.gradient_steps import CRITIC, POLICY, GradientSteps, Policy, TorchSteps
from metaloom.pipeline.algorithms.actor_critic.scaling import Moments, scaled
from metaloom.pipeline.algorithms.actor_critic.settings import ActorCritic
from metaloom.pipeline.algorithms.actor_critic.update import Update, position_of
from metaloom.pipeline.algorithms.contract import Learner, Setup
from metaloom.pipeline.algorithms.maml.gradient_based import NUM_UPDATES
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.estimation.experience import Estimate, Experience
from metaloom.pipeline.estimation.returns import discounted_returns
from metaloom.pipeline.kernels.actor_critic import FusedSteps
from metaloom.pipeline.kernels.choice import choose_kernel
from metaloom.pipeline.nn.device import use_device
from metaloom.pipeline.nn.networks import build_network
from metaloom.pipeline.nn.vector_optimizers import initial_state, is_customary
from metaloom.pipeline.policies.categorical import CategoricalPolicy
from metaloom.pipeline.policies.gaussian import GaussianPolicy
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, EpisodeBatch, LearnerState, Metrics, ParallelMap, Samples, Step
