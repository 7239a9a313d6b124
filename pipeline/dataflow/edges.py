"""Edges, which are rules that select the outputs that a stage reads as an input.

An edge such as `this_step(PROCESS_SAMPLES)` is relative to the position of the stage that reads it. Execution order,
lineage, static checks, diagrams and composition are derived from edges without calling any stage.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from metaloom.pipeline.dataflow.stage import GraphError, Per, Stage

Word = Literal[
    "this_step", "last_step", "every_step", "steps_so_far", "last_iteration", "last_iterations", "since_start"
]


@dataclass(frozen=True)
class Edge:
    """Rule that selects the outputs read as a stage's input.

    Attributes:
        word: Name of the rule, such as `this_step`.
        stages: Names of the stages that compute the outputs.
        first: Edge, or edge name, to use when there is no earlier step or iteration.
        among: Inner steps to include; default: all steps of the stage.
    """

    word: Word
    stages: tuple[str, ...]
    first: "Edge | str | None" = None
    among: Per | None = None

    def __str__(self) -> str:
        first = f", first={self.first}" if self.first is not None else ""
        return f"{self.word}({', '.join(self.stages)}{first})"

    def renamed(self, old: str, new: str) -> Self:
        """Return the edge with one stage renamed."""
        first = self.first.renamed(old, new) if isinstance(self.first, Edge) else self.first
        return replace(self, stages=tuple(new if name == old else name for name in self.stages), first=first)


def this_step(stage: Stage | str) -> Edge:
    """Return an edge to a stage's output in the same inner step, or to its only output in the iteration."""
    return Edge("this_step", (_name(stage),))


def last_step(stage: Stage | str, *, first: Stage | str | None = None) -> Edge:
    """Return an edge to a stage's output in the previous inner step.

    In the first step, the edge reads `first`, an edge name or a stage, or nothing if `first` is None.
    """
    return Edge("last_step", (_name(stage),), _first(first))


def every_step(stage: Stage | str) -> Edge:
    """Return an edge to the tuple of a stage's outputs in all inner steps of the iteration."""
    return Edge("every_step", (_name(stage),))


def steps_so_far(stage: Stage | str, *, among: Per | None = None) -> Edge:
    """Return an edge to the tuple of a stage's outputs in the inner steps up to and including this one.

    `among` restricts the inner steps to include.
    """
    return Edge("steps_so_far", (_name(stage),), among=among)


def last_iteration(stage: Stage | str, *, first: Stage | str | None = None) -> Edge:
    """Return an edge to a stage's output in the previous iteration.

    In the first iteration, the edge reads `first`, an edge name or a stage, or nothing if `first` is None.
    """
    return Edge("last_iteration", (_name(stage),), _first(first))


def last_iterations(*stages: Stage | str) -> Edge:
    """Return an edge to a Span: the outputs in this iteration and the `algorithm.earlier_iterations` before it."""
    return _span("last_iterations", stages)


def since_start(*stages: Stage | str) -> Edge:
    """Return an edge to a Span of all outputs of these stages so far."""
    return _span("since_start", stages)


def _span(word: Word, stages: tuple[Stage | str, ...]) -> Edge:
    if not stages:
        raise GraphError(f"{word}() needs at least one stage; name the stages whose outputs it reads")
    return Edge(word, tuple(map(_name, stages)))


def _name(stage: Any) -> str:
    if not isinstance(stage, Stage | str):
        raise GraphError(f"an edge must come from a stage or the name of one, as in this_step('adapt'); got {stage!r}")
    return stage if isinstance(stage, str) else stage.name


def _first(first: Any) -> Edge | str | None:
    return first if isinstance(first, Edge | str | None) else this_step(first)
