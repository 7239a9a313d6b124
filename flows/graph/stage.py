"""Kinds of runs as data: their stages, what each reads, and how each is computed.

What else must know about stages reads it from here: the order of an iteration, the lineage in records, Prefect's edges,
what replaying and thinning need, the debugger's variables, the store's groups, choices on the command line, diagrams.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from metaloom.flows.graph.context import Context
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.outputs import OutputSchema, as_declared
from metaloom.pipeline.types import Evaluation, LearnerState, TaskBatch
from metaloom.stages.evaluate import Tested
from metaloom.stages.witness import drawn_round
from metaloom.storage import Span, StageRef
from metaloom.storage.format.codec import KINDS
from metaloom.storage.format.codec import Value as StageOutput
from metaloom.storage.format.stages import StageTable, StoredStage

Input = StageRef | tuple[StageRef, ...] | Span
"""Input of a stage: one output, outputs of several steps, or a span, of which it reads what it needs."""


@dataclass(frozen=True)
class Per:
    """Number of executions of a stage in an iteration.

    Attributes:
        words: Text for diagrams, such as "per inner step".
        steps: Returns its inner steps k for a configuration and iteration i.
    """

    words: str
    steps: Callable[[RunConfig, int], Sequence[int]]


WITNESS = ("witness_tasks", "witness_episodes")
"""Names of the inputs that a witness is played from."""

ONCE = Per("once per run", lambda config, i: () if i else (0,))
ITERATION = Per("per iteration", lambda config, i: (0,))
INNER_STEP = Per("k = 0 ... K-1", lambda config, i: range(config.algorithm.adaptation_steps))
EACH_STEP = Per("k = 0 ... K", lambda config, i: range(config.algorithm.adaptation_steps + 1))


def _after_evaluated(config: RunConfig, i: int) -> Sequence[int]:
    every = config.evaluation.every
    return (0,) if every is not None and (i + 1) % every == 0 else ()


EVALUATION = Per("every n iterations", _after_evaluated)


def by_place(config: RunConfig, i: int, k: int) -> tuple[int, ...]:
    """Return the position in the run's random streams at which a stage draws by default."""
    return (config.seed, i, k)


@dataclass(frozen=True)
class Stage:
    """One stage of a kind of run.

    Attributes:
        name: Stage name.
        per: Number of executions in an iteration.
        inputs: Returns the inputs in iteration i and inner step k: argument of `run` -> source.
        output: Type of its output: one of `metaloom.pipeline.types`, or a frozen dataclass of arrays whose fields say
            their axes, see `metaloom.pipeline.outputs`.
        run: Computes the output from the run's context, i, k and the inputs by name. A Span arrives as `SpanOutputs`.
        group: Group that stores it; "{step}" in the name stands for the inner step.
        samples: True if it runs environments, so that other algorithm settings cannot be tried on stored data.
        thinnable: True if thinning may remove its arrays, because they can be computed again.
        ends_iteration: True if its output is the next learner.
        seed_position: Position of its draws in the run's random streams.
    """

    name: str
    per: Per
    inputs: Callable[[RunConfig, int, int], Mapping[str, Input]]
    output: type[StageOutput]
    run: Callable[..., StageOutput]
    group: str
    samples: bool = False
    thinnable: bool = False
    ends_iteration: bool = False
    seed_position: Callable[[RunConfig, int, int], tuple[int, ...]] = by_place

    def at(self, i: int, k: int = 0) -> StageRef:
        """Return the ref of its output in iteration i and inner step k."""
        return StageRef(i, self.name, k)

    def as_declared(self, value: Any) -> Any:
        """Return an output of it as an object of the class that it declares, wherever that was read from."""
        return value if self.output in KINDS.values() else as_declared(self.output, value)

    @property
    def stored(self) -> StoredStage:
        """The stage as the store knows it.

        Raises:
            OutputError: no run can store its output.
        """
        schema = None if self.output in KINDS.values() else OutputSchema.of(self.output)
        name = schema.name if schema else self.output.__name__
        return StoredStage(self.name, self.group, name, self.thinnable, self.ends_iteration, schema)


Evaluate = Callable[[Context, LearnerState, int, Tested], Evaluation]
"""Evaluates a learner after N updates; passes on the test episodes after each number of adaptation steps."""


@dataclass(frozen=True)
class Graph:
    """A kind of run.

    Attributes:
        name: Name by which an algorithm's settings select it.
        stages: Stages in data-flow order; consecutive per-step stages run step by step.
        evaluate: Evaluates a learner, as the configuration's evaluation section says.
        remembers_by_task: True if stored data of a task belong to its index in the training set, which must not change.
        check: Raises ConfigError or EnvError if configuration and environment do not fit each other.
    """

    name: str
    stages: tuple[Stage, ...]
    evaluate: Evaluate
    remembers_by_task: bool = False
    check: Callable[[RunConfig, MetaEnv], None] = lambda config, env: None

    @cached_property
    def table(self) -> StageTable:
        """The stages as the store knows them."""
        return StageTable(stage.stored for stage in self.stages)

    @cached_property
    def _by_name(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.stages}

    def __getitem__(self, name: str) -> Stage:
        return self._by_name[name]

    def order(self, config: RunConfig, iteration: int) -> list[StageRef]:
        """Return the stages of an iteration in the order in which they run."""
        refs = (stage.at(iteration, k) for stage in self.stages for k in stage.per.steps(config, iteration))
        return self.table.sort(refs)

    def sampled_from(self, config: RunConfig, iteration: int) -> set[StageRef]:
        """Return what decides an iteration's episodes: stages that sample, and what they read of this iteration."""
        sampling = [ref for ref in self.order(config, iteration) if self[ref.stage].samples]
        read = (wanted for ref in sampling for wanted in self.inputs(config, ref).values())
        return {*sampling, *(wanted for wanted in read if isinstance(wanted, StageRef))}

    def inputs(self, config: RunConfig, ref: StageRef) -> Mapping[str, Input]:
        """Return a stage's inputs by argument name.

        Where an episode of every iteration is played again, the stage that ends it reads the tasks and the batch.
        """
        declared = self[ref.stage].inputs(config, ref.iteration, ref.step)
        if not (config.env.witness and self[ref.stage].ends_iteration):
            return declared
        refs = self.order(config, ref.iteration)
        tasks = [one for one in refs if self[one.stage].output is TaskBatch]
        batches = [one for one in refs if one.stage == self.table.named("rollouts")]
        if not (tasks and batches):
            return declared
        batch = batches[drawn_round(config.seed, ref.iteration, len(batches))]
        return {**declared, **dict(zip(WITNESS, (tasks[0], batch), strict=True))}

    def within(self, config: RunConfig, span: Span, iteration: int) -> list[StageRef]:
        """Return the outputs of a span that are of an iteration, in the order in which they are computed."""
        return span.of(self.order(config, iteration))
