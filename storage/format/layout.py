"""The stored arrays of each type of output: axes, units and descriptions. Custom types declare their own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from metaloom.pipeline.outputs import LETTERS
from metaloom.storage.format.stages import LEARNER, METRICS_GROUP, StageTable, StoredStage


@dataclass(frozen=True)
class ArrayPlan:
    """One kind of array.

    Attributes:
        pattern: Name in its group; `*` matches a name or an index.
        dims: Names of the axes after `iteration`; `*` is replaced by the array's name. Further axes get numbered names.
        unit: Unit of the entries; "1" if dimensionless, "mixed" if each component has its own.
        description: Meaning of an entry.
    """

    pattern: str
    dims: tuple[str, ...]
    unit: str
    description: str


def _plan(pattern: str, axes: str, description: str, unit: str = "1") -> ArrayPlan:
    """Make a plan with axes given by letters or full names, as in custom outputs."""
    return ArrayPlan(pattern, tuple(LETTERS.get(axis, axis) for axis in axes.split()), unit, description)


_EPISODES = (
    _plan(
        "observations", "B E T+1 O", "observation before step t; the entry at `lengths` follows the last step", "mixed"
    ),
    _plan("actions", "B E T A", "action as the policy emitted it"),
    _plan("rewards", "B E T", "reward of step t"),
    _plan("terminated", "B E", "the task ended the episode"),
    _plan("truncated", "B E", "the step limit ended the episode"),
    _plan("lengths", "B E", "steps in the episode, 0 where there is none; what follows is padding", "steps"),
    _plan("initial_state", "B E S", "state of the simulator after the reset", "mixed"),
    _plan("behavior.mean", "B E T A", "mean of the acting Gaussian"),
    _plan("behavior.log_std", "B A", "log standard deviation of the acting Gaussian"),
    _plan(
        "behavior.log_stds", "B E T A", "log standard deviation of the acting Gaussian, where it depends on the state"
    ),
    _plan("behavior.log_probs", "B E T choice", "log-probability of every choice under the acting distribution"),
    _plan("behavior.latent", "B E latent", "the belief's draw z that the episode was acted with"),
    _plan("behavior.action_values", "B E T choice", "value of every choice that was acted by"),
    _plan("behavior.posterior_mean", "B E T latent", "mean of the posterior over the task that was acted on"),
    _plan(
        "behavior.posterior_log_std",
        "B E T latent",
        "log standard deviation of the posterior over the task that was acted on",
    ),
    _plan("behavior.epsilon", "B", "probability of a uniformly random choice"),
    _plan("behavior.*", "B", "parameter of the acting distribution"),
    _plan("reward_terms.*", "B E T", "one term of the reward; terms sum to it"),
    _plan(
        "facts.*",
        "B E T",
        "a fact that the environment tells, of step t or of the episode; run.json has its unit",
        "mixed",
    ),
)

ARRAYS: Mapping[str, tuple[ArrayPlan, ...]] = {
    "TaskBatch": (
        _plan("params", "B P", "task parameters; attributes name fields and units", "mixed"),
        _plan("ids", "B", "index of the task in a fixed set, -1 when drawn from a distribution"),
    ),
    "EpisodeBatch": _EPISODES,
    "Samples": (
        _plan("returns", "B E T", "discounted sum of the rewards from step t on"),
        _plan("values", "B E T", "prediction of the return by the baseline or critic"),
        _plan("advantages", "B E T", "advantage estimate of step t"),
        _plan("adjusted_rewards", "B E T", "DiCE only: discounted reward of step t minus its baseline, normalized"),
        _plan("mask", "B E T", "1 where the step is real, 0 on padding"),
    ),
    "TaskParams": (_plan("params.*", "B *_parameter", "each task's policy parameters after k + 1 inner steps"),),
    "Minibatches": (
        _plan(
            "rows",
            "update place n",
            "numbers of the transitions that a gradient step learns from; -1 after the last step",
        ),
        _plan("task_ids", "update place", "the task whose memory they are from; -1 as for rows"),
        _plan(
            "context_rows",
            "update place c",
            "numbers of the transitions that the task is inferred from; -1 as for rows",
        ),
    ),
    "Update": (
        _plan("params.*", "*_parameter", "policy parameters; row i is the input of iteration i"),
        _plan("optimizer.*", "*_slot", "state of the outer optimizer; row i is the input of iteration i"),
        _plan("extra.*", "*_entry", "what else the algorithm keeps; row i is the input of iteration i"),
    ),
    "Evaluation": (
        _plan("task_params", "B P", "parameters of the tasks of the evaluation", "mixed"),
        _plan("task_ids", "B", "index of the task in the fixed set it is from, -1 without one"),
        *(
            _plan(f"{kind}_{name}", axes, f"{what} {of}", unit)
            for kind, axes, of in (
                ("test", "B adaptation_steps test_episode", "of a test episode after k adaptation steps"),
                ("adaptation", "B adaptation_step E", "of an episode that adaptation step k + 1 learned from"),
            )
            for name, unit, what in (
                ("returns", "1", "sum of the rewards"),
                ("lengths", "steps", "length"),
                ("terminated", "1", "the task was the end"),
                ("facts.*", "mixed", "a fact that the environment tells, such as success,"),
            )
        ),
    ),
}
"""The arrays of an output by type name."""

METRICS = _plan("values", "metric", "numbers that describe the iteration; attributes name them", "mixed")
"""The array of metrics, written with the next learner."""


def plan_of(path: str, stages: StageTable) -> ArrayPlan | None:
    """Return the plan of the array at a path below `data.zarr`, or None."""
    group, _, name = path.partition("/")
    if group == METRICS_GROUP:
        return METRICS if name == METRICS.pattern else None
    stage = stages.writing(group)
    return None if stage is None else plan_in(stage, name)


def plan_in(stage: StoredStage, name: str) -> ArrayPlan | None:
    """Return the plan of an array of a stage's output, or None."""
    return next((plan for plan in plans_of(stage) if fnmatchcase(name, plan.pattern)), None)


def plans_of(stage: StoredStage) -> Sequence[ArrayPlan]:
    """Return the plans of all arrays of a stage's output."""
    if stage.schema is None:
        return ARRAYS[stage.output]
    return [ArrayPlan(f.name + ".*" * f.mapping, f.dims, f.unit, f.description) for f in stage.schema.fields]


def dims_of(path: str, plan: ArrayPlan | None, axes: int) -> tuple[str, ...]:
    """Return the names of an array's axes, the leading `iteration` (or, for the learner, `row`) included.

    Axes not in the plan are numbered and named after the array, so that arrays do not appear to share them.
    """
    named = plan.dims if plan else ()
    group, _, short = path.partition("/")
    rest = tuple(f"{short}_axis_{axis}" for axis in range(len(named), axes))
    # Packed mappings of a group differ in length, so their last axis is not shared.
    own = tuple(dim.replace("*", short) for dim in (*named, *rest)[:axes])
    return ("row" if group == LEARNER else "iteration", *own)
