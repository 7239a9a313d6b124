"""On-policy runs: an update learns from the episodes of its own iteration.

No gradient crosses a stage: `meta_optimize` computes the adaptation again from what is stored.
"""

from collections.abc import Mapping, Sequence

from metaloom.flows.graph.common import INITIALIZE, SAMPLE_TASKS, evaluated, evaluation, position, state_before
from metaloom.flows.graph.context import Context
from metaloom.flows.graph.stage import EACH_STEP, INNER_STEP, ITERATION, Graph, Input, Stage
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.parallel import join_tasks
from metaloom.pipeline.seeding import seed_for
from metaloom.pipeline.types import EpisodeBatch, ParallelMap, Samples, Step, TaskBatch, TaskParams, Update
from metaloom.stages.counters import require_adapted
from metaloom.stages.meta_optimize import meta_optimize


def state(i: int) -> Mapping[str, Input]:
    """Return the learner that iteration i starts from."""
    return state_before(META_OPTIMIZE, i)


def _adapted(i: int, k: int) -> Mapping[str, Input]:
    """Return the result of inner step k - 1, where there is one."""
    return {"params": ADAPT.at(i, k - 1)} if k else {}


def _acting(i: int, k: int) -> Mapping[str, Input]:
    """Return the parameters by which tasks act at inner step k: the learner's for all, or each task's adapted ones."""
    return _adapted(i, k) or state(i)


def _every_step(config: RunConfig, i: int) -> Mapping[str, Input]:
    """Return the episodes and samples of every inner step 0 ... K of an iteration."""
    steps = EACH_STEP.steps(config, i)
    return {name: tuple(stage.at(i, k) for k in steps) for name, stage in _STEP.items()}


def _collect_rollouts(
    context: Context, i: int, k: int, *, tasks: TaskBatch, state: Update | None = None, params: TaskParams | None = None
) -> EpisodeBatch:
    return context.rollouts.collect(_params(context, state, params, len(tasks)), tasks, position(context.config, i, k))


def _process_samples(context: Context, i: int, k: int, *, state: Update, episodes: EpisodeBatch) -> Samples:
    learner, apart, before = context.learner, context.learner.tasks_apart, context.start(state)
    seed = seed_for(context.config.seed, "baseline", i, k)

    def process_samples(parallel: ParallelMap, episodes: Sequence[EpisodeBatch]) -> Samples:
        return learner.process(before, episodes[0], seed=seed, parallel=parallel)

    return join_tasks(context.parallel, process_samples, apart.process if apart else 0, episodes=[episodes])


def _adapt(
    context: Context,
    i: int,
    k: int,
    *,
    state: Update,
    episodes: EpisodeBatch,
    samples: Samples,
    params: TaskParams | None = None,
) -> TaskParams:
    learner, apart, before = context.learner, context.learner.tasks_apart, context.start(state)

    def adapt(
        parallel: ParallelMap,
        params: Sequence[TaskParams],
        episodes: Sequence[EpisodeBatch],
        samples: Sequence[Samples],
    ) -> TaskParams:
        return learner.adapt(before, params[0], Step(episodes[0], samples[0], k), parallel=parallel)

    num_tasks = len(episodes.lengths)
    found = join_tasks(
        context.parallel,
        adapt,
        apart.adapt if apart else 0,
        params=[_params(context, state, params, num_tasks)],
        episodes=[episodes],
        samples=[samples],
    )
    return require_adapted(found, num_tasks, learner)


def _meta_optimize(
    context: Context,
    i: int,
    k: int,
    *,
    state: Update,
    episodes: tuple[EpisodeBatch, ...],
    samples: tuple[Samples, ...],
) -> Update:
    return meta_optimize(
        context.learner,
        context.start(state),
        [Step(e, s, n) for n, (e, s) in enumerate(zip(episodes, samples, strict=True))],
        run_seed=context.config.seed,
        iteration=i,
        parallel=context.parallel,
        measures=context.measures,
    )


def _params(context: Context, state: Update | None, params: TaskParams | None, num_tasks: int) -> TaskParams:
    if params is not None:
        return params
    assert state is not None, "tasks act with a learner's parameters or with adapted ones"
    return context.learner.acting_params(context.start(state), num_tasks)


COLLECT_ROLLOUTS = Stage(
    "collect_rollouts",
    EACH_STEP,
    lambda config, i, k: {**_acting(i, k), "tasks": SAMPLE_TASKS.at(i)},
    EpisodeBatch,
    _collect_rollouts,
    group="rollouts_{step}",
    samples=True,
    thinnable=True,
)
PROCESS_SAMPLES = Stage(
    "process_samples",
    EACH_STEP,
    lambda config, i, k: {**state(i), "episodes": COLLECT_ROLLOUTS.at(i, k)},
    Samples,
    _process_samples,
    group="samples_{step}",
    thinnable=True,
)
_STEP = {"episodes": COLLECT_ROLLOUTS, "samples": PROCESS_SAMPLES}
ADAPT = Stage(
    "adapt",
    INNER_STEP,
    lambda config, i, k: {**state(i), **_adapted(i, k), **{name: s.at(i, k) for name, s in _STEP.items()}},
    TaskParams,
    _adapt,
    group="adapted_{step}",
    thinnable=True,
)
META_OPTIMIZE = Stage(
    "meta_optimize",
    ITERATION,
    lambda config, i, k: {**state(i), **_every_step(config, i)},
    Update,
    _meta_optimize,
    group="learner",
    ends_iteration=True,
)
ON_POLICY = Graph(
    "on_policy",
    (INITIALIZE, SAMPLE_TASKS, COLLECT_ROLLOUTS, PROCESS_SAMPLES, ADAPT, META_OPTIMIZE, evaluation(META_OPTIMIZE)),
    evaluated,
)
