"""Checks of a kind of run before anything is created: what its table of stages alone shows to be wrong."""

import inspect
from collections.abc import Iterator
from typing import Any

from metaloom.flows.graph.stage import WITNESS, Graph, Input
from metaloom.flows.graph.tables import GRAPHS, graph_of
from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.outputs import OutputError
from metaloom.pipeline.plugins import path_of
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import EpisodeBatch, TaskBatch, TaskParams, Update
from metaloom.storage import Span, StageRef
from metaloom.storage.format.codec import KINDS
from metaloom.storage.format.stages import LEARNER, METRICS_GROUP


def check_graph(config: RunConfig) -> None:
    """Refuse a custom graph whose stages could not be computed, stored or loaded one after the other.

    Raises:
        ConfigError: naming the stage, what it declares, and what is required.
    """
    graph = graph_of(config)
    if graph in GRAPHS.values():
        return
    problems = [*_problems_of_stages(graph)]
    if not problems:
        try:
            _ = graph.table
        except ValueError as problem:
            problems = [str(problem)]
    problems = problems or [*_problems_of_inputs(graph, config)]
    if problems:
        raise ConfigError("\n".join(f"the graph {config.algorithm.graph}: {problem}" for problem in problems))


def _problems_of_stages(graph: Graph) -> Iterator[str]:
    by_group: dict[str, str] = {METRICS_GROUP: "the metrics of every iteration"}
    for stage in graph.stages:
        try:
            stored = stage.stored
        except OutputError as problem:
            yield (
                f"stage {stage.name}: {problem}. A stage gives one of {', '.join(KINDS)}, or a frozen dataclass of "
                "arrays"
            )
        else:
            if stored.schema and stored.output in KINDS:
                yield f"stage {stage.name} gives a class named {stored.output}, as one of ours; required another name"
        if stage.group in by_group:
            yield (
                f"stage {stage.name} has the group {stage.group!r}, which holds {by_group[stage.group]}; required a "
                "group of its own"
            )
        if stage.group != LEARNER:  # which the first learner and all later ones share
            by_group[stage.group] = stage.name


def _problems_of_inputs(graph: Graph, config: RunConfig) -> Iterator[str]:
    every = config.evaluation.every
    for iteration in (0, 1, *([every - 1] if every else [])):
        problems: list[str] = []
        order = graph.order(config, iteration)
        for n, ref in enumerate(order):
            if ref.step and not graph.table[ref.stage].stepped:
                problems.append(
                    f"stage {ref.stage} has several steps in an iteration and the group {graph[ref.stage].group!r}; "
                    "required a group that ends in _{step}"
                )
            problems += _problems_of(graph, config, ref, {*order[:n]})
        if problems:  # most of them come again in every iteration
            yield from dict.fromkeys(problems)
            return


def _problems_of(graph: Graph, config: RunConfig, ref: StageRef, done: set[StageRef]) -> Iterator[str]:
    stage = graph[ref.stage]
    try:
        inputs = graph.inputs(config, ref)
    except Exception as problem:
        yield f"the inputs of {ref} raised {type(problem).__name__}: {problem}"
        return
    for name, wanted in inputs.items():
        if problem := _problem_of(graph, config, ref, wanted, done):
            yield f"{ref} reads {name} from {problem}"
    try:
        taken = {name: wanted for name, wanted in inputs.items() if name not in WITNESS}
        inspect.signature(stage.run).bind(None, ref.iteration, ref.step, **taken)
    except TypeError as problem:
        function = getattr(stage.run, "__qualname__", repr(stage.run))
        yield (
            f"{ref} has the inputs {', '.join(inputs) or 'none'}, but its function {function} does not take them: "
            f"{problem}; required a function of (context, i, k, *, {', '.join(inputs)})"
        )


