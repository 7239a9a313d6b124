"""The kinds of runs there are, by the name under which an algorithm's settings ask for one."""

from metaloom.flows.graph.off_policy import OFF_POLICY
from metaloom.flows.graph.on_policy import ON_POLICY
from metaloom.flows.graph.stage import Graph
from metaloom.flows.graph.task_inference import TASK_INFERENCE
from metaloom.flows.graph.trial_inference import TRIAL_INFERENCE
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.plugins import load
from metaloom.pipeline.schema import ConfigError

GRAPHS = {graph.name: graph for graph in (ON_POLICY, OFF_POLICY, TASK_INFERENCE, TRIAL_INFERENCE)}


def graph_of(config: RunConfig) -> Graph:
    """Return the graph that iterations of a run with this configuration follow.

    Raises:
        ConfigError: the algorithm asks for a graph that there is not.
    """
    name = config.algorithm.graph
    graph = load(name) if ":" in name else GRAPHS.get(name)
    if not isinstance(graph, Graph):
        raise ConfigError(
            f"algorithm.name is {config.algorithm.name}, whose graph is {name!r}; required one of {', '.join(GRAPHS)}, "
            "or module:NAME of a Graph"
        )
    return graph


def stage_names() -> list[str]:
    """Return the stages of all kinds of runs, in the order in which data passes them."""
    names = dict.fromkeys(stage.name for graph in GRAPHS.values() for stage in graph.stages)
    return [*names]
