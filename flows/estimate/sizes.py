"""Memory, disk and environment steps of a run, from its settings and the layout of its arrays, before it is created.

All is arithmetic, so that any size can be asked about. Episodes are taken to last as long as they may.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from metaloom.flows.estimate.forms import Forms
from metaloom.flows.graph.off_policy import MIB, plan_of
from metaloom.flows.graph.stage import ONCE, Stage
from metaloom.flows.graph.tables import graph_of
from metaloom.flows.rollouts.workers import SamplerSpec, usable_cores
from metaloom.pipeline.algorithms.off_policy.settings import OffPolicySettings
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.memory import LEARNER_COPIES
from metaloom.pipeline.replay.columns import TransitionColumns
from metaloom.pipeline.tasks.evaluation import EvaluationPlan
from metaloom.pipeline.types import Array, EpisodeBatch, Evaluation, TaskBatch, Update
from metaloom.storage.format.arrays import COMPRESS_FROM
from metaloom.storage.format.codec import Value
from metaloom.storage.format.layout import plan_in

TRAINER_BYTES = 300 * MIB
"""What a trainer takes with next to nothing to train: the interpreter, torch and the physics."""
WORKER_BYTES = 260 * MIB
"""The same of a worker, which has no torch unless its network or the mathematics needs it."""
TORCH_BYTES = 230 * MIB
"""What a worker takes more with torch, and the learner that it builds."""
BESIDE_BYTES = 2500
"""A record and its share of the tables, per output."""
TABLE_BYTES = 30_000
"""Tables and the record of the update, per iteration."""
DESCRIPTION_BYTES = 60_000
"""The run's settings and environment, and what is said of each array, once."""
FLOATS_KEPT = 0.93
"""What compression leaves of the float32 numbers of simulators."""

_GRADIENT_COPIES = 6
"""What a gradient through an adaptation keeps of a row, in outputs of the policy's layers; measured."""


@dataclass(frozen=True)
class Estimate:
    """What a run takes at the most, if no episode ends early.

    Attributes:
        trainer_bytes: memory of the process that trains.
        worker_bytes: memory of each process that samples; 0 where the trainer does.
        workers: how many those are.
        start_bytes: disk for what is stored once.
        iteration_bytes: disk for an iteration, an evaluation's share included.
        run_bytes: disk for the run, after what its retention removes.
        steps: of environments, per iteration.
        evaluation_steps: per evaluation, 0 without one.
    """

    trainer_bytes: int
    worker_bytes: int
    workers: int
    start_bytes: int
    iteration_bytes: int
    run_bytes: int
    steps: int
    evaluation_steps: int

    @property
    def memory_bytes(self) -> int:
        """Memory of all processes on this machine."""
        return self.trainer_bytes + self.workers * self.worker_bytes


