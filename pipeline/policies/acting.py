"""Acting in rollouts: which actor takes the actions, and what it requires of the environment and the parameters."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from metaloom.pipeline.policies.actors import Actor, ActorSetup
from metaloom.pipeline.policies.actors.belief import latent_size
from metaloom.pipeline.policies.actors.categorical import CategoricalActor
from metaloom.pipeline.policies.actors.gaussian import GaussianActor
from metaloom.pipeline.policies.actors.q_values import EPSILON, Q_NETWORK, QValuesActor
from metaloom.pipeline.policies.actors.tanh_gaussian import POLICY_NETWORK, TanhGaussianActor
from metaloom.pipeline.policies.actors.uniform import UniformActor
from metaloom.pipeline.policies.config import ActorKind, PolicyConfig
from metaloom.pipeline.policies.inference import LOGITS_NETWORK, check_network, check_params, check_shapes
from metaloom.pipeline.types import Params


def make_actor(kind: ActorKind, setup: ActorSetup) -> Actor:
    """An actor before its first step."""
    makers: dict[ActorKind, Callable[[ActorSetup], Actor]] = {
        "policy": CategoricalActor if setup.num_choices else GaussianActor,
        "uniform": UniformActor,
        "tanh_gaussian": TanhGaussianActor,
        "q_values": QValuesActor,
    }
    return makers[kind](setup)


def check_actor(kind: ActorKind, actions: gymnasium.Space[Any], *, deterministic: bool = False) -> None:
    """Refuse an actor that cannot act in an environment.

    Args:
        kind: the actor.
        actions: what the environment takes from a policy: `make_env(config).action_space`.
        deterministic: whether it is to take the most likely actions.

    Raises:
        ValueError: the actions are of another kind or reach, or none of them is the most likely.
    """
    if kind == "uniform" and deterministic:
        raise ValueError("actor uniform: none of its actions is the most likely; required deterministic=False")
    if kind == "q_values" and not isinstance(actions, Discrete):
        raise ValueError(f"actor q_values: found the action space {actions}; required choices (Discrete)")
    if kind == "tanh_gaussian" and not isinstance(actions, Box):
        raise ValueError(f"actor tanh_gaussian: found the action space {actions}; required numbers (Box)")
    if kind in ("tanh_gaussian", "uniform") and isinstance(actions, Box):
        _check_reach(kind, actions)


def check_actor_params(
    kind: ActorKind, config: PolicyConfig, params: Params, observation_size: int, action_size: int, num_choices: int
) -> None:
    """Refuse parameters [B, ...] that do not fit an environment with so many choices, or 0 and an action size.

    Raises:
        ValueError: naming the parameter, its shape and the one required.
    """
    match kind:
        case "policy" if num_choices:
            check_network(LOGITS_NETWORK, config, params, observation_size, num_choices)
        case "policy":
            check_params(config, params, observation_size, action_size)
        case "uniform":
            pass  # has none
        case "tanh_gaussian":
            inputs = observation_size + latent_size(params)
            check_network(POLICY_NETWORK, config, params, inputs, 2 * action_size)
        case "q_values":
            check_network(Q_NETWORK, config, params, observation_size, num_choices)
            _check_epsilon(params)


def _check_reach(kind: ActorKind, box: Box) -> None:
    # A policy of half the box would never find out what the other half is good for.
    if not (np.all(box.low == -1) and np.all(box.high == 1)):
        raise ValueError(
            f"actor {kind}: its actions lie in [-1, 1], but the environment takes {box} from the policy; "
            "required the same: set env.action_scale to 1, which maps [-1, 1] onto the environment's own box"
        )


def _check_epsilon(params: Params) -> None:
    check_shapes(params, {EPSILON: ()})
    epsilon = params[EPSILON]
    if epsilon.min() < 0 or epsilon.max() > 1:
        raise ValueError(f"policy parameter {EPSILON}: found {epsilon.tolist()}; required probabilities, 0 to 1")
