"""Which arrays a run consists of: their axes, units, meaning and the stage that writes them."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from metaloom.storage.format.refs import StageRef


@dataclass(frozen=True)
class ArrayPlan:
    """One kind of array.

    Attributes:
        pattern: path below `data.zarr`; `*` stands for a name or a number.
        dims: names of the axes after `iteration`; a shorter or longer array gets numbered names for the rest.
        unit: unit of the entries; "1" for pure numbers, "mixed" where each component has its own.
        description: what an entry is.
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
        "lengths",
        ("task", "episode"),
        "steps",
        "steps in the episode, 0 where there is none; what follows is padding",
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
    ArrayPlan("behavior.epsilon", ("task",), "1", "probability of a uniformly random choice"),
    ArrayPlan("behavior.*", ("task",), "1", "parameter of the acting distribution"),
    ArrayPlan("reward_terms.*", ("task", "episode", "t"), "1", "one term of the reward; terms sum to it"),
)
"""The arrays of a batch of episodes, whichever group it is in."""

PLANS = (
    ArrayPlan("tasks/params", ("task", "task_field"), "mixed", "task parameters; attributes name fields and units"),
    ArrayPlan("tasks/ids", ("task",), "1", "index of the task in a fixed set, -1 when drawn from a distribution"),
    *(
        replace(plan, pattern=f"{group}/{plan.pattern}")
        for group in ("rollouts_*", "memory_fill")
        for plan in _EPISODES
    ),
    ArrayPlan("samples_*/returns", ("task", "episode", "t"), "1", "discounted sum of the rewards from step t on"),
    ArrayPlan("samples_*/values", ("task", "episode", "t"), "1", "prediction of the return by the baseline or critic"),
    ArrayPlan("samples_*/advantages", ("task", "episode", "t"), "1", "advantage estimate of step t"),
    ArrayPlan(
        "samples_*/adjusted_rewards",
        ("task", "episode", "t"),
        "1",
        "DiCE only: discounted reward of step t minus its baseline, normalized",
    ),
    ArrayPlan("samples_*/mask", ("task", "episode", "t"), "1", "1 where the step is real, 0 on padding"),
    ArrayPlan(
        "adapted_*/params.*", ("task", "parameter"), "1", "each task's policy parameters after k + 1 inner steps"
    ),
    ArrayPlan(
        "minibatches/rows",
        ("update", "place", "n"),
        "1",
        "numbers of the transitions that a gradient step learns from; -1 after the last step",
    ),
    ArrayPlan("minibatches/task_ids", ("update", "place"), "1", "the task whose memory they are from; -1 as for rows"),
    ArrayPlan(
        "minibatches/context_rows",
        ("update", "place", "c"),
        "1",
        "numbers of the transitions that the task is inferred from; -1 as for rows",
    ),
    ArrayPlan("learner/params.*", ("parameter",), "1", "policy parameters; row i is the input of iteration i"),
    ArrayPlan("learner/optimizer.*", ("slot",), "1", "state of the outer optimizer; row i is the input of iteration i"),
    ArrayPlan("learner/extra.*", ("entry",), "1", "what else the algorithm keeps; row i is the input of iteration i"),
    ArrayPlan("evaluation/task_params", ("task", "task_field"), "mixed", "parameters of the tasks of the evaluation"),
    ArrayPlan("evaluation/task_ids", ("task",), "1", "index of the task in the fixed set it is from, -1 without one"),
    *(
        ArrayPlan(f"evaluation/{kind}_{name}", ("task", *axes), unit, f"{what} {of}")
        for kind, axes, of in (
            ("test", ("adaptation_steps", "test_episode"), "of a test episode after k adaptation steps"),
            ("adaptation", ("adaptation_step", "episode"), "of an episode that adaptation step k + 1 learned from"),
        )
        for name, unit, what in (
            ("returns", "1", "sum of the rewards"),
            ("lengths", "steps", "length"),
            ("terminated", "1", "the task was the end"),
        )
    ),
    ArrayPlan("metrics/values", ("metric",), "mixed", "numbers that describe the iteration; attributes name them"),
)


def plan_of(path: str) -> ArrayPlan | None:
    """The plan of the array at a path below `data.zarr`, None if no array belongs there."""
    return next((plan for plan in PLANS if fnmatchcase(path, plan.pattern)), None)


def dims_of(path: str, axes: int) -> tuple[str, ...]:
    """Names of an array's axes, the leading `iteration` (or, for the learner, `row`) included.

    Axes that the plan does not name are numbered after the array, so that no two arrays of a group are said to share
    an axis that they do not.
    """
    plan = plan_of(path)
    named = plan.dims if plan else ()
    short = path.rpartition("/")[2]
    rest = tuple(f"{short}_axis_{axis}" for axis in range(len(named), axes))
    # Packed mappings of one group differ in length: their last axis belongs to the array alone.
    own = tuple(f"{short}_{dim}" if dim in ("parameter", "slot", "entry") else dim for dim in (*named, *rest)[:axes])
    return ("row" if path.startswith("learner/") else "iteration", *own)


def group_of(ref: StageRef) -> str:
    """The group below `data.zarr` that holds a stage's output."""
    match ref.stage:
        case "fill_memory":
            return "memory_fill"
        case "sample_tasks":
            return "tasks"
        case "collect_rollouts":
            return f"rollouts_{ref.step}"
        case "process_samples":
            return f"samples_{ref.step}"
        case "adapt":
            return f"adapted_{ref.step}"
        case "sample_transitions":
            return "minibatches"
        case "evaluate":
            return "evaluation"
        case _:
            return "learner"


def row_of(ref: StageRef, group: str) -> int:
    """The row of a group's arrays that a stage's output fills."""
    # The learner that iteration i + 1 starts from is the one that iteration i's update made.
    return ref.iteration + 1 if group == "learner" and ref.ends_iteration else ref.iteration
