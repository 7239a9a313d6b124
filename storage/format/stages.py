"""Stages of a run as recorded in run.json, and the stored arrays of each output type."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import index
from typing import Any

from metaloom.pipeline import types
from metaloom.pipeline.dataflow.refs import StageOrder, StageRef
from metaloom.pipeline.outputs import LETTERS, OutputSchema
from metaloom.storage.errors import IncompatibleFormat

LEARNER = "learner"  # group that contains the learners; iteration i starts from row i

METRICS_GROUP = "metrics"  # group that contains the metrics, which are written with an iteration's update

STEP = "{step}"  # placeholder for the inner step in a group name


_GROUP = re.compile(r"[a-z][a-z0-9_]{0,60}?(_\{step\})?")


@dataclass(frozen=True)
class StoredStage:
    """Facts about a stage that the store needs."""

    name: str
    group: str  # location of the output below `data.zarr`; "{step}" stands for the inner step
    output: str
    thinnable: bool = False  # thinning may remove the output's arrays
    ends_iteration: bool = False  # the output is the next learner and the metrics
    schema: OutputSchema | None = None  # set only for user-defined output classes

    @property
    def stepped(self) -> bool:
        """True if an iteration may have an output per inner step."""
        return STEP in self.group

    @property
    def description(self) -> str:
        """First line of the output class's docstring."""
        if self.schema:
            return self.schema.description
        return str(vars(types)[self.output].__doc__).partition("\n")[0]


class StageTable(StageOrder):
    """Stages of a run in data-flow order. One of them outputs the first learner, and another ends each iteration.

    `metrics_since` lists the iterations where a fork's settings changed the metrics of its parent.

    Raises ValueError if names are not unique, a group is not a valid folder name, or either of these two stages is
    missing or not unique.
    """

    def __init__(self, stages: Iterable[StoredStage], metrics_since: Iterable[int] = ()) -> None:
        self.stages: tuple[StoredStage, ...] = tuple(stages)
        self._by_name = {stage.name: stage for stage in self.stages}
        self.metrics_since: tuple[int, ...] = tuple(map(index, metrics_since))
        if wrong := [stage.group for stage in self.stages if not _GROUP.fullmatch(stage.group)]:
            raise ValueError(
                f"got the group {wrong[0]!r}; expected lowercase letters, digits and _, with {STEP} at the end"
            )
        ends = [stage.name for stage in self.stages if stage.ends_iteration]
        starts = [stage.name for stage in self.stages if stage.group == LEARNER and not stage.ends_iteration]
        if len(ends) != 1 or len(starts) != 1 or len(self._by_name) != len(self.stages):
            raise ValueError(
                f"the stages are {', '.join(stage.name for stage in self.stages)}, of which {len(starts)} make the "
                f"first learner and {len(ends)} end an iteration; names must be unique, one stage of the group "
                f"{LEARNER!r} must make the first learner, and one must have ends_iteration=True"
            )
        self.first: str = starts[0]
        self.last: str = ends[0]
        super().__init__((stage.name, stage.stepped) for stage in self.stages)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> StoredStage:
        if name not in self._by_name:  # not reported as damage, which a repair would recompute
            raise IncompatibleFormat(
                "run.json",
                found=f"no stage {name!r}; the stages are {', '.join(self._by_name)}",
                required=f"an entry for {name!r}",
                action="Restore run.json from a copy of the run",
            )
        return self._by_name[name]

    def learner_ref(self, iteration: int) -> StageRef:
        """Return a reference to the learner that an iteration starts from, whether stored or not."""
        return StageRef(0, self.first) if iteration == 0 else self.last_ref(iteration - 1)

    def last_ref(self, iteration: int) -> StageRef:
        """Return a reference to the output that ends an iteration, whether stored or not."""
        return StageRef(iteration, self.last)

    def writing(self, group: str) -> StoredStage | None:
        """Return the stage that writes a group below `data.zarr`, such as rollouts_0; None if there is none."""
        pattern = re.sub(r"_\d{1,4}$", f"_{STEP}", group)
        return next((stage for stage in self.stages if stage.group in (group, pattern)), None)

    def named(self, group: str) -> str:
        """Return the name of the stage that writes a group, or ""; "rollouts" means "rollouts_{step}"."""
        found = (stage.name for stage in self.stages if stage.group in (group, f"{group}_{STEP}"))
        return next(found, "")

    def in_group(self, group: str, iteration: int, step: int = 0) -> StageRef | None:
        """Return a reference to a group's output, whether stored or not; None for unknown groups."""
        name = self.named(group)
        return StageRef(iteration, name, step) if name else None

    def thinnable(self, ref: StageRef) -> bool:
        return ref.stage in self and self[ref.stage].thinnable

    def recomputable(self, ref: StageRef) -> bool:
        """Return True if an output can be recomputed from others: it is thinnable, or a learner after an update.

        Thinning keeps learners, but published reference runs include only a few.
        """
        return ref.stage == self.last or self.thinnable(ref)

    def group_of(self, ref: StageRef) -> str:
        return self[ref.stage].group.replace(STEP, str(ref.step))

    def metrics_array(self, iteration: int) -> str:
        """Return the path of the array with an iteration's metrics."""
        since = max((first for first in self.metrics_since if first <= iteration), default=0)
        return f"{METRICS_GROUP}/values" + (f"_{since}" if since else "")

    def row_of(self, ref: StageRef) -> int:
        # The update of iteration i computes the learner that iteration i + 1 starts from.
        return ref.iteration + self[ref.stage].ends_iteration

    def document(self) -> list[dict[str, Any]]:
        """Return the table as recorded in run.json."""
        return [
            {"name": s.name, "group": s.group, "output": s.output}
            | ({"thinnable": True} if s.thinnable else {})
            | ({"ends_iteration": True} if s.ends_iteration else {})
            | ({"schema": s.schema.document()} if s.schema else {})
            for s in self.stages
        ]

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> "StageTable":
        """Return the stage table in a run.json. Earlier versions had two fixed tables and did not record them."""
        if "stages" in info:
            return cls((_stored_stage(**stage) for stage in info["stages"]), info.get("metrics_since", ()))
        return EARLIER[info.get("last_stage", ON_POLICY.last)]


