"""What the stages ask of an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from metaloom.pipeline.types import LearnerState, Metrics, Step, TaskParams

if TYPE_CHECKING:
    from metaloom.pipeline.policies.gaussian import GaussianPolicy

ParallelMap = Callable[..., Iterable[Any]]
"""The built-in `map` or an executor's `map`: calls may run in any order, results come in the order given."""


class Algorithm(Protocol):
    """Hyper-parameters with the equations they belong to. All that lasts between iterations is in LearnerState."""

    @property
    def inner_steps(self) -> int:
        """Adaptation steps per iteration; an iteration has one round of rollouts more."""
        ...

    def initialize(self, policy: GaussianPolicy, *, run_seed: int) -> LearnerState:
        """The learner before the first iteration."""
        ...

    def adapt(
        self,
        policy: GaussianPolicy,
        learner: LearnerState,
        params: TaskParams,
        step: Step,
        *,
        parallel: ParallelMap = map,
    ) -> TaskParams:
        """Parameters of every task after inner step `step.k` on its own samples."""
        ...

    def optimize(
        self,
        policy: GaussianPolicy,
        learner: LearnerState,
        steps: Sequence[Step],
        *,
        run_seed: int,
        iteration: int,
        parallel: ParallelMap = map,
    ) -> tuple[LearnerState, Metrics]:
        """The learner of the next iteration and what the update was like, from the steps 0 ... inner_steps."""
        ...
