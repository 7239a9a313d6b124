"""The learner before the first iteration."""

from collections.abc import Mapping
from typing import Any

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import Array, LearnerState, Params, Update
from metaloom.stages.counters import no_steps

CRITICS = ("critic.", "q1.", "q2.", "v.", "target_")
"""Prefixes of what judges a policy in a learner: values, and the networks that follow them."""


def initialize(policy: Any, algorithm: Any, *, run_seed: int, start: LearnerState | None = None) -> Update:
    """The learner that iteration 0 starts from, with no metrics and all counters at zero.

    Args:
        policy: of an algorithm that is no Learner yet.
        algorithm: what the learner is of.
        run_seed: of the parameters that are drawn.
        start: a learner whose parameters it starts with instead, the policy's and, where both have one, the critic's.

    Raises:
        ConfigError: the parameters of `start` are not those of this run's policy or critic.
    """
    if isinstance(algorithm, Learner):
        learner = algorithm.initialize(run_seed=run_seed)
    else:
        learner = algorithm.initialize(policy, run_seed=run_seed)
    if start is not None:
        learner = _started(learner, start)
    return Update(LearnerState(learner.params, learner.optimizer, learner.extra | no_steps()), {})


def _started(learner: LearnerState, start: LearnerState) -> LearnerState:
    needed, given = (
        {name: value for name, value in of.extra.items() if name.startswith(CRITICS)} for of in (learner, start)
    )
    critic = _taken(needed, given, "critic") if needed and given else {}
    return LearnerState(_taken(learner.params, start.params, "policy"), learner.optimizer, learner.extra | critic)


def _taken(needed: Mapping[str, Array], given: Mapping[str, Array], of: str) -> Params:
    shapes = [{name: value.shape for name, value in arrays.items()} for arrays in (needed, given)]
    if shapes[0] != shapes[1]:
        differing = sorted(name for name in {*shapes[0], *shapes[1]} if shapes[0].get(name) != shapes[1].get(name))
        name = differing[0]
        raise ConfigError(
            f"init_from: {of} parameter {name} has shape {shapes[1].get(name)} there; required "
            f"{shapes[0].get(name)}, that of this run's {of}"
        )
    return {name: given[name] for name in needed}
