"""Spans of a run's outputs, summed up as records name them."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from metaloom.storage.format.records import SpanInput
from metaloom.storage.format.refs import Span, StageRef


class SpanSums:
    """Sums up spans, each from where the one before it ended: a long run names ever longer ones.

    Args:
        num_steps: counts the real environment steps in an output: 0 where it holds no episodes.
    """

    def __init__(self, num_steps: Callable[[StageRef], int]) -> None:
        self._num_steps = num_steps
        self._digests: dict[int, dict[StageRef, str]] = {}
        self._sums: dict[tuple[tuple[str, ...], int], _Sum] = {}

    def add(self, ref: StageRef, digest: str) -> None:
        """Take an output into account."""
        self._digests.setdefault(ref.iteration, {})[ref] = digest
        # Computed again after it was lost: what was summed up beyond it did not count it.
        for key in [key for key, known in self._sums.items() if ref.stage in key[0] and ref.iteration < known.end]:
            del self._sums[key]

    def of(self, span: Span) -> SpanInput | None:
        """Sum up the outputs of a span; None if there are none."""
        key = (span.stages, span.first)
        known = self._sums.get(key)
        if known is None or known.end > span.last + 1:
            known = self._sums[key] = _Sum(span.first)
        for iteration in range(known.end, span.last + 1):
            digests = self._digests.get(iteration, {})
            for ref in sorted(span.of(digests), key=lambda ref: (ref.step, span.stages.index(ref.stage))):
                known.add(ref, digests[ref], self._num_steps(ref))
            known.end = iteration + 1
        if known.first is None or known.last is None:
            return None
        return SpanInput(
            span.stages, known.first, known.last, known.outputs, known.steps, known.lines.copy().hexdigest()
        )


@dataclass
class _Sum:
    """Sum of what came before iteration `end`."""

    end: int
    first: StageRef | None = None
    last: StageRef | None = None
    outputs: int = 0
    steps: int = 0
    lines: Any = field(default_factory=hashlib.sha256)

    def add(self, ref: StageRef, digest: str, num_steps: int) -> None:
        self.first, self.last = self.first or ref, ref
        self.outputs += 1
        self.steps += num_steps
        self.lines.update(f"{ref.iteration} {ref.stage} {ref.step} {digest}\n".encode())