def estimate(config: RunConfig, forms: Forms, workers: int = 0, *, computing: bool = False) -> Estimate:
    """Estimate what a run takes whose rollouts are sampled by so many processes on this machine; 0 for the trainer.

    Args:
        config: of the run.
        forms: of its arrays.
        workers: how many processes.
        computing: they do its mathematics as well.
    """
    graph, sizes = graph_of(config), _Sizes(config, forms)
    once, again = ([output for stage in graph.stages for output in sizes.of(stage, i)] for i in (0, 1))
    first = [output for output in once if output.once]
    evaluations = sizes.evaluation()
    share = config.iterations // config.evaluation.every if config.evaluation.every else 0
    iteration = sum(output.disk for output in again) + TABLE_BYTES
    thinnable = sum(output.disk for output in again if output.thinnable)
    start = sum(output.disk for output in first) + DESCRIPTION_BYTES
    run = start + config.iterations * iteration - (config.iterations - _kept(config)) * thinnable
    return Estimate(
        trainer_bytes=TRAINER_BYTES + sizes.trainer_bytes(first, again, sampling=not workers),
        worker_bytes=sizes.worker_bytes([*first, *again], workers, computing=computing) if workers else 0,
        workers=workers,
        start_bytes=start,
        iteration_bytes=iteration + (evaluations.disk // config.evaluation.every if config.evaluation.every else 0),
        run_bytes=run + share * evaluations.disk,
        steps=sum(output.steps for output in again),
        evaluation_steps=evaluations.steps if config.evaluation.every else 0,
    )


def estimate_evaluation(config: RunConfig, forms: Forms) -> Estimate:
    """Estimate what an evaluation by itself takes, which stores nothing."""
    found = _Sizes(config, forms).evaluation()
    memory = TRAINER_BYTES + found.memory + 2 * found.round
    return Estimate(memory, 0, 0, 0, 0, 0, steps=0, evaluation_steps=found.steps)


@dataclass(frozen=True)
class _Output:
    """Bytes of all outputs of a stage in an iteration, in memory and on disk; of a single round; and its steps."""

    memory: int
    disk: int
    round: int = 0
    steps: int = 0
    thinnable: bool = False
    once: bool = False


class _Sizes:
    """Sizes under a configuration."""

    def __init__(self, config: RunConfig, forms: Forms) -> None:
        self._config, self._forms = config, forms
        self._plan = plan_of(config) if isinstance(config.algorithm, OffPolicySettings) else None
        self._sizes = {
            "task": config.num_tasks,
            "t": config.max_episode_steps,
            "t_with_final": config.max_episode_steps + 1,
        }
        if self._plan is not None:
            steps = config.episodes_per_task * config.max_episode_steps
            self._sizes |= {
                "update": self._plan.gradient_steps(steps),
                "place": self._plan.tasks_per_gradient_step,
                "n": self._plan.batch_size,
                "c": self._plan.context_size,
            }

    def of(self, stage: Stage, iteration: int) -> Iterator[_Output]:
        """What a stage gives in an iteration, evaluations left out: nothing, or all its inner steps together."""
        steps = stage.per.steps(self._config, iteration)
        number = steps.stop - steps.start if isinstance(steps, range) else len(steps)  # which len may not count
        if stage.output is Evaluation or number <= 0:
            return
        if stage.output is not EpisodeBatch:
            made = self._output(stage.output, self._sizes | {"episode": self._config.episodes_per_task})
            if stage.output is Update and stage.per is ONCE:
                made = replace(made, disk=int(FLOATS_KEPT * self._forms.start_bytes) + BESIDE_BYTES)
            yield replace(self._times(made, number), thinnable=stage.thinnable, once=stage.per is ONCE)
            return
        every = [self._rollouts(stage, k) for k in (range(number) if self._plan is not None else [0])]
        made = _Output(
            sum(output.memory for output in every),
            sum(output.disk for output in every),
            max(output.round for output in every),
            sum(output.steps for output in every),
        )
        made = made if self._plan is not None else self._times(made, number)
        yield replace(made, thinnable=stage.thinnable, once=stage.per is ONCE)

    def evaluation(self) -> _Output:
        """An evaluation: what is stored of it, and in memory the episodes that tasks are adapted to."""
        config, plan, forms = self._config, EvaluationPlan.of(self._config), self._forms
        asked = config.evaluation
        fixed = forms.test_tasks if asked.tasks == "held-out" else 0
        given = 0 if isinstance(asked.tasks, str) else len(asked.tasks)
        tasks = asked.num_tasks or forms.evaluated_classes or given or fixed or config.num_tasks
        K = plan.adaptation_steps
        sizes = self._sizes | {"task": tasks, "episode": plan.episodes, "test_episode": plan.test_episodes}
        stored = self._output(Evaluation, sizes | {"adaptation_steps": K + 1, "adaptation_step": K})
        rounds = self._output(EpisodeBatch, sizes)
        test = self._output(EpisodeBatch, sizes | {"episode": plan.test_episodes})
        # Held-out draws are none that training made, which are drawn again to know them.
        drawn = 0 if fixed or given or forms.train_tasks else config.iterations * config.num_tasks
        known = drawn * self._output(TaskBatch, {"task": 1}).memory
        steps = tasks * config.max_episode_steps * (K * plan.episodes + (K + 1) * plan.test_episodes)
        held = stored.memory + K * rounds.memory + test.memory + known
        return _Output(held, stored.disk, max(rounds.memory, test.memory), steps)

    def trainer_bytes(self, first: Sequence[_Output], again: Sequence[_Output], *, sampling: bool) -> int:
        """Memory of the trainer above that of one with nothing to train."""
        outputs, forms, config = [*first, *again], self._forms, self._config
        round_bytes = max(output.round for output in outputs)
        held = sum(output.memory for output in again) + sum(output.memory for output in first) + 2 * round_bytes
        evaluation = self.evaluation()
        evaluating = evaluation.memory + 2 * evaluation.round if config.evaluation.every else 0
        learning = LEARNER_COPIES * forms.learner_bytes + self._gradient_bytes()
        return max(2 * held + learning + self._replay_bytes(), evaluating) + (round_bytes if sampling else 0)

    def worker_bytes(self, outputs: Sequence[_Output], workers: int, *, computing: bool) -> int:
        """Memory of a worker that samples, and may hold its share of an iteration, also as tensors."""
        held = TORCH_BYTES + self._gradient_bytes() + 3 * sum(output.memory for output in outputs) // workers
        return WORKER_BYTES + self._sampling_bytes(outputs, workers) + (held if computing else 0)

    def _sampling_bytes(self, outputs: Sequence[_Output], workers: int) -> int:
        """Memory of a worker's share of the largest round, while it is brought into the order of tasks."""
        rounds = [output.round for output in outputs]
        if self._config.evaluation.every:
            rounds.append(self.evaluation().round)
        return 2 * max(rounds) // min(workers, self._config.num_tasks) + self._forms.learner_bytes

    def _gradient_bytes(self) -> int:
        """What the layers of a policy give for the rows that gradients are taken of at once."""
        config, T = self._config, self._config.max_episode_steps
        if self._plan is not None:
            rows = self._plan.tasks_per_gradient_step * (self._plan.batch_size + self._plan.context_size)
            return rows * self._forms.row_bytes
        rounds = config.algorithm.adaptation_steps + 1
        tasks = getattr(config.algorithm, "tasks_per_chunk", 1) * usable_cores()
        rows = min(config.num_tasks, tasks) * self._real_episodes() * T * rounds
        spaces, of_trial = self._forms.spaces, config.algorithm.trial or 1
        beside = config.algorithm.model_bytes(
            trials=config.num_tasks * config.episodes_per_task // of_trial,
            trial_steps=of_trial * T,
            observation_size=spaces.observation_size,
            action_size=spaces.num_actions or spaces.action_size,
            policy=config.policy,
        )
        return _GRADIENT_COPIES * rows * self._forms.row_bytes + beside

    def _replay_bytes(self) -> int:
        config, spaces = self._config, self._forms.spaces
        if self._plan is None:
            earlier = config.algorithm.earlier_iterations
            episodes = self._output(EpisodeBatch, self._sizes | {"episode": config.episodes_per_task}).memory
            # As they were read, and in the order of trials.
            return min(config.replay.cache_mib * MIB, (earlier + 1) * 2 * episodes) if earlier else 0
        most = self._plan.most_transitions(
            iterations=config.iterations,
            num_tasks=config.num_tasks,
            all_tasks=self._forms.train_tasks if self._plan.filling.episodes else 1,
            max_episode_steps=config.max_episode_steps,
        )
        row = TransitionColumns(spaces.observation_size, spaces.action_size).row_bytes
        return min(config.replay.cache_mib * MIB, most * row)

    def _rollouts(self, stage: Stage, k: int) -> _Output:
        """A round of episodes: in memory with its empty places, on disk without."""
        config, plan = self._config, self._plan
        tasks, real = config.num_tasks, self._real_episodes()
        places, left_out = config.episodes_per_task, ()
        if plan is not None and stage.per is ONCE:
            filling = plan.filling
            left_out = ("behavior",) if filling.actor == "uniform" else ()
            tasks = self._forms.train_tasks if filling.episodes else tasks
            places = real = filling.episodes or -(-(filling.steps or 0) // config.max_episode_steps)
        elif plan is not None:
            places = real = plan.rounds[k].episodes
        sizes = self._sizes | {"task": tasks}
        memory = self._output(EpisodeBatch, sizes | {"episode": places}, left_out).memory
        stored = self._output(EpisodeBatch, sizes | {"episode": real}, left_out)
        return _Output(memory, stored.disk, memory, tasks * real * config.max_episode_steps)

    def _real_episodes(self) -> int:
        """Episodes per task of full length, where sampling ends at a number of steps or episodes as elsewhere."""
        enough = SamplerSpec.of(self._config, 1).enough
        return self._config.episodes_per_task if enough is None else enough.block_size

    def _output(self, kind: type[Value], sizes: Mapping[str, int], left_out: tuple[str, ...] = ()) -> _Output:
        arrays = {name: a for name, a in self._forms.outputs[kind].items() if name.partition(".")[0] not in left_out}
        shapes = {name: self._array_bytes(kind, name, array, sizes) for name, array in arrays.items()}
        kept = sum(
            self._forms.kept.get(name, FLOATS_KEPT) * num_bytes if num_bytes >= COMPRESS_FROM else num_bytes
            for name, num_bytes in shapes.items()
        )
        return _Output(sum(shapes.values()), int(kept) + BESIDE_BYTES)

    def _array_bytes(self, kind: type[Value], name: str, array: Array, sizes: Mapping[str, int]) -> int:
        plan = plan_in(kind.__name__, name)
        dims = plan.dims[: array.ndim] if plan is not None else ()
        lengths = [sizes.get(dim, length) for dim, length in zip(dims, array.shape, strict=False)]
        return math.prod([*lengths, *array.shape[len(dims) :]]) * array.itemsize

    @staticmethod
    def _times(output: _Output, number: int) -> _Output:
        return replace(output, memory=number * output.memory, disk=number * output.disk, steps=number * output.steps)


def _kept(config: RunConfig) -> int:
    """Iterations whose batches stay."""
    last, every = config.retention.keep_last, config.retention.keep_every
    if last is None and every is None:
        return config.iterations
    return min(config.iterations, (last or 0) + (-(-config.iterations // every) if every else 0))
