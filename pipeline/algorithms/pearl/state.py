"""The networks of a learner and their optimizers: how they start, how they are stored, how they are taken out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np

from metaloom.pipeline.algorithms.contract import NUM_UPDATES
from metaloom.pipeline.algorithms.pearl.networks import Network, initialize_relu
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.kernels.flat_networks import prefixed, unprefixed
from metaloom.pipeline.nn.optimizers import AdamInPlace
from metaloom.pipeline.policies.actors.tanh_gaussian import POLICY_NETWORK
from metaloom.pipeline.types import Array, LearnerState, Params

TrainedName = Literal["policy", "encoder", "q1", "q2", "v"]
"""What an optimizer changes; the target V follows V."""
TRAINED: tuple[TrainedName, ...] = get_args(TrainedName)
PARAMS = {"policy": POLICY_NETWORK, "encoder": "encoder"}
"""Prefixes in LearnerState.params, by network."""
EXTRA = {"q1": "q1", "q2": "q2", "v": "v", "target_v": "target_v"}
"""Prefixes in LearnerState.extra, by network."""
OPTIMIZER: dict[TrainedName, str] = {"policy": "policy", "encoder": "encoder", "q1": "q.q1", "q2": "q.q2", "v": "v"}
"""Prefixes in LearnerState.optimizer, by network."""
ADAM_EPSILON = 1e-8
OUTPUT_LIMIT, POLICY_OUTPUT_LIMIT = 3e-3, 1e-3


def context_size(settings: PEARL, observation_size: int, action_size: int) -> int:
    """What the encoder sees of a transition: observation, action, reward and perhaps the next observation."""
    return observation_size + action_size + 1 + (observation_size if settings.use_next_obs_in_context else 0)


def initial_learner(
    settings: PEARL,
    policy_hidden_sizes: tuple[int, ...],
    observation_size: int,
    action_size: int,
    rng: np.random.Generator,
) -> LearnerState:
    """Networks that have learned nothing; the target V is a copy of V, the Q functions differ."""
    latent_size, critic_sizes = settings.latent_size, settings.critic_hidden_sizes
    state_size = observation_size + latent_size
    q_size = observation_size + action_size + latent_size
    encoder_outputs = latent_size * (2 if settings.use_information_bottleneck else 1)
    encoder_inputs = context_size(settings, observation_size, action_size)
    params = {
        "policy": initialize_relu(
            state_size, policy_hidden_sizes, 2 * action_size, rng, output_limit=POLICY_OUTPUT_LIMIT
        ),
        "encoder": initialize_relu(
            encoder_inputs, settings.encoder_hidden_sizes, encoder_outputs, rng, output_limit=OUTPUT_LIMIT
        ),
        "q1": initialize_relu(q_size, critic_sizes, 1, rng, output_limit=OUTPUT_LIMIT),
        "q2": initialize_relu(q_size, critic_sizes, 1, rng, output_limit=OUTPUT_LIMIT),
        "v": initialize_relu(state_size, critic_sizes, 1, rng, output_limit=OUTPUT_LIMIT),
    }
    networks = {name: Network(params[name]) for name in params} | {"target_v": Network(params["v"])}
    optimizers: dict[TrainedName, AdamInPlace] = {
        name: AdamInPlace.of(AdamInPlace.initial(networks[name].vector)) for name in TRAINED
    }
    return learner_of(networks, optimizers, num_updates=0)


def networks_of(learner: LearnerState) -> dict[str, Network]:
    """Working copies of all networks, by name."""
    stored = ((learner.params, PARAMS), (learner.extra, EXTRA))
    return {
        name: Network(unprefixed(arrays, prefix)) for arrays, prefixes in stored for name, prefix in prefixes.items()
    }


def optimizers_of(learner: LearnerState) -> dict[TrainedName, AdamInPlace]:
    """Working copies of the optimizers, by network."""
    optimizers: dict[TrainedName, AdamInPlace] = {}
    for name in TRAINED:
        optimizers[name] = AdamInPlace.of(unprefixed(learner.optimizer, OPTIMIZER[name]))
        optimizers[name].epsilon = ADAM_EPSILON
    return optimizers


def learner_of(
    networks: Mapping[str, Network], optimizers: Mapping[TrainedName, AdamInPlace], *, num_updates: int
) -> LearnerState:
    """A learner with copies of all parameters and of the optimizers' state."""
    params, extra = (
        _joined({prefix: networks[name].params() for name, prefix in prefixes.items()}) for prefixes in (PARAMS, EXTRA)
    )
    extra[NUM_UPDATES] = np.array(num_updates, np.int64)
    return LearnerState(params, _joined({OPTIMIZER[name]: optimizers[name].state for name in TRAINED}), extra)


def _joined(named: Mapping[str, Mapping[str, Array]]) -> Params:
    return {name: value for prefix, arrays in named.items() for name, value in prefixed(arrays, prefix).items()}
