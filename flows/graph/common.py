"""Stages that every kind of run has, and their shared objects."""

from collections.abc import Callable, Mapping

from metaloom.flows.graph.context import Context
from metaloom.flows.graph.stage import EVALUATION, ITERATION, ONCE, Evaluate, Input, Stage
from metaloom.flows.graph.warm_start import read_learner
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.tasks.evaluation import EvaluationPlan, evaluation_tasks
from metaloom.pipeline.types import Array, EpisodeBatch, Evaluation, LearnerState, TaskBatch, Update
from metaloom.stages.collect_rollouts import RolloutPosition
from metaloom.stages.evaluate import Tested, evaluate, total_rewards, unseen
from metaloom.stages.initialize import initialize
from metaloom.stages.sample_tasks import sample_tasks
from metaloom.storage.format.stages import LEARNER


def nothing(config: RunConfig, i: int, k: int) -> Mapping[str, Input]:
    """Return the inputs of a stage without inputs."""
    return {}


def _initialize(context: Context, i: int, k: int) -> Update:
    config = context.config
    start = None if config.init_from is None else read_learner(config.init_from)
    return initialize(context.learner, run_seed=config.seed, start=start)


def draw_tasks(context: Context, i: int, k: int = 0) -> TaskBatch:
    """Draw the tasks of an iteration, as the run's settings say."""
    config = context.config
    balanced = config.task_sampling == "balanced"
    return sample_tasks(context.env, num_tasks=config.num_tasks, run_seed=config.seed, iteration=i, balanced=balanced)


INITIALIZE = Stage("initialize", ONCE, nothing, Update, _initialize, group=LEARNER)
SAMPLE_TASKS = Stage("sample_tasks", ITERATION, nothing, TaskBatch, draw_tasks, group="tasks")


def state_before(update: Stage, i: int) -> Mapping[str, Input]:
    """Return the learner that iteration i starts from, where `update` makes the next one."""
    return {"state": update.at(i - 1) if i else INITIALIZE.at(0)}


def position(config: RunConfig, i: int, k: int) -> RolloutPosition:
    """Return the position at which the episodes of a rollout batch are drawn."""
    return RolloutPosition(config.seed, i, k)


def evaluated(
    context: Context,
    state: LearnerState,
    updates: int,
    tested: Tested = unseen,
    *,
    explores: bool = True,
    returns: Callable[[EpisodeBatch], Array] = total_rewards,
) -> Evaluation:
    """Evaluate a learner after `updates` updates: returns after 0 ... K adaptation steps; see Evaluate.

    Args:
        context: Context of the run.
        state: Learner state.
        updates: Number of updates so far.
        tested: Receives the test episodes.
        explores: Draw actions in the episodes to adapt to even if test episodes are deterministic; for policies with
            memory the settings decide.
        returns: Computes the return [B, E] of episodes.
    """
    config, learner, sampling = context.config, context.learner, context.rollouts.sampling
    plan = EvaluationPlan.of(config)
    tasks = evaluation_tasks(config, context.env, updates)
    one_trial = config.algorithm.trial is not None
    if one_trial:
        explores = config.evaluation.remembered == "drawn"
    adapting = sampling(plan.episodes, deterministic=plan.deterministic and not explores, one_trial=one_trial)
    return evaluate(
        learner,
        state,
        tasks,
        adaptation_steps=plan.adaptation_steps,
        adaptation_rollouts=adapting.collect,
        test_rollouts=sampling(plan.test_episodes, deterministic=plan.deterministic).collect,
        run_seed=plan.run_seed,
        parallel=context.parallel,
        returns=returns,
        tested=tested,
    )


def evaluation(update: Stage, evaluated: Evaluate = evaluated) -> Stage:
    """Return the stage that evaluates the output of `update`, every N iterations as configured."""

    def run(context: Context, i: int, k: int, *, state: Update) -> Evaluation:
        return evaluated(context, state.learner, i + 1, unseen)

    return Stage(
        "evaluate",
        EVALUATION,
        lambda config, i, k: {"state": update.at(i)},
        Evaluation,
        run,
        group="evaluation",
        samples=True,
        # Equal tasks and episodes in every evaluation make them comparable.
        seed_position=lambda config, i, k: (config.seed, config.evaluation.seed),
    )
