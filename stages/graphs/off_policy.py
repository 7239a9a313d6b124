"""Off-policy runs: updates use transitions from all iterations so far, and the store is the replay buffer.

Stages read earlier iterations as a Span: `sample_transitions` reads episode lengths, and `update` reads the batches
that contain the drawn rows. Batches cached in memory are not read again, which does not change results.
"""

from metaloom.pipeline.dataflow.edges import every_step, last_iteration, since_start, this_step
from metaloom.pipeline.dataflow.graph import Graph
from metaloom.stages.collect_rollouts import COLLECT_TRANSITIONS
from metaloom.stages.evaluate import EVALUATE
from metaloom.stages.fill_memory import FILL_MEMORY
from metaloom.stages.initialize import INITIALIZE
from metaloom.stages.memory.replay import replay_of_one_task
from metaloom.stages.sample_tasks import SAMPLE_TASKS
from metaloom.stages.sample_transitions import SAMPLE_TRANSITIONS
from metaloom.stages.update import UPDATE

OFF_POLICY = Graph(
    "off_policy",
    (INITIALIZE, FILL_MEMORY, SAMPLE_TASKS, COLLECT_TRANSITIONS, SAMPLE_TRANSITIONS, UPDATE, EVALUATE),
    edges={
        "learner": last_iteration(UPDATE, first=INITIALIZE),
        "initial": this_step(INITIALIZE),
        "fill": this_step(FILL_MEMORY),
        "tasks": this_step(SAMPLE_TASKS),
        "all_rollouts": every_step(COLLECT_TRANSITIONS),
        "history": since_start(FILL_MEMORY, COLLECT_TRANSITIONS),
        "drawn": this_step(SAMPLE_TRANSITIONS),
        "updated": this_step(UPDATE),
    },
    shared={"replay": replay_of_one_task},
)
