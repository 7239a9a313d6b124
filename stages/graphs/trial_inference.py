"""Runs that infer their tasks within a trial, such as VariBAD: an on-policy learner and a model of trials.

The policy learns from the current iteration's trials; the inference model also learns from recent iterations.
"""

from dataclasses import replace

from metaloom.pipeline.dataflow.edges import last_iteration, last_iterations, last_step, this_step
from metaloom.pipeline.dataflow.graph import Graph
from metaloom.pipeline.dataflow.stage import ITERATION
from metaloom.stages.collect_rollouts import COLLECT_ROLLOUTS
from metaloom.stages.evaluate import EVALUATE
from metaloom.stages.initialize import INITIALIZE
from metaloom.stages.memory.trials import trials_of_run
from metaloom.stages.meta_optimize import META_OPTIMIZE_WITH_TRIALS
from metaloom.stages.process_samples import PROCESS_SAMPLES
from metaloom.stages.remember import REMEMBER
from metaloom.stages.sample_tasks import SAMPLE_TASKS

# Later iterations also learn from these episodes.
COLLECT_TRIALS = replace(COLLECT_ROLLOUTS, per=ITERATION, thinnable=False)
PROCESS_TRIALS = replace(PROCESS_SAMPLES, per=ITERATION)
TRIAL_INFERENCE = Graph(
    "trial_inference",
    (INITIALIZE, SAMPLE_TASKS, COLLECT_TRIALS, PROCESS_TRIALS, REMEMBER, META_OPTIMIZE_WITH_TRIALS, EVALUATE),
    edges={
        "learner": last_iteration(META_OPTIMIZE_WITH_TRIALS, first=INITIALIZE),
        "tasks": this_step(SAMPLE_TASKS),
        "acting": last_step(REMEMBER, first="learner"),
        "rollouts": this_step(COLLECT_TRIALS),
        "samples": this_step(PROCESS_TRIALS),
        "history": last_iterations(COLLECT_TRIALS),
        "updated": this_step(META_OPTIMIZE_WITH_TRIALS),
    },
    shared={"trials": trials_of_run},
)
