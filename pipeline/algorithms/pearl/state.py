"""What PEARL keeps between iterations: the parameters of six networks, by name, and the state of five optimizers."""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from metaloom.pipeline.algorithms.off_policy.counters import NUM_UPDATES
from metaloom.pipeline.kernels.flat_networks import prefixed, unprefixed
from metaloom.pipeline.policies.actors.tanh_gaussian import POLICY_NETWORK
from metaloom.pipeline.types import Array, LearnerState, Params

TrainedName = Literal["policy", "encoder", "q1", "q2", "v"]
"""What an optimizer changes; the target V follows V."""
TRAINED: tuple[TrainedName, ...] = ("policy", "encoder", "q1", "q2", "v")
PARAMS = {"policy": POLICY_NETWORK, "encoder": "encoder"}
"""Prefixes in LearnerState.params, by network."""
EXTRA = {"q1": "q1", "q2": "q2", "v": "v", "target_v": "target_v"}
"""Prefixes in LearnerState.extra, by network."""
OPTIMIZER: dict[TrainedName, str] = {"policy": "policy", "encoder": "encoder", "q1": "q.q1", "q2": "q.q2", "v": "v"}
"""Prefixes in LearnerState.optimizer, by network."""


def params_by_network(state: LearnerState) -> dict[str, Params]:
    """The parameters of every network, under names without its prefix."""
    stored = ((state.params, PARAMS), (state.extra, EXTRA))
    return {name: unprefixed(arrays, prefix) for arrays, prefixes in stored for name, prefix in prefixes.items()}


def optimizer_state(state: LearnerState, name: TrainedName) -> Params:
    """What a network's optimizer had kept."""
    return unprefixed(state.optimizer, OPTIMIZER[name])


def joined_state(
    params: Mapping[str, Mapping[str, Array]], optimizers: Mapping[TrainedName, Mapping[str, Array]], num_updates: int
) -> LearnerState:
    """The state that holds these parameters and optimizers, by network, after so many iterations."""
    stored, extra = (
        _joined({prefix: params[name] for name, prefix in prefixes.items()}) for prefixes in (PARAMS, EXTRA)
    )
    extra[NUM_UPDATES] = np.array(num_updates, np.int64)
    return LearnerState(stored, _joined({OPTIMIZER[name]: optimizers[name] for name in TRAINED}), extra)


def _joined(named: Mapping[str, Mapping[str, Array]]) -> Params:
    return {name: value for prefix, arrays in named.items() for name, value in prefixed(arrays, prefix).items()}
