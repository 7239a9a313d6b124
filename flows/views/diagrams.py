"""Diagrams of a graph's stages: text, a Mermaid flowchart, or an SVG of stacked boxes and arrows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from metaloom.flows.graph.tables import graph_of
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.edges import Word
from metaloom.pipeline.dataflow.graph import WITNESS
from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.dataflow.stage import Stage

_SIDE, _NARROW, _BOX, _GAP, _LINE = 330, 20, 170, 34, 15
SAME, BEFORE, ALL_SO_FAR, LATEST = "", "iteration before", "all so far", "last iterations"
_WHICH: Mapping[Word, str] = {
    **{"this_step": SAME, "last_step": "step before", "every_step": "every step", "steps_so_far": "steps so far"},
    **{"last_iteration": BEFORE, "last_iterations": LATEST, "since_start": ALL_SO_FAR},
}


@dataclass(frozen=True)
class Box:
    """Box with a bold title above lines of text. Clicking it opens `link`, unless that is empty."""

    title: str
    lines: tuple[str, ...]
    link: str = ""


@dataclass(frozen=True)
class Arrow:
    """Arrow between two boxes, given by their indices. It is drawn on the right if it points down, else on the left."""

    source: int
    target: int
    label: str = ""
    dashed: bool = False

    @property
    def leads_down(self) -> bool:
        """True if the arrow points to a later box."""
        return self.source < self.target


def draw(boxes: Sequence[Box], arrows: Sequence[Arrow]) -> str:
    """Return an SVG of the boxes from top to bottom, connected by the arrows."""
    height = 10 + _LINE * (1 + max((len(box.lines) for box in boxes), default=0))
    left = _NARROW if all(arrow.leads_down for arrow in arrows) else _SIDE
    # Arrows without labels need room only for their apexes.
    right = _SIDE if any(arrow.label for arrow in arrows) else max(map(_reach, arrows), default=0) * 3 // 4 + _NARROW
    width = left + _BOX + right
    full = len(boxes) * (height + _GAP) + 20
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{full}" viewBox="0 0 {width} {full}" '
        'font-family="sans-serif" font-size="11">\n'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#57606a"/></marker></defs>\n'
        # Pages in dark mode would show dark lines on a dark ground.
        '<rect width="100%" height="100%" rx="6" fill="#fff"/>'
    )
    arcs = [_arc(arrow, n, left, height) for n, arrow in enumerate(arrows)]
    drawn = (_box(box, left, n * (height + _GAP) + 10, height) for n, box in enumerate(boxes))
    # Draw labels after the lines, so that no line crosses them.
    lines, labels = (line for line, _ in arcs), (label for _, label in arcs if label)
    return "\n".join([head, *lines, *labels, *drawn, "</svg>"]) + "\n"


def _box(box: Box, x: int, y: int, height: int) -> str:
    middle = x + _BOX / 2
    lines = (
        f'<text x="{middle:g}" y="{y + 17 + _LINE * (n + 1)}" text-anchor="middle" fill="#57606a">{escape(line)}</text>'
        for n, line in enumerate(box.lines)
    )
    drawn = (
        f'<rect x="{x}" y="{y}" width="{_BOX}" height="{height}" rx="6" fill="#f6f8fa" stroke="#57606a"/>'
        f'<text x="{middle:g}" y="{y + 17}" text-anchor="middle" font-weight="bold">{escape(box.title)}</text>'
        f"{''.join(lines)}"
    )
    return f'<a href="{escape(box.link)}">{drawn}</a>' if box.link else drawn


def _arc(arrow: Arrow, n: int, left: int, height: int) -> tuple[str, str]:
    """Return the SVG of an arrow's line, and of its label with a white outline that hides the lines behind it."""
    x, out = (left + _BOX, 1) if arrow.leads_down else (left, -1)
    # Offset the ends, so that arrows at the same box remain distinct.
    inside = height * (0.25 + 0.5 * (n % 4) / 3)
    y0, y1 = (place * (height + _GAP) + 10 + inside for place in (arrow.source, arrow.target))
    reach = x + out * _reach(arrow)
    dashes = ' stroke-dasharray="4 3"' if arrow.dashed else ""
    # The apex of a cubic curve is three quarters of the way to its control points.
    apex, anchor = x + 0.75 * (reach - x) + 4 * out, "start" if arrow.leads_down else "end"
    place = f'x="{apex:g}" y="{(y0 + y1) / 2 + 4:g}" text-anchor="{anchor}" fill="#0969da" '
    place += 'stroke="#fff" stroke-width="4" paint-order="stroke"'
    label = f"<text {place}>{escape(arrow.label)}</text>" if arrow.label else ""
    line = (
        f'<path d="M{x} {y0:g}C{reach} {y0:g} {reach} {y1:g} {x} {y1:g}" fill="none" stroke="#57606a"{dashes} '
        'marker-end="url(#head)"/>'
    )
    return line, label


