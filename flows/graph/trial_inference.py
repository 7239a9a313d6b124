"""Runs that infer their tasks within a trial, as VariBAD does: on policy, beside a model of the trials so far.

The policy learns from the trials of its own iteration. The inference model learns from the trials of the last
iterations, which the update reads from the store as a Span.
"""

from collections.abc import Mapping
from dataclasses import replace

from metaloom.flows.graph import on_policy
from metaloom.flows.graph.common import INITIALIZE, SAMPLE_TASKS, evaluated, evaluation
from metaloom.flows.graph.context import Context
from metaloom.flows.graph.off_policy import MIB
from metaloom.flows.graph.outputs import SpanOutputs
from metaloom.flows.graph.stage import ITERATION, Graph, Input
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.replay.trials import TrialBuffer, TrialExperience
from metaloom.pipeline.types import EpisodeBatch, Samples, Step, Update
from metaloom.stages.meta_optimize import meta_optimize
from metaloom.storage import Span, StageRef


class StoredTrials:
    """Trials of a run's rollout batches, cached in memory while they fit and are in use. The cache changes no result.

    Args:
        episodes_per_trial: Episodes per trial of the run.
        num_actions: Number of actions; 0 where actions are continuous.
        cache_bytes: Memory for them. The batch that is being read comes on top.
    """

    def __init__(self, episodes_per_trial: int, num_actions: int, cache_bytes: int) -> None:
        self._episodes_per_trial, self._num_actions, self._room = episodes_per_trial, num_actions, cache_bytes
        self._known: dict[StageRef, Trials] = {}

    def buffer(self, rounds: SpanOutputs) -> TrialBuffer:
        """Return the trials of a span of rollout batches. Lengths are read at once, the rest when it is drawn from."""
        refs = [ref for i in range(rounds.span.first, rounds.span.last + 1) for ref in rounds.refs(i)]
        self._known = {ref: trials for ref, trials in self._known.items() if ref in rounds.span}
        counts = [rounds.lengths(ref).size // self._episodes_per_trial for ref in refs]
        return TrialBuffer(counts, lambda n: self._read(rounds, refs[n]))

    def _read(self, rounds: SpanOutputs, ref: StageRef) -> Trials:
        if ref not in self._known:
            trials = Trials(rounds.experience(ref), self._episodes_per_trial, self._num_actions)
            if sum(known.num_bytes for known in self._known.values()) + trials.num_bytes > self._room:
                return trials
            self._known[ref] = trials
        return self._known[ref]


def _meta_optimize(
    context: Context,
    i: int,
    k: int,
    *,
    state: Update,
    episodes: EpisodeBatch,
    samples: Samples,
    rounds: SpanOutputs,
) -> Update:
    config, step = context.config, Step(episodes, samples, k)
    return meta_optimize(
        context.learner,
        context.start(state),
        [step],
        run_seed=config.seed,
        iteration=i,
        parallel=context.parallel,
        measures=context.measures,
        experience=TrialExperience(step, _stored(context).buffer(rounds)),
    )


def _stored(context: Context) -> StoredTrials:
    config = context.config
    assert config.algorithm.trial is not None, "a table for algorithms that adapt within a trial"
    trial, cache = config.algorithm.trial, config.replay.cache_mib * MIB
    return context.keep("trials", lambda: StoredTrials(trial, context.setup.num_actions, cache))


def _learns_from(config: RunConfig, i: int, k: int) -> Mapping[str, Input]:
    first = max(0, i - config.algorithm.earlier_iterations)
    return {
        **on_policy.state(i),
        "episodes": COLLECT_ROLLOUTS.at(i, k),
        "samples": PROCESS_SAMPLES.at(i, k),
        "rounds": Span((COLLECT_ROLLOUTS.name,), first, i),
    }


# Later iterations learn from these episodes, too.
COLLECT_ROLLOUTS = replace(on_policy.COLLECT_ROLLOUTS, per=ITERATION, thinnable=False)
PROCESS_SAMPLES = replace(on_policy.PROCESS_SAMPLES, per=ITERATION)
META_OPTIMIZE = replace(on_policy.META_OPTIMIZE, inputs=_learns_from, run=_meta_optimize)
TRIAL_INFERENCE = Graph(
    "trial_inference",
    (INITIALIZE, SAMPLE_TASKS, COLLECT_ROLLOUTS, PROCESS_SAMPLES, META_OPTIMIZE, evaluation(META_OPTIMIZE)),
    evaluated,
)
