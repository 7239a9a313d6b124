"""State that PEARL keeps between iterations: the parameters of six networks, and the state of five optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.algorithms.contract import NUM_UPDATES
from metaloom.pipeline.nn.flat_networks import prefixed, unprefixed
from metaloom.pipeline.policies.actors.off_policy import POLICY_NETWORK
from metaloom.pipeline.types import Array, LearnerState, Params

TRAINED = ("policy", "encoder", "q1", "q2", "v")
"""Networks that an optimizer changes; the sixth, the target V, follows V."""
TWINS = ("q1", "q2")
_PARAMS = {"policy": POLICY_NETWORK, "encoder": "encoder"}
"""Prefixes in LearnerState.params, by network."""
_EXTRA = {"q1": "q1", "q2": "q2", "v": "v", "target_v": "target_v"}
"""Prefixes in LearnerState.extra, by network."""
_OPTIMIZER = {"policy": "policy", "encoder": "encoder", "q1": "q.q1", "q2": "q.q2", "v": "v"}
"""Prefixes in LearnerState.optimizer, by network."""


@dataclass(frozen=True)
class PEARLArrays:
    """The arrays of a state by network, under names without its prefix.

    Attributes:
        params: of every network.
        optimizers: their states.
        num_updates: iterations that were learned from.
    """

    params: Mapping[str, Params]
    optimizers: Mapping[str, Params]
    num_updates: int

    @classmethod
    def of(cls, state: LearnerState) -> PEARLArrays:
        """Return those of a state, not copied."""
        stored = ((state.params, _PARAMS), (state.extra, _EXTRA))
        params = {name: unprefixed(arrays, of) for arrays, prefixes in stored for name, of in prefixes.items()}
        optimizers = {name: unprefixed(state.optimizer, _OPTIMIZER[name]) for name in TRAINED}
        return cls(params, optimizers, int(state.extra[NUM_UPDATES]))

    def state(self) -> LearnerState:
        """Return the state that holds them."""
        params, extra = (
            _joined({prefix: self.params[name] for name, prefix in prefixes.items()}) for prefixes in (_PARAMS, _EXTRA)
        )
        optimizer = _joined({_OPTIMIZER[name]: self.optimizers[name] for name in TRAINED})
        return LearnerState(params, optimizer, extra | {NUM_UPDATES: np.array(self.num_updates, np.int64)})


def _joined(named: Mapping[str, Mapping[str, Array]]) -> Params:
    return {name: value for prefix, arrays in named.items() for name, value in prefixed(arrays, prefix).items()}
