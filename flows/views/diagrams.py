"""Diagrams of a graph's stages: as text, as a Mermaid flowchart, as SVG."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from metaloom.flows.graph.tables import graph_of
from metaloom.flows.views.boxes import Arrow, Box, draw
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.edges import Word
from metaloom.pipeline.dataflow.graph import WITNESS, Graph
from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.dataflow.stage import Stage

SAME, BEFORE, EARLIER_STEP, ALL_SO_FAR = "", "iteration before", "step before", "all so far"
EVERY_STEP, STEPS, LATEST = "every step", "steps so far", "last iterations"


@dataclass(frozen=True)
class DrawnEdge:
    """An input of a stage.

    Attributes:
        source: Stage that computes it.
        target: Stage that reads it.
        name: Argument name in the target.
        which: Selection of outputs: one of the constants above.
    """

    source: str
    target: str
    name: str
    which: str

    @property
    def label(self) -> str:
        """Label in a diagram: name and selection."""
        return f"{self.name}, {self.which}" if self.which else self.name


@dataclass(frozen=True)
class Diagram:
    """The stages of a run in data-flow order, and their inputs."""

    stages: tuple[Stage, ...]
    edges: tuple[DrawnEdge, ...]


def diagram_of(config: RunConfig) -> Diagram:
    """Return the diagram of a run with this configuration, without stages that it never reaches."""
    graph = graph_of(config)
    # The first iterations and one with an evaluation include every stage.
    reached = {ref.stage for i in (0, 1, (config.evaluation.every or 1) - 1) for ref in graph.order(config, i)}
    stages = tuple(stage for stage in graph.stages if stage.name in reached)
    edges = dict.fromkeys(edge for stage in stages for edge in _edges(graph, config, stage) if edge.source in reached)
    return Diagram(stages, tuple(edges))


def as_text(diagram: Diagram) -> str:
    """Format one line per stage: frequency, inputs with their sources, and output."""
    rows = [("stage", "", "reads", "gives")]
    for stage in diagram.stages:
        sources: dict[str, list[str]] = {}
        for edge in (edge for edge in diagram.edges if edge.target == stage.name):
            sources.setdefault(edge.name, []).append(f"{edge.source} ({edge.which})" if edge.which else edge.source)
        reads = [f"{name} <- {' or '.join(found)}" for name, found in sources.items()]
        for n, read in enumerate(reads or [""]):
            name, words, output = ("", "", "") if n else (stage.name, stage.per.words, stage.output.__name__)
            rows.append((name, words, read, output))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def as_mermaid(diagram: Diagram) -> str:
    """Format a Mermaid flowchart; dotted arrows come from earlier iterations."""
    lines = ["flowchart TD"]
    lines += [f'    {stage.name}["{stage.name}<br/><small>{stage.per.words}</small>"]' for stage in diagram.stages]
    for edge in diagram.edges:
        arrow = "-.->" if edge.which in (BEFORE, ALL_SO_FAR, LATEST) else "-->"
        lines.append(f'    {edge.source} {arrow}|"{edge.label}"| {edge.target}')
    return "\n".join(lines) + "\n"


def as_svg(diagram: Diagram) -> str:
    """Draw the stages from top to bottom. Arcs on the right lead down, on the left from earlier iterations."""
    places = {stage.name: n for n, stage in enumerate(diagram.stages)}
    arrows = [
        Arrow(places[edge.source], places[edge.target], edge.label, dashed=edge.which in (BEFORE, ALL_SO_FAR, LATEST))
        for edge in diagram.edges
    ]
    return draw([Box(stage.name, (stage.per.words,)) for stage in diagram.stages], arrows)


FORMATS: Mapping[str, Callable[[Diagram], str]] = {"text": as_text, "mermaid": as_mermaid, "svg": as_svg}


_WHICH: Mapping[Word, str] = {
    "this_step": SAME,
    "last_step": EARLIER_STEP,
    "every_step": EVERY_STEP,
    "steps_so_far": STEPS,
    "last_iteration": BEFORE,
    "last_iterations": LATEST,
    "since_start": ALL_SO_FAR,
}


def _edges(graph: Graph, config: RunConfig, stage: Stage) -> Iterator[DrawnEdge]:
    for name, edge in stage.edges.items():
        for source, found in graph.sources(graph.edges[edge]):
            yield DrawnEdge(source, stage.name, name, _WHICH[found.word])
    for name in WITNESS if config.env.witness and stage.ends_iteration else ():
        wanted = graph.inputs(config, stage.at(0)).get(name)
        if isinstance(wanted, StageRef):
            yield DrawnEdge(wanted.stage, stage.name, name, SAME)
