"""Runs that infer the task within a trial, such as VariBAD: an on-policy learner plus an inference model.

The policy learns from the current iteration's trials; the inference model also learns from recent iterations.
"""

from dataclasses import replace

from metaloom.pipeline.dataflow.edges import last_iterations
from metaloom.pipeline.dataflow.stage import ITERATION
from metaloom.stages.collect_rollouts import COLLECT_ROLLOUTS
from metaloom.stages.graphs.on_policy import TRIALS
from metaloom.stages.memory.trials import trials_of_run
from metaloom.stages.meta_optimize import META_OPTIMIZE, META_OPTIMIZE_WITH_TRIALS
from metaloom.stages.process_samples import PROCESS_SAMPLES

# Later iterations also learn from these episodes.
COLLECT_TRIALS = replace(COLLECT_ROLLOUTS, per=ITERATION, thinnable=False)
TRIAL_INFERENCE = (
    replace(TRIALS, name="trial_inference", shared={"trials": trials_of_run})
    .replace(COLLECT_ROLLOUTS, COLLECT_TRIALS)
    .replace(PROCESS_SAMPLES, replace(PROCESS_SAMPLES, per=ITERATION))
    .edge(history=last_iterations(COLLECT_TRIALS))
    .replace(META_OPTIMIZE, META_OPTIMIZE_WITH_TRIALS)
)