def _stored_stage(schema: Mapping[str, Any] | None = None, **stage: Any) -> StoredStage:
    return StoredStage(**stage, schema=OutputSchema.parse(stage["output"], schema) if schema else None)


_FIRST = StoredStage("initialize", LEARNER, "Update")
_TASKS = StoredStage("sample_tasks", "tasks", "TaskBatch")
_ADAPT = StoredStage("adapt", "adapted_{step}", "TaskParams", thinnable=True)
_EVALUATE = StoredStage("evaluate", "evaluation", "Evaluation")

ON_POLICY = StageTable(
    (
        _FIRST,
        _TASKS,
        StoredStage("collect_rollouts", "rollouts_{step}", "EpisodeBatch", thinnable=True),
        StoredStage("process_samples", "samples_{step}", "Samples", thinnable=True),
        _ADAPT,
        StoredStage("meta_optimize", LEARNER, "Update", ends_iteration=True),
        _EVALUATE,
    )
)
OFF_POLICY = StageTable(
    (
        _FIRST,
        StoredStage("fill_memory", "memory_fill", "EpisodeBatch"),
        _TASKS,
        StoredStage("collect_rollouts", "rollouts_{step}", "EpisodeBatch"),
        _ADAPT,
        StoredStage("sample_transitions", "minibatches", "Minibatches", thinnable=True),
        StoredStage("update", LEARNER, "Update", ends_iteration=True),
        _EVALUATE,
    )
)
EARLIER = {table.last: table for table in (ON_POLICY, OFF_POLICY)}
"""Stage tables of old runs whose run.json contains none, keyed by the stage that ends iterations."""


@dataclass(frozen=True)
class ArrayPlan:
    """Layout and meaning of one kind of array."""

    pattern: str  # name within its group; `*` matches a name or an index
    dims: tuple[str, ...]  # names of the axes after `iteration`; `*` is replaced by the array's name
    unit: str  # "1" if dimensionless, "mixed" if each component has its own
    description: str


