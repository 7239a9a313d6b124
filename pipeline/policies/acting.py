"""Construction of actors, and checks that they suit an environment and the policy's parameters."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from metaloom.pipeline.estimation.normalization import MEAN, STD, Normalization, without_normalization
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.actors import Actor, ActorSetup, off_policy, on_policy
from metaloom.pipeline.policies.actors.contract import RecordedActor, UniformActor
from metaloom.pipeline.policies.actors.off_policy import EPSILON, POLICY_NETWORK, Q_NETWORK
from metaloom.pipeline.policies.config import ActorKind, PolicyConfig
from metaloom.pipeline.policies.inference import LOGITS_NETWORK, MEAN_NETWORK, check_shapes, network_shapes
from metaloom.pipeline.policies.posterior import check_posterior
from metaloom.pipeline.policies.remembering import check_remembering
from metaloom.pipeline.types import Params, TaskParams


def make_actor(kind: ActorKind, setup: ActorSetup) -> Actor:
    """Make an actor. Its observations are normalized if the parameters contain normalization statistics."""
    if (normalization := Normalization.of_params(setup.params.params)) is not None:
        actor = make_actor(kind, replace(setup, params=TaskParams(without_normalization(setup.params.params))))
        return on_policy.NormalizingActor(actor, normalization, setup.num_rows)
    if kind == "policy" and setup.config.name is not None:
        # Imported here, since among policies only custom ones always need torch.
        from metaloom.pipeline.policies.actors.own import OwnPolicyActor

        return OwnPolicyActor(setup)
    makers: dict[ActorKind, Callable[[ActorSetup], Actor]] = {
        "policy": on_policy.CategoricalActor if setup.spaces.num_actions else on_policy.GaussianActor,
        "recurrent": on_policy.RecurrentActor,
        "posterior": on_policy.PosteriorActor,
        "uniform": UniformActor,
        "tanh_gaussian": off_policy.TanhGaussianActor,
        "q_values": off_policy.QValuesActor,
        "recorded": RecordedActor,
    }
    return makers[kind](setup)


def check_actor(kind: ActorKind, actions: gymnasium.Space[Any], *, deterministic: bool = False) -> None:
    """Raise ValueError if an actor does not support the action space or the requested deterministic actions."""
    if kind == "uniform" and deterministic:
        raise ValueError("actor uniform: no action is the most likely; use deterministic=False")
    if kind == "q_values" and not isinstance(actions, Discrete):
        raise ValueError(f"actor q_values: got the action space {actions}; expected discrete actions (Discrete)")
    if kind == "tanh_gaussian" and not isinstance(actions, Box):
        raise ValueError(f"actor tanh_gaussian: got the action space {actions}; expected continuous actions (Box)")
    whole = not isinstance(actions, Box) or (np.all(actions.low == -1) and np.all(actions.high == 1))
    # A policy that reaches half the box would never explore the other half.
    if kind in ("tanh_gaussian", "uniform") and not whole:
        raise ValueError(
            f"actor {kind}: its actions lie in [-1, 1], but the environment takes {actions} from the policy; "
            "set env.action_scale to 1, which maps [-1, 1] onto the environment's own box"
        )


def check_actor_params(kind: ActorKind, config: PolicyConfig, params: Params, spaces: Spaces) -> None:
    """Raise ValueError if an actor's parameters [B, ...] do not match the environment's spaces."""

    def check(prefix: str, output_size: int, *, extra_size: int = 0, activation: str = "relu") -> None:
        spec = config.network_spec(spaces, output_size, extra_size=extra_size, activation=activation)
        check_shapes(params, network_shapes(prefix, spec))

    if config.normalize_observations and kind in ("policy", "recurrent"):
        check_shapes(params, {name: (spaces.observation_size,) for name in (MEAN, STD)})
    match kind:
        case "policy" if config.name is not None:
            from metaloom.pipeline.policies.build import build_own_policy  # as in make_actor

            initial = build_own_policy(config, spaces).initialize(np.random.default_rng(0))
            check_shapes(params, {name: value.shape for name, value in initial.items()})
        case "policy" if spaces.num_actions:
            check(LOGITS_NETWORK, spaces.num_actions, activation="tanh")
        case "policy":
            check_shapes(params, {"log_std": (spaces.action_size,)})
            check(MEAN_NETWORK, spaces.action_size, activation="tanh")
        case "recurrent":
            check_remembering(config, params, spaces)
        case "posterior":
            check_posterior(config, params, spaces)
        case "uniform" | "recorded":
            pass  # these actors have no learned parameters
        case "tanh_gaussian":
            check(POLICY_NETWORK, 2 * spaces.action_size, extra_size=off_policy.latent_size(params))
        case "q_values":
            check(Q_NETWORK, spaces.num_actions)
            check_shapes(params, {EPSILON: ()})
            if ((found := params[EPSILON]) < 0).any() or (found > 1).any():
                raise ValueError(f"policy parameter {EPSILON}: got {found.tolist()}; expected probabilities, 0 to 1")
