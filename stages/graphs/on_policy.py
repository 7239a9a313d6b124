"""On-policy runs: each update uses only the episodes of its own iteration."""

from metaloom.pipeline.dataflow.edges import every_step, last_iteration, last_step, this_step
from metaloom.pipeline.dataflow.graph import Graph
from metaloom.stages.adapt import ADAPT, REMEMBER
from metaloom.stages.collect_rollouts import COLLECT_ROLLOUTS
from metaloom.stages.evaluate import EVALUATE
from metaloom.stages.initialize import INITIALIZE
from metaloom.stages.meta_optimize import META_OPTIMIZE
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
