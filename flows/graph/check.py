"""Static checks of a run's graph before anything is created."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from inspect import formatannotation
from itertools import product
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from metaloom.flows.graph.tables import GRAPHS, graph_of, stored_stage, table_of
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.graph import Graph
from metaloom.pipeline.dataflow.outputs import SpanOutputs
from metaloom.pipeline.dataflow.refs import Span, StageRef
from metaloom.pipeline.dataflow.stage import INNER_STEP, GraphError, Input
from metaloom.pipeline.outputs import OutputError
from metaloom.pipeline.plugins import path_of
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import Update
from metaloom.storage.format.codec import KINDS
from metaloom.storage.format.stages import LEARNER, METRICS_GROUP


def check_graph(config: RunConfig) -> None:
    """Raise ConfigError if a custom graph has stages that cannot be computed, stored or loaded."""
    graph = graph_of(config)
    if graph in GRAPHS.values():
        return
    problems = [*_problems_of_stages(graph, config)]
    if not problems:
        try:
            _ = table_of(graph)
        except ValueError as problem:
            problems = [str(problem)]
    problems = problems or [*_problems_of_inputs(graph, config)]
    if problems:
        raise ConfigError("\n".join(f"the graph {config.algorithm.graph}: {problem}" for problem in problems))


def _problems_of_stages(graph: Graph, config: RunConfig) -> Iterator[str]:
    by_group: dict[str, str] = {METRICS_GROUP: "the metrics of every iteration"}
    built_in = {stage for ours in GRAPHS.values() for stage in ours.stages}
    for stage in graph.stages:
        try:
            stored = stored_stage(stage)
        except OutputError as problem:
            yield (
                f"stage {stage.name}: {problem}. A stage returns one of {', '.join(KINDS)}, or a frozen dataclass of "
                "arrays"
            )
        else:
            if stored.schema and stored.output in KINDS:
                yield (
                    f"stage {stage.name} returns a class named {stored.output}, the name of a built-in output; "
                    "choose another name"
                )
        if stage.per is INNER_STEP and stage not in built_in and not config.algorithm.adaptation_steps:
            yield (
                f"stage {stage.name} runs k = 0 ... K-1, but {path_of(type(config.algorithm))}.adaptation_steps, which "
                "is K, is 0, so it would never run; use 1 or more, or per=EACH_STEP"
            )
        if stage.output is not Update and (stage.ends_iteration or stage.group == LEARNER):
            yield f"stage {stage.name} returns {stage.output.__name__}, but it provides learners; return Update"
        if stage.group in by_group:
            yield (
                f"stage {stage.name} has the group {stage.group!r}, which holds {by_group[stage.group]}; use a "
                "different group"
            )
        if stage.group != LEARNER:  # shared by the first and all later learners
            by_group[stage.group] = stage.name


def _problems_of_inputs(graph: Graph, config: RunConfig) -> Iterator[str]:
    every = config.evaluation.every
    for iteration in (0, 1, *([every - 1] if every else [])):
        problems: list[str] = []
        order = graph.order(config, iteration)
        for n, ref in enumerate(order):
            if ref.step and not graph[ref.stage].stepped:
                problems.append(
                    f"stage {ref.stage} runs several times per iteration, but its group is {graph[ref.stage].group!r}; "
                    "the group must end in _{step}"
                )
            problems += _problems_of(graph, config, ref, {*order[:n]})
        if config.evaluation.every is not None:
            try:
                for k, stage in product((0, 1), graph.adapting):
                    graph.inputs_of_adaptation(config, stage, k)
            except GraphError as problem:
                problems.append(str(problem).removeprefix(f"graph {graph.name}: "))
        if problems:  # most repeat in every iteration
            yield from dict.fromkeys(problems)
            return


def _problems_of(graph: Graph, config: RunConfig, ref: StageRef, done: set[StageRef]) -> Iterator[str]:
    try:
        inputs = graph.inputs(config, ref)
    except GraphError as problem:
        yield str(problem).removeprefix(f"graph {graph.name}: ")
        return
    for name, wanted in inputs.items():
        refs = graph.within(config, wanted, ref.iteration) if isinstance(wanted, Span) else wanted
        given = refs if isinstance(refs, tuple | list) else (refs,)
        if late := [one for one in given if one.iteration == ref.iteration and one not in done]:
            yield (
                f"{ref} reads {name} from {late[0]}, which is computed later; use an output of an earlier "
                "iteration, or of a stage that precedes it in the graph"
            )
        elif problem := _problem_of_type(graph, ref, name, wanted):
            yield f"{ref} reads {name} from {problem}"


def _problem_of_type(graph: Graph, ref: StageRef, name: str, wanted: Input) -> str | None:
    """Return why an input does not match its parameter's annotation, or None if it matches.

    Only annotations that are output classes, tuples of output classes, or SpanOutputs are checked.
    """
    hint: Any = graph[ref.stage].annotations.get(name)
    allowed = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
    items: list[Any] = [get_args(t)[0] for t in allowed if get_origin(t) is tuple]
    single: list[Any] = [t for t in allowed if get_origin(t) is not tuple and t is not NoneType]
    if not all(t is SpanOutputs or (isinstance(t, type) and is_dataclass(t)) for t in (*items, *single)):
        return None
    if isinstance(wanted, Span):
        given, fits = f"{wanted}, a span of outputs", SpanOutputs in single
    else:
        refs = wanted if isinstance(wanted, tuple) else (wanted,)
        given = ", ".join(f"{one}, which returns {graph[one.stage].output.__name__}" for one in refs)
        given = f"a tuple of {given}" if isinstance(wanted, tuple) else given
        types = items if isinstance(wanted, tuple) else single
        fits = any(all(issubclass(graph[one.stage].output, t) for one in refs) for t in types)
    return None if fits else f"{given}; expected {formatannotation(hint)}, the annotation in its function"