def _plan(pattern: str, axes: str, description: str, unit: str = "1") -> ArrayPlan:
    """Return a plan with axes given as letters or full names, as in custom outputs."""
    return ArrayPlan(pattern, tuple(LETTERS.get(axis, axis) for axis in axes.split()), unit, description)


_EPISODES = (
    _plan("observations", "B E T+1 O", "observation before step t; entry `lengths` follows the last step", "mixed"),
    _plan("actions", "B E T A", "action as the policy emitted it"),
    _plan("rewards", "B E T", "reward of step t"),
    _plan("terminated", "B E", "the task ended the episode"),
    _plan("truncated", "B E", "the step limit ended the episode"),
    _plan("lengths", "B E", "steps in the episode, 0 where there is none; what follows is padding", "steps"),
    _plan("initial_state", "B E S", "state of the simulator after the reset", "mixed"),
    _plan("behavior.mean", "B E T A", "mean of the acting Gaussian"),
    _plan("behavior.log_std", "B A", "log standard deviation of the acting Gaussian"),
    _plan("behavior.log_stds", "B E T A", "log standard deviation of the acting Gaussian, if it depends on the state"),
    _plan("behavior.log_probs", "B E T choice", "log-probability of every choice under the acting distribution"),
    _plan("behavior.latent", "B E latent", "the belief's draw z that the episode was acted with"),
    _plan("behavior.action_values", "B E T choice", "value of every choice that was acted by"),
    _plan("behavior.posterior_mean", "B E T latent", "mean of the acting policy's posterior over the task"),
    _plan("behavior.posterior_log_std", "B E T latent", "log standard deviation of that posterior"),
    _plan("behavior.epsilon", "B", "probability of a uniformly random choice"),
    _plan("behavior.*", "B", "parameter of the acting distribution"),
    _plan("reward_terms.*", "B E T", "one term of the reward; terms sum to it"),
    _plan("facts.*", "B E T", "environment's fact about step t or the episode; run.json has its unit", "mixed"),
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
        _plan("rows", "update place n", "numbers of a gradient step's transitions; -1 after the last step"),
        _plan("task_ids", "update place", "the task whose memory they are from; -1 as for rows"),
        _plan("context_rows", "update place c", "numbers of the transitions the task is inferred from; -1 as for rows"),
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
"""Plans of an output's arrays, keyed by output type."""

METRICS = _plan("values", "metric", "numbers that describe the iteration; attributes name them", "mixed")
"""Plan of the metrics array, which is written with the next learner."""


def plan_of(path: str, stages: StageTable) -> ArrayPlan | None:
    """Return the plan of the array at a path below `data.zarr`, or None if it belongs to no stage."""
    group, _, name = path.partition("/")
    if group == METRICS_GROUP:
        return METRICS if re.fullmatch(rf"{METRICS.pattern}(_[0-9]+)?", name) else None
    stage = stages.writing(group)
    return None if stage is None else plan_in(stage, name)


def plan_in(stage: StoredStage, name: str) -> ArrayPlan | None:
    if stage.schema is None:
        plans = ARRAYS[stage.output]
    else:
        plans = (ArrayPlan(f.name + ".*" * f.mapping, f.dims, f.unit, f.description) for f in stage.schema.fields)
    return next((plan for plan in plans if fnmatchcase(name, plan.pattern)), None)


def dims_of(path: str, plan: ArrayPlan | None, axes: int) -> tuple[str, ...]:
    """Return the names of an array's axes, including the leading `iteration` (`row` for the learner).

    Axes not in the plan are numbered and named after the array, so that arrays do not appear to share them.
    """
    named = plan.dims if plan else ()
    group, _, short = path.partition("/")
    rest = tuple(f"{short}_axis_{axis}" for axis in range(len(named), axes))
    # Packed mappings of a group differ in length, so their last axis is not shared.
    own = tuple(dim.replace("*", short) for dim in (*named, *rest)[:axes])
    return ("row" if group == LEARNER else "iteration", *own)