def _reach(arrow: Arrow) -> int:
    """Return the horizontal offset of an arrow's control points."""
    return min(30 + 34 * abs(arrow.target - arrow.source), _SIDE - 100)


@dataclass(frozen=True)
class DrawnEdge:
    """Input of a stage, drawn as an arrow: source, target, argument name, and which outputs of the source are read."""

    source: str
    target: str
    name: str
    which: str

    @property
    def is_earlier(self) -> bool:
        return self.which in (BEFORE, ALL_SO_FAR, LATEST)

    @property
    def label(self) -> str:
        """Label of the arrow: the argument name, and which outputs are read."""
        return f"{self.name}, {self.which}" if self.which else self.name


@dataclass(frozen=True)
class Diagram:
    """Stages of a run in data-flow order, and their inputs."""

    stages: tuple[Stage, ...]
    edges: tuple[DrawnEdge, ...]


def diagram_of(config: RunConfig) -> Diagram:
    """Return the diagram of a run with this configuration, excluding stages that the run never reaches."""
    graph = graph_of(config)
    # The first two iterations and one with an evaluation include every stage.
    reached = {ref.stage for i in (0, 1, (config.evaluation.every or 1) - 1) for ref in graph.order(config, i)}
    stages = tuple(stage for stage in graph.stages if stage.name in reached)
    edges: dict[DrawnEdge, None] = {}
    for stage in stages:
        for name, edge in stage.edges.items():
            sources = graph.sources(graph.edges[edge])
            edges |= {DrawnEdge(source, stage.name, name, _WHICH[found.word]): None for source, found in sources}
        for name in WITNESS if config.env.witness and stage.ends_iteration else ():
            wanted = graph.inputs(config, stage.at(0)).get(name)
            if isinstance(wanted, StageRef):
                edges[DrawnEdge(wanted.stage, stage.name, name, SAME)] = None
    return Diagram(stages, tuple(edge for edge in edges if edge.source in reached))


def as_text(diagram: Diagram) -> str:
    """Return a text table with the frequency, inputs, input sources and output of each stage."""
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
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def as_mermaid(diagram: Diagram) -> str:
    """Return a Mermaid flowchart; dotted arrows come from earlier iterations."""
    lines = ["flowchart TD"]
    lines += [f'    {stage.name}["{stage.name}<br/><small>{stage.per.words}</small>"]' for stage in diagram.stages]
    for edge in diagram.edges:
        arrow = "-.->" if edge.is_earlier else "-->"
        lines.append(f'    {edge.source} {arrow}|"{edge.label}"| {edge.target}')
    return "\n".join(lines) + "\n"


def as_svg(diagram: Diagram) -> str:
    """Return an SVG with the stages from top to bottom. Arcs on the left come from earlier iterations."""
    places = {stage.name: n for n, stage in enumerate(diagram.stages)}
    arrows = [Arrow(places[e.source], places[e.target], e.label, dashed=e.is_earlier) for e in diagram.edges]
    return draw([Box(stage.name, (stage.per.words,)) for stage in diagram.stages], arrows)


FORMATS: Mapping[str, Callable[[Diagram], str]] = {"text": as_text, "mermaid": as_mermaid, "svg": as_svg}
