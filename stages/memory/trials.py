"""Stored trials on which an inference model is trained."""

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.outputs import SpanOutputs
from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.replay.index import TrialBuffer
from metaloom.stages.memory.replay import MIB


class StoredTrials:
    """Trials of a run's rollout batches, cached in memory while in use and within a size limit.

    `num_actions` is 0 for continuous actions; `cache_bytes` does not count the batch being read.
    """

    def __init__(self, episodes_per_trial: int, num_actions: int, cache_bytes: int) -> None:
        self._episodes_per_trial, self._num_actions, self._room = episodes_per_trial, num_actions, cache_bytes
        self._known: dict[StageRef, Trials] = {}

    def buffer(self, rounds: SpanOutputs) -> TrialBuffer:
        """Return the trials of a span of rollout batches. Only episode lengths are read immediately."""
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


def trials_of_run(config: RunConfig, setup: Setup) -> StoredTrials:
    """Return an empty cache for a run's trials."""
    assert config.algorithm.trial is not None, "a graph for algorithms that adapt within a trial"
    return StoredTrials(config.algorithm.trial, setup.num_actions, config.replay.cache_mib * MIB)
