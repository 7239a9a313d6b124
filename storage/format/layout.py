"""Arrays that store an output of each type: their axes, units and meaning. Custom types declare their arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from metaloom.storage.format.stages import LEARNER, METRICS_GROUP, StageTable, StoredStage


@dataclass(frozen=True)
class ArrayPlan:
    """One kind of array.

    Attributes:
        pattern: Name in its group; `*` stands for a name or an index.
        dims: Names of the axes after `iteration`, in which `*` stands for the name of the array; a shorter or longer
            array gets numbered names for the rest.
        unit: Unit of the entries; "1" if dimensionless, "mixed" if each component has its own.
        description: Meaning of an entry.
    """

    pattern: str
    dims: tuple[str, ...]
    unit: str
    description: str


_EPISODES = (
    ArrayPlan(
        "observations",
        ("task", "episode", "t_with_final", "observation"),
        "mixed",
        "observation before step t; the entry at `lengths` follows the last step",
    ),
    ArrayPlan("actions", ("task", "episode", "t", "action"), "1", "action as the policy emitted it"),
    ArrayPlan("rewards", ("task", "episode", "t"), "1", "reward of step t"),
    ArrayPlan("terminated", ("task", "episode"), "1", "the task ended the episode"),
    ArrayPlan("truncated", ("task", "episode"), "1", "the step limit ended the episode"),
    ArrayPlan(
        "lengths", ("task", "episode"), "steps", "steps in the episode, 0 where there is none; what follows is padding"
    ),
    ArrayPlan("initial_state", ("task", "episode", "state"), "mixed", "state of the simulator after the reset"),
    ArrayPlan("behavior.mean", ("task", "episode", "t", "action"), "1", "mean of the acting Gaussian"),
    ArrayPlan("behavior.log_std", ("task", "action"), "1", "log standard deviation of the acting Gaussian"),
    ArrayPlan(
        "behavior.log_stds",
        ("task", "episode", "t", "action"),
        "1",
        "log standard deviation of the acting Gaussian, where it depends on the state",
    ),
    ArrayPlan(
        "behavior.log_probs",
        ("task", "episode", "t", "choice"),
        "1",
        "log-probability of every choice under the acting distribution",
    ),
    ArrayPlan(
        "behavior.latent", ("task", "episode", "latent"), "1", "the belief's draw z that the episode was acted with"
    ),
    ArrayPlan(
        "behavior.action_values", ("task", "episode", "t", "choice"), "1", "value of every choice that was acted by"
    ),
    ArrayPlan(
        "behavior.posterior_mean",
        ("task", "episode", "t", "latent"),
        "1",
        "mean of the posterior over the task that was acted on",
    ),
    ArrayPlan(
        "behavior.posterior_log_std",
        ("task", "episode", "t", "latent"),
        "1",
        "log standard deviation of the posterior over the task that was acted on",
    ),
    ArrayPlan("behavior.epsilon", ("task",), "1", "probability of a uniformly random choice"),
    ArrayPlan("behavior.*", ("task",), "1", "parameter of the acting distribution"),
    ArrayPlan("reward_terms.*", ("task", "episode", "t"), "1", "one term of the reward; terms sum to it"),
    ArrayPlan(
        "facts.*",
        ("task", "episode", "t"),
        "mixed",
        "a fact that the environment tells, of step t or of the episode; run.json has its unit",
    ),
)

ARRAYS: Mapping[str, tuple[ArrayPlan, ...]] = {
    "TaskBatch": (
        ArrayPlan("params", ("task", "task_field"), "mixed", "task parameters; attributes name fields and units"),
        ArrayPlan("ids", ("task",), "1", "index of the task in a fixed set, -1 when drawn from a distribution"),
    ),
    "EpisodeBatch": _EPISODES,
    "Samples": (
        ArrayPlan("returns", ("task", "episode", "t"), "1", "discounted sum of the rewards from step t on"),
        ArrayPlan("values", ("task", "episode", "t"), "1", "prediction of the return by the baseline or critic"),
        ArrayPlan("advantages", ("task", "episode", "t"), "1", "advantage estimate of step t"),
        ArrayPlan(
            "adjusted_rewards",
            ("task", "episode", "t"),
            "1",
            "DiCE only: discounted reward of step t minus its baseline, normalized",
        ),
        ArrayPlan("mask", ("task", "episode", "t"), "1", "1 where the step is real, 0 on padding"),
    ),
    "TaskParams": (
        ArrayPlan("params.*", ("task", "*_parameter"), "1", "each task's policy parameters after k + 1 inner steps"),
    ),
    "Minibatches": (
        ArrayPlan(
            "rows",
            ("update", "place", "n"),
            "1",
            "numbers of the transitions that a gradient step learns from; -1 after the last step",
        ),
        ArrayPlan("task_ids", ("update", "place"), "1", "the task whose memory they are from; -1 as for rows"),
        ArrayPlan(
            "context_rows",
            ("update", "place", "c"),
            "1",
            "numbers of the transitions that the task is inferred from; -1 as for rows",
        ),
    ),
    "Update": (
        ArrayPlan("params.*", ("*_parameter",), "1", "policy parameters; row i is the input of iteration i"),
        ArrayPlan("optimizer.*", ("*_slot",), "1", "state of the outer optimizer; row i is the input of iteration i"),
        ArrayPlan("extra.*", ("*_entry",), "1", "what else the algorithm keeps; row i is the input of iteration i"),
    ),
    "Evaluation": (
        ArrayPlan("task_params", ("task", "task_field"), "mixed", "parameters of the tasks of the evaluation"),
        ArrayPlan("task_ids", ("task",), "1", "index of the task in the fixed set it is from, -1 without one"),
        *(
            ArrayPlan(f"{kind}_{name}", ("task", *axes), unit, f"{what} {of}")
            for kind, axes, of in (
                ("test", ("adaptation_steps", "test_episode"), "of a test episode after k adaptation steps"),
                ("adaptation", ("adaptation_step", "episode"), "of an episode that adaptation step k + 1 learned from"),
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
"""The arrays that keep an output, by the name of its type."""

METRICS = ArrayPlan("values", ("metric",), "mixed", "numbers that describe the iteration; attributes name them")
"""The one array of the group of metrics, which the stage that ends an iteration writes beside the learner."""


def plan_of(path: str, stages: StageTable) -> ArrayPlan | None:
    """Return the plan of the array at a path below `data.zarr`, None if no array belongs there."""
    group, _, name = path.partition("/")
    if group == METRICS_GROUP:
        return METRICS if name == METRICS.pattern else None
    stage = stages.writing(group)
    return None if stage is None else plan_in(stage, name)


def plan_in(stage: StoredStage, name: str) -> ArrayPlan | None:
    """Return the plan of an array of a stage's output, None if there is none."""
    return next((plan for plan in plans_of(stage) if fnmatchcase(name, plan.pattern)), None)


def plans_of(stage: StoredStage) -> Sequence[ArrayPlan]:
    """Return the plans of all arrays of a stage's output."""
    if stage.schema is None:
        return ARRAYS[stage.output]
    return [ArrayPlan(f.name + ".*" * f.mapping, f.dims, f.unit, f.description) for f in stage.schema.fields]


def dims_of(path: str, plan: ArrayPlan | None, axes: int) -> tuple[str, ...]:
    """Return the names of an array's axes, the leading `iteration` (or, for the learner, `row`) included.

    Axes that the plan does not name are numbered after the array, so that no two arrays of a group are said to share
    an axis that they do not.
    """
    named = plan.dims if plan else ()
    group, _, short = path.partition("/")
    rest = tuple(f"{short}_axis_{axis}" for axis in range(len(named), axes))
    # Packed mappings of one group differ in length: their last axis belongs to the array alone.
    own = tuple(dim.replace("*", short) for dim in (*named, *rest)[:axes])
    return ("row" if group == LEARNER else "iteration", *own)
