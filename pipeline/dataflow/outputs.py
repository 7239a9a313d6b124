"""Access to other stages' outputs."""

from collections.abc import Mapping
from copy import deepcopy
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
        """Return the length of each episode in a batch, [B, E]."""
        return self.load(ref).lengths

    def experience(self, ref: StageRef) -> EpisodeBatch:
        """Load a batch of episodes; `behavior` and `reward_terms` may be empty."""
        return self.load(ref)


class SpanOutputs:
    """Outputs of a span, loaded on demand."""

    def __init__(self, span: Span, graph: Graph, config: RunConfig, outputs: Outputs) -> None:
        self.span = span
        self._graph, self._config, self._outputs = graph, config, outputs

    def refs(self, iteration: int) -> list[StageRef]:
        """Return references to the span's outputs within an iteration, in the order in which they were computed."""
        return self._graph.within(self._config, self.span, iteration)

    def load(self, ref: StageRef) -> Any:
        """Load one of the outputs. Like `lengths` and `experience`, raises ValueError for outputs outside the span."""
        value = deepcopy(self._outputs.load(self._own(ref)))  # as in the runner
        return read_only(self._graph[ref.stage].as_declared(value))

    def lengths(self, ref: StageRef) -> Array:
        """Return the length of each episode in a batch, [B, E], without reading anything else."""
        return self._outputs.lengths(self._own(ref))

    def experience(self, ref: StageRef) -> EpisodeBatch:
        """Load a batch of episodes; `behavior` and `reward_terms` may be empty."""
        return read_only(self._outputs.experience(self._own(ref)))

    def _own(self, ref: StageRef) -> StageRef:
        if ref not in self.span:
            raise ValueError(f"{ref} is not among the outputs that were declared: {self.span}")
        return ref


def read_only(value: T) -> T:
    """Make an output's arrays read-only and return the output: other stages read it, and it may not be on disk yet."""
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    elif isinstance(value, Mapping):
        for part in cast(Mapping[str, object], value).values():
            read_only(part)
    elif is_dataclass(value):
        for f in fields(value):
            read_only(getattr(value, f.name))
    return value
