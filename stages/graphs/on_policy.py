"""On-policy runs: each update uses only the episodes of its own iteration."""

from dataclasses import replace

from metaloom.pipeline.dataflow.edges import every_step, last_iteration, last_iterations, last_step, this_step
from metaloom.pipeline.dataflow.graph import Graph
from metaloom.pipeline.dataflow.stage import ITERATION
from metaloom.stages.adapt import ADAPT, REMEMBER
from metaloom.stages.collect_rollouts import COLLECT_ROLLOUTS
from metaloom.stages.evaluate import EVALUATE
from metaloom.stages.initialize import INITIALIZE
from metaloom.stages.memory.replay import trials_of_run
from metaloom.stages.meta_optimize import META_OPTIMIZE, META_OPTIMIZE_WITH_TRIALS
from metaloom.stages.process_samples import PROCESS_SAMPLES
from metaloom.stages.sample_tasks import SAMPLE_TASKS

ON_POLICY = Graph(
    "on_policy",
    (INITIALIZE, SAMPLE_TASKS, COLLECT_ROLLOUTS, PROCESS_SAMPLES, ADAPT, META_OPTIMIZE, EVALUATE),
    edges={
        "learner": last_iteration(META_OPTIMIZE, first=INITIALIZE),
        "tasks": this_step(SAMPLE_TASKS),
        "acting": last_step(ADAPT, first="learner"),
        "rollouts": this_step(COLLECT_ROLLOUTS),
        "samples": this_step(PROCESS_SAMPLES),
        "all_rollouts": every_step(COLLECT_ROLLOUTS),
        "all_samples": every_step(PROCESS_SAMPLES),
        "updated": this_step(META_OPTIMIZE),
    },
)
TRIALS = ON_POLICY.named("trials").replace(ADAPT, REMEMBER)
"""Graph of runs that adapt within a trial through the actor's memory, such as RL2."""

# Later iterations also learn from these episodes.
COLLECT_TRIALS = replace(COLLECT_ROLLOUTS, per=ITERATION, thinnable=False)
TRIAL_INFERENCE = (
    replace(TRIALS, name="trial_inference", shared={"trials": trials_of_run})
    .replace(COLLECT_ROLLOUTS, COLLECT_TRIALS)
    .replace(PROCESS_SAMPLES, replace(PROCESS_SAMPLES, per=ITERATION))
    .edge(history=last_iterations(COLLECT_TRIALS))
    .replace(META_OPTIMIZE, META_OPTIMIZE_WITH_TRIALS)
)
"""Graph of runs that infer the task within a trial, such as VariBAD: an on-policy learner plus an inference model.

The policy learns from the current iteration's trials; the inference model also learns from recent iterations.
"""
