"""Initialization of the learner before the first iteration."""

from collections.abc import Mapping

from metaloom.pipeline.algorithms.contract import AnyLearner
from metaloom.pipeline.dataflow.stage import ONCE, At, Stage
from metaloom.pipeline.estimation.normalization import PREFIX
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import Array, LearnerState, Params, Update
from metaloom.stages.counters import no_steps, require_state
from metaloom.stages.tools import WarmStart

CRITICS = ("critic.", "q1.", "q2.", "v.", "target_", "decoder.")
"""Name prefixes of critic parameters: value functions, target networks and model decoders."""


def initialize(learner: AnyLearner, at: At, warm_start: WarmStart) -> Update:
    """Return the learner state of iteration 0, with no metrics and all counters at zero.

    A warm start copies the parameters of the policy and, if both runs have one, the critic. It also copies the
    normalization statistics if this run normalizes observations or rewards. Raises ConfigError if the copied parameters
    are incompatible with this run's policy or critic.
    """
    state, start = require_state(learner.initialize(run_seed=at.run_seed), learner, "initialize"), warm_start()
    if start is not None:
        needed, given = (
            {name: value for name, value in of.extra.items() if name.startswith(CRITICS)} for of in (state, start)
        )
        critic = _taken(needed, given, "critic") if needed and given else {}
        statistics = {name: start.extra[name] for name in state.extra if name.startswith(PREFIX)}
        params = _taken(state.params, start.params, "policy")
        state = LearnerState(params, state.optimizer, state.extra | critic | statistics)
    return Update(LearnerState(state.params, state.optimizer, state.extra | no_steps()), {})


INITIALIZE = Stage(initialize, ONCE, group="learner")


def _taken(needed: Mapping[str, Array], given: Mapping[str, Array], of: str) -> Params:
    shapes = [{name: value.shape for name, value in arrays.items()} for arrays in (needed, given)]
    if shapes[0] != shapes[1]:
        name = min(name for name in {*shapes[0], *shapes[1]} if shapes[0].get(name) != shapes[1].get(name))
        raise ConfigError(
            f"init_from: {of} parameter {name} has shape {shapes[1].get(name)} there; expected "
            f"{shapes[0].get(name)}, as in this run's {of}"
        )
    return {name: given[name] for name in needed}
