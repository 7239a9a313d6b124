"""The kinds of runs there are, by the name under which an algorithm's settings ask for one."""

from functools import cache

from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.graph import Graph
from metaloom.pipeline.dataflow.stage import Stage
from metaloom.pipeline.outputs import OutputSchema
from metaloom.pipeline.plugins import load
from metaloom.pipeline.schema import ConfigError
from metaloom.stages.graphs.off_policy import OFF_POLICY
from metaloom.stages.graphs.on_policy import ON_POLICY, TRIALS
from metaloom.stages.graphs.task_inference import TASK_INFERENCE
from metaloom.stages.graphs.trial_inference import TRIAL_INFERENCE
from metaloom.storage import StageTable, StoredStage
from metaloom.storage.format.codec import KINDS

GRAPHS = {graph.name: graph for graph in (ON_POLICY, OFF_POLICY, TASK_INFERENCE, TRIALS, TRIAL_INFERENCE)}


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
            "or module:NAME of a Graph, as graph = ... in the class of its settings"
        )
    return graph


@cache
def table_of(graph: Graph) -> StageTable:
    """Return the stages of a graph as the store knows them.

    Raises:
        ValueError: the store cannot keep them.
    """
    return StageTable(map(stored_stage, graph.stages))


def stored_stage(stage: Stage) -> StoredStage:
    """Return a stage as the store knows it.

    Raises:
        OutputError: no run can store its output.
    """
    schema = None if stage.output in KINDS.values() else OutputSchema.of(stage.output)
    name = schema.name if schema else stage.output.__name__
    return StoredStage(stage.name, stage.group, name, stage.thinnable, stage.ends_iteration, schema)


def stage_names() -> list[str]:
    """Return the stages of all kinds of runs, in the order in which data passes them."""
    names = dict.fromkeys(stage.name for graph in GRAPHS.values() for stage in graph.stages)
    return [*names]
