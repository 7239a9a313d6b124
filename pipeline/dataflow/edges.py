"""Edges: descriptions of the outputs that a stage's input reads.

An edge is relative to the stage that reads it: `this_step(PROCESS_SAMPLES)`. Order, lineage, static checks, diagrams
and composition are derived from edges without calling any stage.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from metaloom.pipeline.dataflow.stage import GraphError, Per, Stage

Word = Literal[
    "this_step", "last_step", "every_step", "steps_so_far", "last_iteration", "last_iterations", "since_start"
]


@dataclass(frozen=True)
class Edge:
    """Outputs that a stage reads.

    Attributes:
        word: Rule that selects the outputs, such as `this_step`.
        stages: Names of the stages that compute the outputs.
        first: Edge, or its name, that is read if there is no earlier step or iteration.
        among: The steps that count; default: all of the stage.
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
    """Read a stage's output of the same inner step, or its only output of the iteration."""
    return Edge("this_step", (_name(stage),))


def last_step(stage: Stage | str, *, first: Stage | str | None = None) -> Edge:
    """Read a stage's output of the previous inner step.

    Args:
        stage: The stage.
        first: Edge, by its name, or stage that is read in the first step; None: nothing.
    """
    return Edge("last_step", (_name(stage),), _first(first))


def every_step(stage: Stage | str) -> Edge:
    """Read a stage's outputs of all inner steps of the iteration, as a tuple."""
    return Edge("every_step", (_name(stage),))


def steps_so_far(stage: Stage | str, *, among: Per | None = None) -> Edge:
    """Read a stage's outputs of the inner steps up to this one, as a tuple.

    Args:
        stage: The stage.
        among: The steps that count; default: all.
    """
    return Edge("steps_so_far", (_name(stage),), among=among)


def last_iteration(stage: Stage | str, *, first: Stage | str | None = None) -> Edge:
    """Read a stage's output of the previous iteration.

    Args:
        stage: The stage.
        first: Edge, by its name, or stage that is read in the first iteration; None: nothing.
    """
    return Edge("last_iteration", (_name(stage),), _first(first))


def last_iterations(*stages: Stage | str) -> Edge:
    """Read some stages' outputs of this iteration and of `algorithm.earlier_iterations` before it, as a Span."""
    return _span("last_iterations", stages)


def since_start(*stages: Stage | str) -> Edge:
    """Read all outputs of some stages so far, as a Span."""
    return _span("since_start", stages)


def _span(word: Word, stages: tuple[Stage | str, ...]) -> Edge:
    if not stages:
        raise GraphError(f"found {word}() without a stage; required the stages whose outputs are read")
    return Edge(word, tuple(map(_name, stages)))


def _name(stage: Any) -> str:
    if not isinstance(stage, Stage | str):
        raise GraphError(
            f"found an edge from {stage!r}; required a stage, or the name of one, as in this_step('adapt')"
        )
    return stage if isinstance(stage, str) else stage.name


def _first(first: Any) -> Edge | str | None:
    return first if isinstance(first, Edge | str | None) else this_step(first)
