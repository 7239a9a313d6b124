"""The built-in graphs, and descriptions of their stages for the store."""

from functools import cache

from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.graph import Graph
from metaloom.pipeline.dataflow.stage import Stage
from metaloom.pipeline.outputs import OutputSchema
from metaloom.pipeline.plugins import load
from metaloom.pipeline.schema import ConfigError
from metaloom.stages.graphs.off_policy import OFF_POLICY
from metaloom.stages.graphs.on_policy import ON_POLICY, TRIAL_INFERENCE, TRIALS
from metaloom.stages.graphs.task_inference import TASK_INFERENCE
from metaloom.storage import StageTable, StoredStage
from metaloom.storage.format.codec import KINDS

GRAPHS = {graph.name: graph for graph in (ON_POLICY, OFF_POLICY, TASK_INFERENCE, TRIALS, TRIAL_INFERENCE)}


def graph_of(config: RunConfig) -> Graph:
    """Return the graph of a configuration's algorithm; raise ConfigError if there is none."""
    name = config.algorithm.graph
    graph = load(name) if ":" in name else GRAPHS.get(name)
    if not isinstance(graph, Graph):
        raise ConfigError(
            f"algorithm.name is {config.algorithm.name}, whose graph is {name!r}; use one of {', '.join(GRAPHS)}, "
            "or set `graph` in the algorithm's settings class to the module:NAME of a Graph"
        )
    return graph


@cache
def table_of(graph: Graph) -> StageTable:
    """Return the table that describes a graph's stages to the store; raise ValueError if the store cannot hold them."""
    return StageTable(map(stored_stage, graph.stages))


def stored_stage(stage: Stage) -> StoredStage:
    """Return the store's description of a stage; raise OutputError if the stage's output cannot be stored."""
    schema = None if stage.output in KINDS.values() else OutputSchema.of(stage.output)
    name = schema.name if schema else stage.output.__name__
    return StoredStage(stage.name, stage.group, name, stage.thinnable, stage.ends_iteration, schema)


def stage_names() -> list[str]:
    """Return the names of the stages of all built-in graphs, each graph's in data-flow order, without duplicates."""
    names = dict.fromkeys(stage.name for graph in GRAPHS.values() for stage in graph.stages)
    return [*names]
