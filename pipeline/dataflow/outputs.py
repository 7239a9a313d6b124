"""Access to the outputs of other stages."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.graph import Graph
from metaloom.pipeline.dataflow.refs import Span, StageRef
from metaloom.pipeline.types import Array, EpisodeBatch

T = TypeVar("T")


class Outputs(Protocol):
    """Source of stage outputs: a Run, its RunWriter, or a source that recomputes missing outputs."""

    def load(self, ref: StageRef) -> Any:
        """Load an output."""
        ...

    def lengths(self, ref: StageRef) -> Array:
        """Return the number of steps of each episode of a batch, [B, E]."""
        return self.load(ref).lengths

    def experience(self, ref: StageRef) -> EpisodeBatch:
        """Load a batch of episodes; behavior and reward terms may be missing."""
        return self.load(ref)


class SpanOutputs:
    """Outputs of a span, loaded on demand."""

    def __init__(self, span: Span, graph: Graph, config: RunConfig, outputs: Outputs) -> None:
        self.span = span
        self._graph, self._config, self._outputs = graph, config, outputs

    def refs(self, iteration: int) -> list[StageRef]:
        """Return an iteration's outputs, in the order in which they were computed."""
        return self._graph.within(self._config, self.span, iteration)

    def load(self, ref: StageRef) -> Any:
        """Load one of the outputs. Like the next two methods, raises ValueError for outputs outside the span."""
        return read_only(self._graph[ref.stage].as_declared(self._outputs.load(self._own(ref))))

    def lengths(self, ref: StageRef) -> Array:
        """Return the number of steps of each episode of a batch, [B, E], reading nothing else."""
        return self._outputs.lengths(self._own(ref))

    def experience(self, ref: StageRef) -> EpisodeBatch:
        """Return a batch of episodes, of which behavior and reward terms may be missing."""
        return read_only(self._outputs.experience(self._own(ref)))

    def _own(self, ref: StageRef) -> StageRef:
        if ref not in self.span:
            raise ValueError(f"{ref} is not among the outputs that were declared: {self.span}")
        return ref


def read_only(value: T) -> T:
    """Return an output with read-only arrays, since it may still be written to disk and other stages read it."""
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    elif isinstance(value, Mapping):
        for part in cast(Mapping[str, object], value).values():
            read_only(part)
    elif is_dataclass(value):
        for f in fields(value):
            read_only(getattr(value, f.name))
    return value
