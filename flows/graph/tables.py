"""The kinds of runs there are, by the name under which an algorithm's settings ask for one."""

from metaloom.flows.graph.legacy_learners import graph_name
from metaloom.flows.graph.off_policy import OFF_POLICY
from metaloom.flows.graph.on_policy import ON_POLICY
from metaloom.flows.graph.stage import Graph
from metaloom.flows.graph.task_inference import TASK_INFERENCE
from metaloom.pipeline.config.run import RunConfig

GRAPHS = {graph.name: graph for graph in (ON_POLICY, OFF_POLICY, TASK_INFERENCE)}


def graph_of(config: RunConfig) -> Graph:
    """How iterations of a run with this configuration proceed."""
    return GRAPHS[graph_name(config)]


def stage_names() -> list[str]:
    """The stages of all kinds of runs, in the order in which data passes them."""
    names = dict.fromkeys(stage.name for graph in GRAPHS.values() for stage in graph.stages)
    return [*names]
