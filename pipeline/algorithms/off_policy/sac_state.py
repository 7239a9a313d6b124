"""State that SAC keeps between iterations, taken out of a learner's state and put together again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from metaloom.pipeline.algorithms.off_policy.gradient_steps import Counters
from metaloom.pipeline.nn.flat_networks import prefixed, unprefixed
from metaloom.pipeline.types import Array, LearnerState, Params

TWINS = ("q1", "q2")
"""Prefixes of the Q-functions."""
TARGET = "target_"
"""Before their names in those of the target networks."""
TRAINED = ("policy", "q", "alpha")
"""Prefixes of the optimizers' states."""


@dataclass(frozen=True)
class SACArrays:
    """Parameters by name, and what the optimizers keep.

    Attributes:
        policy: of the policy.
        q: of both Q-functions, q1.* and then q2.*.
        targets: of the target networks, under the same names.
        log_alpha: [].
        optimizers: their states.
    """

    policy: Params
    q: Params
    targets: Params
    log_alpha: Array
    optimizers: Mapping[str, Params]

    @classmethod
    def of(cls, state: LearnerState) -> SACArrays:
        """Return those of a state, not copied."""
        q, targets = (
            {name.removeprefix(before): value for name, value in state.extra.items() if name.startswith(names)}
            for before, names in (("", tuple(f"{twin}." for twin in TWINS)), (TARGET, TARGET))
        )
        optimizers: dict[str, Params] = {name: unprefixed(state.optimizer, name) for name in TRAINED}
        return cls(state.params, q, targets, state.extra["log_alpha"], optimizers)

    def state(self, counters: Counters) -> LearnerState:
        """Return the state that holds them."""
        optimizer = {k: v for name in TRAINED for k, v in prefixed(self.optimizers[name], name).items()}
        targets = {f"{TARGET}{name}": value for name, value in self.targets.items()}
        return LearnerState(
            self.policy, optimizer, {**self.q, **targets, "log_alpha": self.log_alpha, **counters.arrays()}
        )