def _problem_of(graph: Graph, config: RunConfig, ref: StageRef, wanted: Input, done: set[StageRef]) -> str | None:
    if isinstance(wanted, Span):
        if unknown := [name for name in wanted.stages if name not in graph.table]:
            return f"{wanted}, but there is no stage {unknown[0]}; required one of {_names(graph)}"
        if wanted.last > ref.iteration:
            return f"{wanted}, which is computed after it; required outputs that are there by then"
        wanted = tuple(graph.within(config, wanted, ref.iteration))
    for one in wanted if isinstance(wanted, tuple) else (wanted,):
        if one.stage not in graph.table:
            return f"{one}, but there is no stage {one.stage}; required one of {_names(graph)}"
        if one.iteration > ref.iteration or (one.iteration == ref.iteration and one not in done):
            if one.iteration == ref.iteration and one not in graph.order(config, ref.iteration):
                return f"{one}, which the iteration does not have; required an output that it has"
            return (
                f"{one}, which is computed after it; required an output of an earlier iteration, or of a stage that "
                "stands before it in the graph"
            )
        if one.iteration < ref.iteration and one not in graph.order(config, one.iteration):
            return f"{one}, which iteration {one.iteration} does not have; required an output that it has"
    return None


def require_one_adaptation(config: RunConfig, learner: Learner[Any, Any]) -> None:
    """Refuse to adapt by a learner alone where the graph of its runs adapts in another way.

    Evaluations and trained policies call `Learner.adapt_to_episodes`, which knows nothing of the graph.

    Raises:
        ConfigError: naming what stands between the episodes and the adapted parameters.
    """
    learner = learner.unwrapped
    method = type(learner).adapt_to_episodes
    if not method.__module__.startswith("metaloom."):
        return  # whoever wrote it knows the graph
    cls = path_of(type(learner))
    if method is Learner.adapt_to_episodes and type(learner).adapt is not Learner.adapt:
        raise ConfigError(
            f"found {cls}, which defines adapt and not adapt_to_episodes, by which evaluations and trained policies "
            "adapt; they would not adapt at all. Define it: one step of adapt on the last of some rounds of episodes"
        )
    if own := next(_stages_of_its_own(graph_of(config), config), None):
        raise ConfigError(
            f"found the graph {config.algorithm.graph}, in which {own}, but evaluations and trained "
            f"policies adapt by adapt_to_episodes of {cls} alone, which would be another algorithm; define "
            "adapt_to_episodes in a learner of your own so that it does the same, or evaluate with adaptation_steps=0"
        )


def _stages_of_its_own(graph: Graph, config: RunConfig) -> Iterator[str]:
    """Name what leads from episodes to the parameters that tasks act with, and is in no graph of ours."""
    ours = {stage.run: stage for known in GRAPHS.values() for stage in known.stages}
    adapting = {run for run, stage in ours.items() if stage.output is TaskParams}
    order = graph.order(config, 1)
    waiting = [ref for ref in order if graph[ref.stage].output is EpisodeBatch or graph[ref.stage].run in adapting]
    for ref in waiting:
        stage = graph[ref.stage]
        # Without the learner and the tasks, which an evaluation brings itself.
        inputs = {
            name: wanted
            for name, wanted in graph.inputs(config, ref).items()
            if not (isinstance(wanted, StageRef) and graph[wanted.stage].output in (Update, TaskBatch))
        }
        if stage.run not in ours:
            yield f"{ref.stage} is a stage of its own"
        else:
            usual = ours[stage.run].inputs(config, ref.iteration, ref.step)
            for name, wanted in inputs.items():
                if usual.get(name) != wanted:
                    shown = ", ".join(map(str, wanted)) if isinstance(wanted, tuple) else str(wanted)
                    yield f"{ref} reads {name} from {shown}"
        for wanted in inputs.values():
            found = wanted if isinstance(wanted, tuple) else () if isinstance(wanted, Span) else (wanted,)
            waiting += [one for one in found if one in order and one not in waiting]


def _names(graph: Graph) -> str:
    return ", ".join(stage.name for stage in graph.stages)
